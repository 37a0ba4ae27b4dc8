"""Load weights of any format, from a path, a hub or memory, with a report on every tensor."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitral.data.images.preprocessing import Preprocessing
from vitral.data.targets import SEVERAL_LABELS
from vitral.errors import RunError, UsageError, WeightsError, empty, nearest, unknown
from vitral.folders import is_run
from vitral.model import ModelConfig, Network, ViTConfig, network
from vitral.model.settings import SWITCHES
from vitral.weights import class_names, fitted, native, project
from vitral.weights import in_memory as modules
from vitral.weights.formats import FORMATS, detect, has_format, huggingface_code
from vitral.weights.formats.format import Format
from vitral.weights.library import library_network, library_weights
from vitral.weights.loaded import Loaded
from vitral.weights.naming import given_names, named
from vitral.weights.native import Weights
from vitral.weights.notes import Alarm, AssumedNames, Caution, OfClassNames
from vitral.weights.own_module import own_weights
from vitral.weights.preprocessing_configs import from_timm, with_levels
from vitral.weights.read import hub
from vitral.weights.read.references import BUILT_IN, built_in, holds_weights
from vitral.weights.read.source import Source, non_finite, open_source
from vitral.weights.report import Assumption, Line, LoadReport
from vitral.weights.root import rooted
from vitral.weights.settle import Settled, check_own, settle
from vitral.weights.transform.adapt import adapt
from vitral.weights.transform.keymap import fits
from vitral.weights.transform.resize import SCHEMES

_KINDS = f"give a run folder, a weights file, timm:NAME, hf:ORG/NAME, {' or '.join(BUILT_IN)}"


@dataclass(frozen=True)
class _Stated:
    """Properties of the weights that the caller states, because no file does."""

    format: str | None = None
    heads: int | None = None
    like: str | None = None
    weights_key: str | None = None
    class_order: str | None = None

    def refuse_for_whole(self, where: str) -> None:
        """Raise `UsageError` for options that a whole network with its classes leaves nothing to."""
        if self.weights_key is not None:
            hint = "leave out --weights-key, or weights_key in Python"
            raise UsageError(
                "--weights-key does not apply, because the file contains one network", where=where, hint=hint
            )
        if self.class_order is not None:
            raise class_names.stated_twice(where)


def read(
    reference: str | Path | nn.Module,
    *,
    format: str | None = None,
    heads: int | None = None,
    like: str | None = None,
    scheme: str | None = None,
    new_head: bool = False,
    weights_key: str | None = None,
    class_order: str | None = None,
    levels: tuple[int, int] | None = None,
    allow_non_finite: bool = False,
    image_size: int | tuple[int, int] | None = None,
    patch_size: int | tuple[int, int] | None = None,
    channels: int | None = None,
    classes: int | Sequence[str] | None = None,
) -> Loaded:
    """Read weights of any known format.

    `reference` is a run folder, a file, a folder in a hub's layout, `timm:NAME`, `hf:ORG/NAME`, or `backbone` or `demo`
    in the package; a project that was taught in a browser; or a network in memory of timm, torchvision, transformers or
    vitral, whose fp32 tensors on the CPU are used without a copy. `image_size`, `patch_size`, `channels` and `classes`
    are new values; `scheme` resizes positions (default: that of the weights' origin). `format`, `heads` and `like`
    (`timm:NAME`, an architecture) state what no file states, `weights_key` the prefix of the network in a file that
    holds several, `class_order` the order of classes without names (`natural`, `text`, or a file), and `levels` black
    and white of images with more than 8 bits. `classes` is a number, or the names of the classes of weights that state
    none, such as those of a network in memory: a head that was replaced there is accepted with as many names as it has
    outputs.

    Raises `WeightsError` for weights that are damaged, unknown or do not fit, for `format`, `heads` or `like` that
    contradict a file, and for values that are not finite, unless `allow_non_finite`; `UsageError` for another number of
    classes without `new_head`.
    """
    changes = {"image_size": image_size, "patch_size": patch_size, "channels": channels, "classes": classes}
    wanted: dict[str, Any] = {name: value for name, value in changes.items() if value is not None}
    names = given_names(wanted, new_head)
    stated = _Stated(format, heads, like, weights_key, class_order)
    if isinstance(reference, nn.Module):
        outputs = len(names) or (None if new_head else wanted.get("classes"))
        found = named(_from_memory(reference, stated, outputs), names)
        return fit(_at_levels(found, levels), scheme=scheme, new_head=new_head, **wanted)
    path, notes, pinned = locate(reference)
    source = open_source(path)
    source = dataclasses.replace(source, where=str(reference))
    if "vitral" in source.metadata:
        loaded = _native(path, source, pinned)
        check_own(loaded.weights.config, source.where, format, heads, like)
        stated.refuse_for_whole(source.where)
    elif project.is_project(source.metadata):
        loaded = project.load(source, pinned)
        check_own(loaded.weights.config, source.where, format, heads, like)
        stated.refuse_for_whole(source.where)
    elif (header := huggingface_code.header(source.config)) is not None:
        loaded = _saved_again(path, source, header, pinned)
    elif (name := library_network(source)) and (format, heads, like) == (None, None, None):
        weights, account = library_weights(source, name, class_order)
        loaded = Loaded(weights, account, "timm", pinned)
    else:
        loaded = _foreign(source, pinned, stated, wanted.get("image_size"))
    notes += [*source.notes, *loaded.account.notes]
    if not native.known_finite(source.metadata):
        notes += _check_finite(loaded, allow_non_finite)
    loaded = dataclasses.replace(loaded, account=dataclasses.replace(loaded.account, notes=tuple(notes)))
    if names and not loaded.account.nameless:
        raise UsageError(
            "these weights already contain the names of their classes", where=source.where, hint="leave out classes"
        )
    return fit(_at_levels(named(loaded, names), levels), scheme=scheme, new_head=new_head, **wanted)


def _at_levels(loaded: Loaded, levels: tuple[int, int] | None) -> Loaded:
    preprocessing, notes = with_levels(loaded.weights.preprocessing, levels)
    output, account = loaded.weights.output, loaded.account.noted(*notes)
    if notes:
        output, account = fitted.still_fitted(loaded.weights, account, "levels")
    weights = dataclasses.replace(loaded.weights, preprocessing=preprocessing, output=output)
    return dataclasses.replace(loaded, weights=weights, account=account)


def _check_finite(loaded: Loaded, allowed: bool) -> list[Alarm]:
    """Refuse weights that hold NaN or an infinity, or return a note on them if they are `allowed`."""
    bad = non_finite(loaded.weights.state)
    if not bad:
        return []
    names = ", ".join(bad[:3]) + (f" and {len(bad) - 3} more" if len(bad) > 3 else "")
    if not allowed:
        typed = shlex.quote(loaded.account.source)
        hint = f"use earlier weights, or inspect these in a copy: vitral convert {typed} NEW --allow-non-finite"
        raise WeightsError("weights that are not finite", where=loaded.account.source, why=f"in {names}", hint=hint)
    return [Alarm(f"WARNING values that are not finite in {names}")]


def _from_memory(module: nn.Module, stated: _Stated, classes: int | None) -> Loaded:
    """Load a network in memory, of vitral or another library. `classes` is the number of outputs, if it is given."""
    module = modules.unwrapped(module)
    where = modules.described(module)
    stated.refuse_for_whole("a network in memory")
    if isinstance(module, Network):
        weights = own_weights(module, classes)
        check_own(weights.config, where, stated.format, stated.heads, stated.like)
        notes = (
            Caution("preprocessing assumed: not stated by the module"),
            AssumedNames("class names assumed: not stated by the module"),
        )
        account = LoadReport(where, "vitral's own", _unchanged(weights), notes=notes)
        parts = {name: part for name, part in module.named_modules() if isinstance(part, Network)}
        switches = {
            name: {key: vars(part)[key] for key in SWITCHES if key in vars(part)} for name, part in parts.items()
        }
        return Loaded(weights, account, "native", where, switches=switches)
    source = modules.source_of(module)
    if stated.heads is not None or stated.like is not None:
        raise UsageError(
            "a network in memory already has its number of heads", where=where, hint="leave out heads and like"
        )
    loaded = _foreign(source, where, stated, None)
    return dataclasses.replace(loaded, account=loaded.account.noted(*_check_finite(loaded, True)))


def _unchanged(weights: Weights) -> tuple[Line, ...]:
    """Lines of a load report for tensors that are taken as they are."""
    return tuple(Line(name, tuple(tensor.shape), "loaded", name) for name, tensor in weights.state.items())


def locate(reference: str | Path) -> tuple[Path, list[str], str]:
    """Locate the weights of a reference: their path, notes on the search, and the pinned reference.

    Raises `RunError` for a run without weights and for a folder with neither a run nor weights, `UsageError` for an
    empty reference.
    """
    text = str(reference)
    if not text:
        raise empty("RUN or WEIGHTS", _KINDS)
    if hub.is_reference(text):
        fetched = hub.resolve(text)
        return fetched.path, [f"fetched revision {fetched.revision}", *filter(None, [fetched.note])], fetched.reference
    if own := built_in(reference):
        return own.file, [], text
    path = Path(reference)
    if path.is_dir() and is_run(path):
        weights = path / "model.safetensors"
        records = (file for file in (path / "result.json", path / "metrics.jsonl") if file.is_file())
        if not weights.is_file() and any(file.stat().st_size for file in records):  # empty before the first epoch ends
            hint = "put the file back, or repeat the command in config.json with --overwrite"
            raise RunError(
                "the run's weights are missing",
                where=weights,
                why="at least one epoch was finished, so the file was moved or deleted",
                hint=hint,
            )
        if not weights.is_file():
            hint = f"vitral train --out {path} --resume"
            raise RunError("the run has no weights yet", where=path, why="it stopped in its first epoch", hint=hint)
        return weights, [], text
    if path.is_dir() and not holds_weights(path):
        raise RunError(
            "not a run folder",
            where=path,
            why="it contains neither a run nor weights",
            hint="name a run folder or a weights file, such as runs/photos",
        )
    if not path.exists():
        raise WeightsError("no such run or weights", where=path, why=_nearest(path), hint=_KINDS)
    return path, [], text


def _nearest(path: Path) -> str | None:
    """Find files with similar names in the same folder; None if there are none."""
    try:
        names = [one.name for one in path.parent.iterdir()]
    except OSError:
        return None
    near = nearest(path.name, names)
    return f"nearest: {', '.join(str(path.parent / name) for name in near)}" if near else None


def _native(path: Path, source: Source, reference: str) -> Loaded:
    file = path if path.is_file() else path / "model.safetensors"
    weights = native.from_metadata(file, source.tensors, source.metadata)
    account = LoadReport(
        source.where,
        "vitral's own",
        _unchanged(weights),
        assumed=Assumption.from_json(weights.trained.get("assumed")),
        digest=native.stated_digest(source.metadata),
    )
    return Loaded(weights, account, "native", reference, scheme=weights.trained.get("positions", Loaded.scheme))


def _saved_again(path: Path, source: Source, header: Mapping[str, object], reference: str) -> Loaded:
    """Read a network that transformers saved, by a modeling file of vitral."""
    weights = native.whole(path, source.tensors, header)
    weights = dataclasses.replace(weights, output=_output(source, weights.config), trained={"origin": source.where})
    notes = ("network and preprocessing as config.json states them",)
    account = LoadReport(source.where, "hf, by vitral's modeling file", _unchanged(weights), notes=notes)
    return Loaded(weights, account, "hf", reference)


def _foreign(source: Source, reference: str, stated: _Stated, image_size: int | tuple[int, int] | None) -> Loaded:
    """Read weights of another library.

    The steps: find the network in the file, translate its tensors, decide what they do not determine, and take
    preprocessing and class names from the file, or else assume them.
    """
    if stated.format is not None and stated.format not in FORMATS:
        raise unknown("format", stated.format, FORMATS)
    found: tuple[str, ...] = ()
    if source.stated is None:
        whole, source = source, rooted(source, lambda tensors: has_format(tensors, stated.format), stated.weights_key)
        found = source.notes[len(whole.notes) :]
    kind = FORMATS[stated.format] if stated.format else detect(source)
    state, lines = _translate(kind, source)
    settled = _settle(kind, source, state, image_size, stated)
    config = settled.config
    _check(state, config, kind.name, source.where)
    preprocessing, prepared = _preprocessing_of(kind, source, settled)
    naming = class_names.naming(kind.classes(source, config.classes), config.classes, stated.class_order, source.where)
    account = LoadReport(
        source.where,
        kind.name,
        lines,
        notes=(*found, *settled.given, *kind.assumed(source), prepared, *naming.notes),
        assumed=settled.assumed,
        nameless=naming.nameless,
        class_order=naming.order,
    )
    trained: dict[str, object] = {"origin": source.where, "format": kind.name}
    if settled.assumed:
        trained["assumed"] = settled.assumed.to_json()
    weights = Weights(config, state, _prepared(preprocessing, config), naming.names, trained, _output(source, config))
    known = source.stated or settled.architecture
    return Loaded(weights, account, kind.name, reference, known.scheme if known and known.scheme else kind.scheme)


def _settle(
    kind: Format,
    source: Source,
    state: Mapping[str, Tensor],
    image_size: int | tuple[int, int] | None,
    stated: _Stated,
) -> Settled:
    """Decide the configuration. Raises `WeightsError` for tensors of which no network can be made."""
    try:
        return settle(kind, source, state, image_size, stated.heads, stated.like)
    except (IndexError, TypeError) as error:  # a tensor with too few axes
        raise WeightsError("tensors of the wrong shape", where=source.where, why=str(error)) from None
    except UsageError as error:
        if stated.heads is not None:
            raise
        raise WeightsError(
            "the shapes of the tensors do not fit any network", where=source.where, why=error.what
        ) from None


def _preprocessing_of(kind: Format, source: Source, settled: Settled) -> tuple[Preprocessing, str]:
    """Return the preprocessing that the file states, or else that of the architecture or format; and a note on it."""
    origin: str
    if settled.architecture and not kind.stated(source):
        found = from_timm(settled.architecture.preprocessing, settled.config.image)
        origin = Caution(f"assumed, as timm:{settled.architecture.name}'s")
    else:
        found, origin = kind.preprocessing(source, settled.config)
        if source.stated is not None:
            found, origin = found.at(settled.config.image), source.stated.preprocessing_from
    note = f"images prepared as {_described(found)} ({origin})"
    return found, Caution(note) if isinstance(origin, Caution) else note


def _output(source: Source, config: ModelConfig) -> Mapping[str, object]:
    """The output that `problem_type` in Hugging Face's config.json states: a sigmoid of several labels, or numbers.

    Their pipelines also take a single output for the probability of a label.
    """
    stated, count = source.config or {}, getattr(config, "classes", 0)
    problem = stated.get("problem_type")
    if problem not in (None, *_PROBLEMS):
        why = f"its config.json states problem_type '{str(problem)[:40]}'"
        raise WeightsError(
            "an unknown kind of output", where=source.where, why=why, hint=f"known: {', '.join(_PROBLEMS)}"
        )
    single = problem is None and count == 1 and "model_type" in stated
    if problem == "multi_label_classification" or single:
        return {"task": SEVERAL_LABELS.task, "thresholds": [SEVERAL_LABELS.threshold] * count}
    if problem == "regression":
        return {"task": "numbers", "mean": [0.0] * count, "deviation": [1.0] * count}
    return native.assumed_output(config)


_PROBLEMS = ("single_label_classification", "multi_label_classification", "regression")


def _translate(kind: Format, source: Source) -> tuple[dict[str, Tensor], tuple[Line, ...]]:
    """Translate tensors to the names of parameters, with a line of the load report for each of the source."""
    tensors = kind.canonical(dict(source.tensors))
    as_in_file = {id(tensor): name for name, tensor in source.tensors.items()}
    original = {name: as_in_file.get(id(tensor), name) for name, tensor in tensors.items()}  # parts of a stack are new
    lines: list[Line] = []
    state: dict[str, Tensor] = {}
    used: dict[str, Line] = {}
    for match in kind.keymap.reading(name for name, tensor in tensors.items() if tensor.numel()):
        try:
            state[match.parameter] = match.form.read([tensors[name] for name in match.tensors])
        except (RuntimeError, IndexError, ValueError) as error:
            shapes = ", ".join(f"{name} {tuple(tensors[name].shape)}" for name in match.tensors)
            raise WeightsError(
                "tensors that do not fit together", where=source.where, why=f"{shapes}: {error}"
            ) from None
        for name in match.tensors:
            fate = "transformed" if match.form.note else "loaded"
            used[name] = Line(original[name], tuple(tensors[name].shape), fate, match.parameter, match.form.note)  # type: ignore[arg-type]
    for name, tensor in tensors.items():
        why = next((why for pattern, why in kind.ignored.items() if fits((pattern,), name)), None)
        why = why if tensor.numel() else "it is empty"  # for example the registers of a network without any
        if name not in used and why is None:
            raise WeightsError(
                f"cannot use tensor '{name}' {tuple(tensor.shape)}",
                where=source.where,
                why=f"other tensors, which come with it in the format {kind.name}, are missing",
            )
        lines.append(used.get(name) or Line(original[name], tuple(tensor.shape), "left out", None, why or ""))
    for name, shape in source.left.items():
        lines.append(Line(name, shape, "left out", None, "no part of the network"))
    return state, tuple(lines)


def _check(state: Mapping[str, Tensor], config: ModelConfig, format: str, where: str) -> None:
    """Raise `WeightsError` unless every parameter has a tensor of the right shape."""
    with torch.device("meta"):
        empty = network(config)
    if why := native.misfit(empty, state):
        raise WeightsError(f"the tensors of {format} do not make a whole network", where=where, why=why)


def fit(loaded: Loaded, *, scheme: str | None = None, new_head: bool = False, **changes: object) -> Loaded:
    """Adapt weights to another image size, patch, channels or classes, with the changes in the load report."""
    wanted = {name: value for name, value in changes.items() if value is not None}
    weights = loaded.weights
    scheme = scheme or loaded.scheme
    if scheme not in SCHEMES:
        raise unknown("scheme of resizing", scheme, SCHEMES)
    if not wanted and not new_head:
        return loaded
    state, config, resized, new = adapt(weights.state, weights.config, wanted, scheme=scheme, new_head=new_head)
    before = loaded.account
    lines = tuple(_adapted_line(line, state, resized, new) for line in before.lines)
    account = dataclasses.replace(before, lines=lines, fresh={**before.fresh, **new})
    account = account.noted(*_patch_note(weights, config, resized))
    if new_head:
        account = dataclasses.replace(account.without(OfClassNames), nameless=False)
    prepared = _prepared(weights.preprocessing, config)
    if prepared.image_size != weights.preprocessing.image_size:
        account = account.noted(f"images prepared at {'×'.join(map(str, prepared.image_size))} instead")
    output, statistics = weights.output, weights.statistics
    if new_head or config != weights.config:
        output, account = fitted.still_fitted(weights, account, "head" if new_head else "size")
        statistics = {}
    classes = class_names.default(config.classes) if new_head else weights.classes
    adapted = Weights(config, state, prepared, classes, weights.trained, {} if new_head else output, statistics)
    return dataclasses.replace(loaded, weights=adapted, account=account)


def _adapted_line(line: Line, state: dict[str, Tensor], resized: dict[str, str], new: dict[str, str]) -> Line:
    """Return the line of a tensor after `adapt`."""
    if line.ours in resized:
        return dataclasses.replace(line, fate="resized", note=resized[line.ours])
    if line.ours and (line.ours in new or line.ours not in state):
        return dataclasses.replace(line, fate="left out", ours=None, note="the head for other classes")
    return line


def _patch_note(weights: Weights, config: ModelConfig, resized: Mapping[str, str]) -> list[Alarm]:
    """Warn about patches of a size for which the network was not trained."""
    before, patch = (getattr(one, "patch", None) for one in (weights.config, config))
    trained = [(size, size) for size in weights.trained.get("patch_sizes", ())]
    if "patch_embed.proj.weight" not in resized or patch == before or patch in trained:
        return []
    return [Alarm("WARNING not trained for this patch size: fine-tune it, or train with --patch-sizes")]


def _prepared(preprocessing: Preprocessing, config: ModelConfig) -> Preprocessing:
    """Adapt preprocessing to the network's image size and channels."""
    sized = preprocessing.at(config.image)
    if sized.native and isinstance(config, ViTConfig):
        sized = dataclasses.replace(sized, multiple=config.patch)
    if sized.channels == config.channels:
        return sized
    mean, std = (sum(values) / len(values) for values in (sized.mean, sized.std))
    return dataclasses.replace(
        sized, channels=config.channels, mean=(mean,) * config.channels, std=(std,) * config.channels
    )


def _described(preprocessing: Preprocessing) -> str:
    height, width = preprocessing.image_size
    mean, std = (", ".join(f"{value:g}" for value in values) for values in (preprocessing.mean, preprocessing.std))
    return f"{height}×{width}, {preprocessing.resize}, mean {mean}, std {std}"
