"""`vitral embed` and `vitral similar`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from vitral.cli.options import Device, Format, Help
from vitral.cli.output import (
    print_json,
    print_notes,
    print_predictor_notes,
    print_text,
    python,
    resuming,
    say,
    unread,
)
from vitral.console import counting, stderr
from vitral.errors import Interrupted, UsageError, check_positive
from vitral.wording import count

if TYPE_CHECKING:
    from vitral.inference.predictor import Predictor
    from vitral.inference.sources import Source
    from vitral.workflows.embed import Similar

Precision = Annotated[str, Help("auto, bf16 or fp32")]


def embed(
    run: Annotated[str, Help("run folder or weights file", "RUN")],
    images: Annotated[
        tuple[str, ...], Help("image files, folders, archives, and lists of paths (.txt)", "IMAGE …")
    ] = (),
    *,
    out: Annotated[str, Help("file to write: .npz or .parquet")] = "features.npz",
    resume: Annotated[bool, Help("resume the same command after it was stopped or killed")] = False,
    batch_size: Annotated[int, Help("images per forward pass")] = 32,
    device: Device = "auto",
    precision: Precision = "auto",
    format: Format = "text",
) -> int:
    """Write the features of images: for each, the vector that the network's head receives."""
    from vitral.workflows.embed import FeatureFile
    from vitral.workflows.tables.feature_formats import format_of

    format_of(out)
    predictor, sources = _loaded(run, images, "embed", batch_size, device, precision)
    file = FeatureFile(predictor, sources, out, batch_size)
    typed = {"out": out, "batch_size": batch_size, "device": device, "precision": precision}
    if resume and file.nothing_to_resume:
        say(f"note: {file.nothing_to_resume}")
    try:
        with counting(stderr(), "embedding", file.images) as done:
            written = file.write(resume=resume, progress=done)
    except KeyboardInterrupt:
        raise Interrupted(resuming("embed", embed, [run, *images], typed)) from None
    if format == "json":
        print_json({"model": run, **written.to_json()})
    kept = f", {written.kept:,} of them from before" if written.kept else ""
    say(f"Features {out}: {count(written.images, 'image')}{kept}")
    code = unread(written.failed, written.images, f": {out} has the reasons")
    if format == "text":
        npz = f"import numpy; print(numpy.load('{out}')['features'].shape)"
        table = f"import pyarrow.parquet; print(pyarrow.parquet.read_table('{out}'))"
        say(f'\nNext:\n  {python()} -c "{npz if out.endswith("npz") else table}"')
    return code


def similar(
    run: Annotated[str, Help("run folder or weights file", "RUN")],
    image: Annotated[str, Help("image to compare with", "IMAGE")],
    images: Annotated[
        tuple[str, ...], Help("images to search: files, folders, archives, lists of paths (.txt)", "FOLDER …")
    ] = (),
    *,
    top: Annotated[int, Help("number of images to show")] = 10,
    out: Annotated[str | None, Help("also draw them, as a contact sheet, to this .png file")] = None,
    batch_size: Annotated[int, Help("images per forward pass")] = 32,
    device: Device = "auto",
    precision: Precision = "auto",
    format: Format = "text",
) -> int:
    """Find the images most similar to a given one, by the cosine similarity of their features."""
    from vitral.inference import sources as listed
    from vitral.wording import shown
    from vitral.workflows.checks.contact_sheet import check_png
    from vitral.workflows.embed import features_of, most_similar

    check_positive(top=(top, 10))
    if out is not None:
        check_png(out)
    predictor, sources = _loaded(run, images, "similar", batch_size, device, precision)
    predictor.prepare(image, image)  # raises for an unreadable one
    with counting(stderr(), "embedding", listed.count(sources)) as done:
        features = features_of(predictor, sources, batch_size, done)
    found = most_similar(predictor.embed([image])[0], features, top, leave_out=image)
    if format == "json":
        errors = [{"image": error.name, "why": error.why} for error in features.errors]
        print_json({"model": run, "image": image, "similar": [one.to_json() for one in found], "errors": errors})
    else:
        for one in found:
            print_text(f"{one.cosine:.4f}\t{shown(one.name)}")
    if out is not None:
        _draw(predictor, sources, image, found, Path(out))
        say(f"Sheet    {out}")
    for error in features.errors:
        say(f"error: {error}")
    return unread(len(features.errors), len(features.errors) + len(features.names))


def _loaded(
    run: str, images: tuple[str, ...], command: str, batch_size: int, device: str, precision: str
) -> tuple[Predictor, Sequence[Source]]:
    """Return the predictor and the sources of images."""
    from vitral.inference.loading import load
    from vitral.inference.sources import find, notes

    check_positive(batch_size=(batch_size, 32))
    if precision == "int8":
        raise UsageError("features are not computed in int8", hint="--precision auto")
    sources = find(images, command)
    predictor = load(run, device=device, precision=precision, engine="plain")
    print_predictor_notes(predictor)
    print_notes(notes(sources))
    return predictor, sources


def _draw(predictor: Predictor, sources: Sequence[Source], image: str, found: Sequence[Similar], path: Path) -> None:
    """Draw the image and the similar ones, before preprocessing."""
    from vitral.inference.inputs import pixels_of
    from vitral.workflows.checks.contact_sheet import contact_sheet
    from vitral.workflows.embed import images_of

    recipe = predictor.preprocessing
    by_name = dict(images_of(sources, [one.name for one in found]))
    shown = [(image, image, f"query\n{image}")]
    shown += [(by_name[one.name], one.name, f"{one.cosine:.4f}\n{one.name}") for one in found]
    contact_sheet(
        [
            (pixels_of(one, name=name, channels=recipe.channels, levels=recipe.levels), text)
            for one, name, text in shown
        ],
        path,
    )
