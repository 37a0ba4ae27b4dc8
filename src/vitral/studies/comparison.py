"""`vitral compare`: several networks on the same held-out images, with the significance of their differences."""

from __future__ import annotations

import dataclasses
import itertools
import shlex
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitral.console import Described, go_on
from vitral.data import DataSet, Split
from vitral.data.checks.groups import common_groups
from vitral.data.loader import Progress
from vitral.data.options import OWN_DATA, DataOptions
from vitral.data.same import same_images
from vitral.data.tables_in_memory import Examples
from vitral.errors import UsageError
from vitral.evaluation.intervals import Groups, count_groups
from vitral.evaluation.metrics import Evaluation, measure
from vitral.folders import is_run
from vitral.inference.options import InferenceOptions
from vitral.inference.outputs.output import require_classes
from vitral.inference.predictor import Predictor
from vitral.kinds import as_path, checked
from vitral.model import summarize
from vitral.studies.paired import LEVEL, Difference, holm, mcnemar, paired_interval, sums_of
from vitral.training.run_folder import RunFolder
from vitral.wording import count, in_groups
from vitral.workflows.evaluate import Evaluated, evaluate_images
from vitral.workflows.planning.draft import format_value

_ROUNDS, _BATCH = 5, 32
AUGMENTATION = (
    "augment",
    "randaugment",
    "crop",
    "crop_area",
    "shift",
    "flip",
    "erase",
    "mixup",
    "cutmix",
    "label_smoothing",
)
"""Options of the augmentation, which differences of accuracy come from most often."""
_STATED = ("init", "epochs", "minutes", "out", "log", "threads", "workers")
"""Options that other notes state, or that do not change what is learned."""
_STEADY = 0.15
"""Share of a time by which it may vary without a note."""


@dataclass(frozen=True, eq=False)
class Contender:
    """One network of a comparison, with its figures on the common images."""

    name: str
    evaluation: Evaluation
    correct: np.ndarray
    """bool (n,), in the order of `Comparison.images`."""
    predicted: tuple[str, ...]
    """The predicted class of each image."""
    parameters: int
    flops: int
    """Of one image."""
    size: tuple[int, int]
    """Height and width of the network's images, in pixels."""
    images_per_second: float
    """Batches of 32 on the device, measured in turn with the others: median of five rounds."""
    seconds_per_image: float
    """One image at a time, measured likewise."""
    caution: str
    start: str = ""
    """The weights that its run started from; empty if it is no run."""
    length: str = ""
    """The epochs of its run; empty if it is no run."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The options of its run; empty if it is no run."""
    held_out: int = 0
    """Number of images that it was measured on, of which those common to all are compared."""

    def to_json(self) -> dict[str, object]:
        about = {name: getattr(self, name) for name in ("name", "parameters", "flops", "size", "images_per_second")}
        return {
            **about,
            "seconds_per_image": self.seconds_per_image,
            "caution": self.caution,
            "start": self.start,
            "length": self.length,
            "accuracy": self.evaluation.accuracy,
            "accuracy_interval": self.evaluation.accuracy_interval,
            "loss": self.evaluation.loss,
            "ece": self.evaluation.ece,
            "macro_f1": self.evaluation.macro_f1,
        }


@dataclass(frozen=True, eq=False, repr=False)
class Comparison(Described):
    """Contenders, best first, and the difference of every pair of them.

    Example:
        found = vitral.compare(["runs/photos", "runs/other"])
        print(found.conclusion())
    """

    source: str
    split: str
    device: str
    images: Split
    """The common images, labeled with the classes of the first contender given."""
    contenders: tuple[Contender, ...]
    differences: tuple[Difference, ...]
    groups: Groups = None
    """(n,), equal for images that belong together; None if each is on its own."""
    noise: float = 0.0
    """Difference of the slowest and the fastest round of one network, as a share of its median: the largest of all."""

    def only_right(self, index: int) -> np.ndarray:
        """Indices of the images that only this contender classifies correctly."""
        others = [one.correct for place, one in enumerate(self.contenders) if place != index]
        return np.flatnonzero(self.contenders[index].correct & ~np.any(others, axis=0))

    def described(self) -> dict[str, str]:
        """Return the facts that `repr` and notebooks show, as a dict from name to text."""
        measured = {one.name: f"{one.name}: {one.evaluation.headline()}" for one in self.contenders}
        return {"images": self.counted(), **measured, "conclusion": self.conclusion()}

    def conclusion(self) -> str:
        """Return a sentence: the better network, or that no difference can be claimed."""
        best = self.contenders[0].name
        against = [one for one in self.differences if best in (one.first, one.second)]
        beaten = [one.second if one.first == best else one.first for one in against if one.claimed]
        rest = [one.second if one.first == best else one.first for one in against if not one.claimed]
        if not beaten:
            return f"No difference can be claimed between {best} and {_listed(rest)} on {self.counted()}."
        said = f"{best} is more accurate than {_listed(beaten)} on {self.counted()}."
        return f"{said} Between it and {_listed(rest)} no difference can be claimed." if rest else said

    def notes(self) -> list[str]:
        """Return what a reader of the figures has to know: cautions, differing starts and lengths, unsteady times."""
        cautions: dict[str, list[str]] = {}
        for one in self.contenders:
            cautions.setdefault(one.caution, []).append(one.name)
        found = [f"{_listed(names)}: {caution}" for caution, names in cautions.items() if caution]
        starts = {one.name: one.start for one in self.contenders if one.start}
        lengths = {one.name: one.length for one in self.contenders if one.length}
        for differing, each in (("starts", starts), ("lengths of training", lengths)):
            if len(set(each.values())) > 1:
                stated = ", ".join(f"{name} {value}" for name, value in each.items())
                found.append(f"the {differing} differ, which may explain differences of accuracy: {stated}")
        if options := self._differing():
            found.append(f"options of the runs that differ: {'; '.join(options)}")
        larger = [f"{one.name} {one.held_out:,}" for one in self.contenders if one.held_out > len(self.images)]
        if larger:
            found.append(f"only the {self.counted()} held out of all are compared; held out are: {', '.join(larger)}")
        if self.noise > _STEADY:
            why = "the machine has other work, or shares its cores"
            found.append(f"times of one network varied by {self.noise:.0%} from round to round: {why}")
        if count_groups(self.groups, len(self.images)) < len(self.images):
            found.append("images of a group are alike: intervals and p count groups")
        return found

    def _differing(self) -> list[str]:
        """Options of the runs that differ, those of the augmentation first: "augment: a none, b affine"."""
        runs = [one for one in self.contenders if one.options]
        names = dict.fromkeys([*AUGMENTATION, *(name for one in runs for name in one.options)])
        found = list[str]()
        for name in (name for name in names if name not in _STATED):
            values = [format_value(one.options.get(name)) for one in runs]
            if len(set(values)) > 1:
                each = ", ".join(f"{one.name} {value}" for one, value in zip(runs, values, strict=True))
                found.append(f"{name.replace('_', ' ')}: {each}")
        return found

    def counted(self, kind: str = "image") -> str:
        """Number of common images, and of groups if there are fewer: "400 images in 80 groups"."""
        return in_groups(len(self.images), count_groups(self.groups, len(self.images)), kind)

    def to_json(self) -> dict[str, object]:
        differences = [
            {
                "first": one.first,
                "second": one.second,
                "difference": one.difference,
                "interval": list(one.interval),
                "only_first": one.only_first,
                "only_second": one.only_second,
                "agreement": one.agreement,
                "p_value": one.p_value,
                "p_adjusted": one.p_adjusted,
                "claimed": one.claimed,
            }
            for one in self.differences
        ]
        only = {one.name: [self.images.names[i] for i in self.only_right(k)] for k, one in enumerate(self.contenders)}
        return {
            "data": self.source,
            "split": self.split,
            "images": len(self.images),
            "groups": count_groups(self.groups, len(self.images)),
            "device": self.device,
            "contenders": [one.to_json() for one in self.contenders],
            "differences": differences,
            "conclusion": self.conclusion(),
            "only_right": only,
        }


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


@partial(checked, but=("data",))  # `vitral.data.load` checks it
def compare(
    models: Sequence[str | Path | Predictor],
    data: str | Path | DataSet | Examples | None = None,
    *,
    split: str | None = None,
    data_root: str | Path = "data",
    device: str = "auto",
    precision: str = "auto",
    progress: Progress | None = None,
) -> Comparison:
    """Measure two or more networks on the same images, and the difference of every pair with its interval.

    Args:
        models: Run folders, weights files or predictors.
        data: A path, a name, or data in memory, as for `vitral.load_data`. By default, each run is measured on its own
            held-out images, and the comparison uses the images on which none of the runs was trained.
        split: The split to use (default: test, otherwise val).
        data_root: Folder for data sets that vitral downloads by name, such as `cifar10`.
        device: `auto`, `cpu`, `cuda` or `mps`.
        precision: `auto`, `bf16` or `fp32`.
        progress: Function that is called with the number of images that are done.

    Returns:
        The metrics of each network, and the differences.

    Raises:
        UsageError: Only one model is given, or no image was held out of all of them.

    Example:
        found = vitral.compare(["runs/photos", "runs/other"])
        print(found.conclusion())
    """
    models = [as_path(one) for one in models]
    if len(models) < 2:
        raise UsageError("a comparison takes two networks or more", hint="name two runs or weights files")
    names = _names(models)
    held_out, options = DataOptions(data, split, data_root), InferenceOptions(device, precision)
    found = [evaluate_images(one, held_out, options, progress) for one in models]
    for one in found:
        require_classes(one.predictor.output, "vitral compare", "vitral evaluate RUN, for each of them")
    chosen = _common(found, names)
    groups = common_groups([one.images.select(numbers).groups for one, numbers in zip(found, chosen, strict=True)])
    evaluations = [
        measure(one.probabilities[numbers], one.images.labels[numbers], one.predictor.classes, groups)
        for one, numbers in zip(found, chosen, strict=True)
    ]
    used = [one if isinstance(one, Predictor) else options.load(one) for one in models]  # as `vitral predict` does
    go_on(progress, "timing the networks")
    rates, latencies, noise = _speeds(used, found[0].images)
    contenders = list[Contender]()
    for name, one, numbers, evaluation, rate, latency in zip(
        names, found, chosen, evaluations, rates, latencies, strict=True
    ):
        answers = one.probabilities[numbers].argmax(1)
        summary = summarize(one.predictor.model)
        contenders.append(
            Contender(
                name,
                evaluation,
                answers == one.images.labels[numbers],
                tuple(one.predictor.classes[answer] for answer in answers),
                summary.parameters,
                summary.flops,
                one.predictor.preprocessing.image_size,
                rate,
                latency,
                f"{one.changed} {one.caution}".strip(),
                *_training(one.predictor.source),
                held_out=len(one.images),
            )
        )
    first = found[0]
    images = first.images.select(chosen[0])
    order = sorted(range(len(contenders)), key=lambda k: (-contenders[k].evaluation.accuracy, k))
    ranked = tuple(contenders[k] for k in order)
    device_name = first.predictor.machine.name
    found_differences = differences(ranked, groups)
    return Comparison(first.source, first.split, device_name, images, ranked, found_differences, groups, noise)


def before_and_now(before: str | Path, now: str | Path) -> str:
    """Return sentences that compare two runs on the images that both hold out; `UsageError` if there are none."""
    found = [evaluate_images(run, OWN_DATA, InferenceOptions()) for run in (before, now)]
    for one in found:
        require_classes(one.predictor.output, "vitral compare", "vitral evaluate RUN, for each of them")
    chosen = _common(found, ["the run before", "this run"])
    right = [
        one.probabilities[numbers].argmax(1) == one.images.labels[numbers]
        for one, numbers in zip(found, chosen, strict=True)
    ]
    groups = common_groups([one.images.select(numbers).groups for one, numbers in zip(found, chosen, strict=True)])
    each = right[1].astype(np.int64) - right[0]
    claimed = mcnemar(sums_of(each, groups)) < LEVEL
    low, high = (100 * end for end in paired_interval(each, groups))
    relabeled = found[0].relabeled if len(chosen[0]) == len(found[0].images) else 0
    images = f"{len(each):,} images" + (f" ({relabeled:,} relabeled since)" if relabeled else "")
    rates = f"On the same {images}, {before} reaches {right[0].mean():.1%} accuracy and this run {right[1].mean():.1%}"
    difference = f"The difference is {100 * each.mean():+.1f} points (95% interval {low:+.1f} to {high:+.1f})"
    better = f"so this run is {'better' if each.mean() > 0 else 'worse'}"
    return f"{rates}. {difference}, {better if claimed else 'which may be chance'}"


def _training(source: str) -> tuple[str, str, Mapping[str, object]]:
    """The weights that a run started from, the epochs that it trained, and its options; empty for other weights."""
    if not is_run(Path(source)):
        return "", "", {}
    folder = RunFolder(source)
    epochs, run = len(folder.read_history()), folder.read_plan().run
    return run.init or "random weights", count(epochs, "epoch") if epochs else "", run.to_json()


def differences(contenders: Sequence[Contender], groups: Groups = None) -> tuple[Difference, ...]:
    """The difference of every pair, the first of which stands before the second; `groups` (n,) of their images."""
    pairs = list(itertools.combinations(contenders, 2))
    each = [a.correct.astype(np.int64) - b.correct for a, b in pairs]
    p_values = [mcnemar(sums_of(one, groups)) for one in each]
    found = list[Difference]()
    for (a, b), one, p, adjusted in zip(pairs, each, p_values, holm(p_values), strict=True):
        only_a, only_b = int((one > 0).sum()), int((one < 0).sum())
        alike = float(np.mean([x == y for x, y in zip(a.predicted, b.predicted, strict=True)]))
        interval, mean = paired_interval(one, groups), (only_a - only_b) / len(one)
        found.append(Difference(a.name, b.name, mean, interval, only_a, only_b, alike, p, adjusted))
    return tuple(found)


def _names(models: Sequence[str | Path | Predictor]) -> list[str]:
    """Name the models by their folder or file, or by the whole path where two are called the same."""
    paths = [one.source if isinstance(one, Predictor) else str(one) for one in models]
    if len(set(paths)) < len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise UsageError("a network is not compared with itself", where=twice, hint="name each network once")
    short = [Path(path).name or path for path in paths]
    return short if len(set(short)) == len(short) else paths


def _common(found: Sequence[Evaluated], names: Sequence[str]) -> list[np.ndarray]:
    """Return for each evaluation the indices of the images that all of them have, in one order."""
    first = found[0].images
    places = [{n: n for n in range(len(first))}, *(dict(same_images(first, one.images)) for one in found[1:])]
    shared = [number for number in range(len(first)) if all(number in place for place in places)]
    if not shared:
        why = "the images held out of one are not those held out of another"
        runs = shlex.join(one.predictor.source for one in found)
        hint = f"vitral compare {runs} --data FOLDER, with labeled images that none of them was trained on"
        raise UsageError("no image is held out of all these runs", why=why, hint=hint)
    chosen = [np.array([place[number] for number in shared]) for place in places]
    labels = [
        [one.predictor.classes[k] for k in one.images.labels[numbers]]
        for one, numbers in zip(found, chosen, strict=True)
    ]
    for name, other in zip(names, labels, strict=True):
        if other != labels[0]:
            index = next(i for i, (a, b) in enumerate(zip(labels[0], other, strict=True)) if a != b)
            why = f"it is “{labels[0][index]}” to {names[0]} and “{other[index]}” to {name}"
            raise UsageError("the networks give an image different classes", where=first.names[shared[index]], why=why)
    return chosen


def _speeds(predictors: Sequence[Predictor], images: Split) -> tuple[list[float], list[float], float]:
    """Images a second in batches of 32, and seconds of one image alone, without decoding; and the `noise` of both."""
    count = min(_BATCH, len(images))
    raw = [images.image(i) for i in range(count)]
    batches = [
        torch.stack([one.prepare(pixels) for pixels in raw]).repeat(-(-_BATCH // count), 1, 1, 1)[:_BATCH]
        for one in predictors
    ]

    def seconds(predictor: Predictor, batch: Tensor) -> float:
        started = time.perf_counter()
        predictor.logits(batch.to(predictor.machine.device)).cpu()
        return time.perf_counter() - started

    found, noise = [], 0.0
    for size in (_BATCH, 1):
        for predictor, batch in zip(predictors, batches, strict=True):
            seconds(predictor, batch[:size])  # the first call compiles and allocates
        rounds = [
            [seconds(predictor, batch[:size]) for predictor, batch in zip(predictors, batches, strict=True)]
            for _ in range(_ROUNDS)
        ]
        columns = list(zip(*rounds, strict=True))
        found.append([statistics.median(column) for column in columns])
        noise = max(noise, *((max(each) - min(each)) / statistics.median(each) for each in columns))
    return [_BATCH / one for one in found[0]], found[1], noise
