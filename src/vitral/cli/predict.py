"""`vitral predict`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from vitral.cli.options import Beams, ClassOrder, Device, Engine, Format, Help, Levels, PatchSize, Precision, Tta
from vitral.cli.output import print_json, print_notes, print_prediction, print_predictor_notes, resuming, say, unread
from vitral.cli.ranks import AGAIN
from vitral.console import command_line, counting, stderr
from vitral.errors import Interrupted, UsageError, check_positive
from vitral.wording import count

if TYPE_CHECKING:
    from vitral.inference.predictor import Predictor
    from vitral.inference.sources import Source


def predict(
    run: Annotated[str, Help("run folder or weights file", "RUN")],
    images: Annotated[
        tuple[str, ...], Help("image files, folders, archives, and lists of paths (.txt)", "IMAGE …")
    ] = (),
    *,
    top: Annotated[int, Help("number of classes to show for each image")] = 3,
    out: Annotated[
        str | None, Help("write a table to this file (.csv, .jsonl or .parquet) instead of printing")
    ] = None,
    coverage: Annotated[
        float | None,
        Help("also print a set of classes, which contains the true class for this fraction of images, such as 0.95"),
    ] = None,
    right: Annotated[
        float | None,
        Help(
            'answer "not sure" for doubtful images, so that this fraction of the other answers is correct, such as 0.95'
        ),
    ] = None,
    unknown: Annotated[
        bool | None,
        Help(
            'answer "unknown" for images of no known class, by a threshold that vitral evaluate --unknown saves '
            "(default: on, if there is a threshold)"
        ),
    ] = None,
    all: Annotated[bool, Help("with --out: add a column with the probability of each class")] = False,
    resume: Annotated[bool, Help("with --out: continue the same command after it was stopped or killed")] = False,
    batch_size: Annotated[int, Help("images per forward pass")] = 32,
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
    """Predict the class of images, given as files, folders, archives, or lists of paths."""
    from vitral.distributed.ranks import joined
    from vitral.inference.options import InferenceOptions
    from vitral.inference.sources import find, notes
    from vitral.workflows.tables.formats import format_of

    check_positive(top=(top, 3), batch_size=(batch_size, 32))
    if out is None and (all or resume):
        raise UsageError(f"{'--all' if all else '--resume'} goes with --out", hint="--out predictions.csv")
    if out is not None:
        format_of(out)
    options = InferenceOptions(device, precision, engine, tta, patch_size, beams, class_order, levels)
    with joined(device, AGAIN["predict"]) as ranks:
        if out is None and ranks.together:
            hint = "--out predictions.csv, or leave out --nproc or torchrun"
            raise UsageError("several ranks write one table", why="there is no --out", hint=hint)
        sources, predictor = ranks.agree(
            lambda: (find(images), _answering(options.load(run), coverage, right, unknown, run))
        )
        if ranks.main:
            print_predictor_notes(predictor)
            if coverage is not None and (few := predictor.output.few()):
                say(f"note: {few}")
            if right is not None:
                say(f"Answers  {predictor.output.cut.describe(predictor.output.validation)}")
            print_notes(notes(sources))
        if out is None:
            return _print_predictions(predictor, sources, run, top, batch_size, format)
        typed = {"out": out, "top": top, "coverage": coverage, "right": right, "unknown": unknown, "all": all}
        typed |= {"batch_size": batch_size}
        return _write_predictions(predictor, sources, [run, *images], typed | vars(options), resume, format)


def _answering(predictor: Any, coverage: float | None, right: float | None, unknown: bool | None, run: str) -> Any:
    """Return the predictor with sets of this coverage, and with "not sure" for this share of correct answers.

    If `unknown` is False, no image is unknown. Raises `UsageError` if it is True, and no threshold is saved.
    """
    from vitral.inference.outputs.classes import Classes

    has_threshold = getattr(predictor.output, "unknown", None) is not None
    if unknown and not has_threshold:
        hint = command_line("evaluate", [run], {"unknown": "FOLDER"})
        raise UsageError("--unknown needs a threshold", where=run, why="none is saved with these weights", hint=hint)
    if unknown is False and has_threshold:
        predictor.output = predictor.output.always_known()
    for flag, share in (("--coverage", coverage), ("--right", right)):
        if share is not None and not isinstance(predictor.output, Classes):
            raise UsageError(f"{flag} is for networks of one class per image", hint="leave it out")
    if coverage is not None:
        predictor.output = predictor.output.covering(coverage)
    if right is not None:
        predictor.output = predictor.output.sure(right)
    return predictor


def _print_predictions(
    predictor: Predictor, sources: Sequence[Source], run: str, top: int, batch_size: int, format: str
) -> int:
    from vitral.errors import ImageError
    from vitral.inference.inputs import Items

    results, failures, items = [], [], Items(sources)
    for result in predictor.stream(items, batch_size):
        if isinstance(result, ImageError):
            failures.append(result)
            say(f"error: {result}")
        elif format == "json":
            results.append(result.to_json(top))
        else:
            print_prediction(result, top)
    if format == "json":
        print_json(
            {"model": run, "predictions": results, "errors": [{"image": f.name, "why": f.why} for f in failures]}
        )
    return unread(len(failures), len(items))


def _write_predictions(
    predictor: Predictor,
    sources: Sequence[Source],
    words: list[str],
    typed: Mapping[str, Any],
    resume: bool,
    format: str,
) -> int:
    from vitral.distributed.ranks import current
    from vitral.workflows.predict import PredictionFile

    ranks = current()
    shape = {name: typed[name] for name in ("top", "all", "batch_size")}
    table = ranks.agree(lambda: PredictionFile(predictor, sources, typed["out"], **shape))
    if resume and ranks.main and table.nothing_to_resume:
        say(f"note: {table.nothing_to_resume}")
    try:
        with counting(stderr(quiet=not ranks.main), "predicting", table.images) as done:
            written = table.write(resume=resume, progress=done, ranks=ranks)
    except KeyboardInterrupt:
        raise Interrupted(resuming("predict", predict, words, typed)) from None
    if not ranks.main:
        return 0
    if format == "json":
        print_json({"model": words[0], **written.to_json()})
    kept = f", {written.kept:,} of them from before" if written.kept else ""
    say(f"Table    {written.path}: {count(written.images, 'row')}{kept}")
    return unread(written.failed, written.images, ": column 'error' has the reasons")
