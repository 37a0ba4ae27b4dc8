"""`vitral evaluate`."""

from __future__ import annotations

import dataclasses
import inspect
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from vitral.cli.options import (
    BadImages,
    Beams,
    ClassFolders,
    ClassOrder,
    DataRoot,
    Device,
    Engine,
    Format,
    Help,
    Levels,
    PatchSize,
    Precision,
    Tta,
)
from vitral.cli.output import print_json, print_notes, print_predictor_notes, print_text, say
from vitral.console import command_line, counting, stderr, stdout
from vitral.distributed.environment import is_follower, launched
from vitral.errors import UsageError
from vitral.folders import can_write

if TYPE_CHECKING:
    from vitral.data.options import DataOptions
    from vitral.inference.options import InferenceOptions
    from vitral.inference.predictor import Predictor
    from vitral.workflows.corruptions import Corrupted
    from vitral.workflows.evaluate import Evaluated
    from vitral.workflows.unknown import UnknownImages


def evaluate(
    run: Annotated[str, Help("run folder or weights file", "RUN")],
    data: Annotated[str | None, Help("labeled images (default: the run's own held-out images)", "[DATA]")] = None,
    *,
    split: Annotated[
        str | None, Help("images to use: train, val or test (default: test, otherwise val or all)")
    ] = None,
    data_root: DataRoot = "data",
    bad_images: BadImages = "error",
    label_separator: Annotated[
        str | None, Help("character between the labels in a table (default: as in the run, otherwise | or ;)")
    ] = None,
    class_folders: ClassFolders = None,
    report: Annotated[str | None, Help("also write an HTML report with the confusion matrix and the errors")] = None,
    corruptions: Annotated[
        bool,
        Help("also evaluate on corrupted images: noise, blur, weather, compression and light, in five strengths each"),
    ] = False,
    unknown: Annotated[
        str | None,
        Help(
            "also measure how well the images in this folder are detected as unknown, and save a threshold for predict"
        ),
    ] = None,
    known_share: Annotated[
        float, Help("with --unknown: fraction of the validation images that the threshold accepts as known")
    ] = 0.95,
    few_shot: Annotated[
        str | None,
        Help(
            "instead of the head, measure a least-squares classifier that is fitted to the features of a few training "
            "images per class, such as 1,5,10,25"
        ),
    ] = None,
    knn: Annotated[
        int | None, Help("instead of the head, let the N most similar training images vote; 20 is usual")
    ] = None,
    cache: Annotated[str | None, Help("folder for cached features (default: in ~/.cache/vitral)")] = None,
    device: Device = "auto",
    precision: Precision = "auto",
    engine: Engine = "auto",
    tta: Tta = "none",
    patch_size: PatchSize = None,
    beams: Beams = 1,
    class_order: ClassOrder = None,
    levels: Levels = None,
    format: Format = "text",
) -> int:
    """Evaluate a run or weights file on its own held-out images, or on other data with the same classes."""
    extra = "--corruptions" if corruptions else "--unknown" if unknown is not None else ""
    if extra and (few_shot is not None or knn is not None or launched()):
        why = "it measures predictions of the head, in one process"
        raise UsageError(f"{extra} goes without --few-shot, --knn and --nproc", why=why, hint="leave them out")
    if few_shot is not None or knn is not None:
        if report:
            raise UsageError("--report shows predictions of the head, which --few-shot and --knn do not use")
    elif cache:
        raise UsageError(
            "--cache stores features, which only --few-shot and --knn use", hint="--few-shot 1,5,10,25, or --knn 20"
        )
    if report and Path(report).is_dir():
        hint = f"--report {shlex.quote(os.path.join(report, 'report.html'))}"
        raise UsageError("--report must be a file, not a folder", where=report, hint=hint)
    from vitral.data.options import DataOptions
    from vitral.inference.options import InferenceOptions
    from vitral.workflows.evaluate import evaluate_images

    check: Callable[[Predictor], None] | None = None
    if unknown is not None:
        from vitral.workflows.unknown import check_network, check_options

        check_options(unknown, known_share)
        check = check_network
    images = DataOptions(data, split, data_root, bad_images, label_separator, class_folders)
    options = InferenceOptions(device, precision, engine, tta, patch_size, beams, class_order, levels)
    if few_shot is not None or knn is not None:
        if launched():
            why = "--few-shot and --knn are computed by one process"
            raise UsageError("nothing for several ranks to share", why=why, hint="leave out --nproc, or torchrun")
        return _evaluate_features(run, images, options, few_shot, knn, cache, format)
    with counting(stderr(quiet=is_follower()), "reading the images") as done:
        result = evaluate_images(run, images, options, done, check)
    if is_follower():  # the first rank prints
        return 0
    print_predictor_notes(result.predictor)
    damaged = _corrupted(result) if corruptions else None
    detection = _unknown(result, unknown, known_share, bad_images) if unknown is not None else None
    _print_evaluation(run, result, format, damaged, detection)
    if detection:
        _save_threshold(run, detection)
    print_notes(result.notes)
    if report:
        used = {**vars(images), **vars(options), "report": report}
        parameters = inspect.signature(evaluate).parameters
        typed = {name: value for name, value in used.items() if name != "data" and value != parameters[name].default}
        result.write_report(Path(report), command_line("evaluate", [run] if data is None else [run, data], typed))
        say(f"Report   {report}")
    return 0


def _corrupted(result: Evaluated) -> Corrupted:
    from vitral.data.images.corruptions import CORRUPTIONS, STRENGTHS
    from vitral.workflows.corruptions import evaluate_corruptions

    total = len(result.images) * len(CORRUPTIONS) * len(STRENGTHS)
    with counting(stderr(), "corrupting", total) as done:
        return evaluate_corruptions(result, done)


def _unknown(result: Evaluated, folder: str, share: float, bad_images: str) -> UnknownImages:
    from vitral.workflows.unknown import evaluate_unknown

    with counting(stderr(), "scoring") as done:
        return evaluate_unknown(result, folder, share, done, bad_images=bad_images)


def _save_threshold(run: str, detection: UnknownImages) -> None:
    """Save the threshold of the best score with the weights of the run, and print what was left out."""
    from vitral.data.checks.validate import left_out
    from vitral.workflows.unknown import save

    print_notes(filter(None, (*detection.notes, left_out(detection.unreadable))))
    if detection.detector is not None and not can_write(Path(run)):
        say(f"note: no threshold is saved: {run} cannot be written; in a copy of your own it can")
    elif detection.detector is not None:
        save(run, detection.detector)
        say(
            f"Saved    a threshold of {detection.best}, above which `vitral predict {shlex.quote(run)}` answers unknown"
        )
        say("         (--no-unknown ignores it)")


def _print_evaluation(
    run: str, result: Evaluated, format: str, damaged: Corrupted | None, detection: UnknownImages | None
) -> None:
    """Print the metrics, as text or JSON."""
    if format == "json":
        plain: dict[str, object] = {"model": run, "data": result.source, "split": result.split}
        plain |= result.evaluation.to_json()
        if result.comparison is not None:
            plain["beside"] = dataclasses.asdict(result.comparison)
        if result.changed:
            plain["changed"] = result.changed
        if result.unreadable:
            plain["unreadable"] = list(result.unreadable)
        if damaged is not None:
            plain["corrupted"] = damaged.to_json()
        if detection is not None:
            plain["unknown"] = detection.to_json()
        print_json(plain)
    else:
        print_text(f"{run} on {'' if result.split == 'all' else 'the '}{result.split} images of {result.source}")
        result.evaluation.print_table(stdout())
        if result.comparison is not None:
            print_text(str(result.comparison))
        if damaged is not None:
            damaged.print_table(stdout())
        if detection is not None:
            detection.print_table(stdout())


def _evaluate_features(
    run: str,
    images: DataOptions,
    options: InferenceOptions,
    few_shot: str | None,
    knn: int | None,
    cache: str | None,
    format: str,
) -> int:
    """Evaluate the features of the network by few-shot least squares or nearest neighbors, for any classes."""
    from vitral.workflows.tables.features import evaluate_features

    try:
        shots = [int(count) for count in (few_shot or "").split(",")] if few_shot is not None else []
    except ValueError:
        why = f"'{few_shot}' is not a list of integers"
        raise UsageError("--few-shot takes numbers of images per class", why=why, hint="--few-shot 1,5,10,25") from None
    with counting(stderr(), "reading the images") as done:
        result = evaluate_features(run, images, options, few_shot=shots, knn=knn, cache=cache, progress=done)
    if format == "json":
        print_json({"model": run, **result.to_json()})
    else:
        measured = "images cut from train" if result.split == "cut from train" else f"{result.split} images"
        print_text(f"features of {run} on the {measured} of {result.source}")
        result.print_table(stdout())
    print_notes(result.notes)
    return 0
