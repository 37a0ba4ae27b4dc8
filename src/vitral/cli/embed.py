"""`vitral embed` and `vitral similar`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from vitral.cli.options import Device, Format, Help
from vitral.cli.output import print_json, print_predictor_notes, print_text, say
from vitral.console import progress, stderr
from vitral.errors import UsageError

Precision = Annotated[str, Help("auto, bf16 or fp32")]


def embed(
    run: Annotated[str, Help("run folder or weights file", "RUN")],
    images: Annotated[
        tuple[str, ...], Help("image files, folders, archives, and lists of paths (.txt)", "IMAGE …")
    ] = (),
    *,
    out: Annotated[str, Help("file to write: .npz or .parquet")] = "features.npz",
    batch_size: Annotated[int, Help("images per forward pass")] = 32,
    device: Device = "auto",
    precision: Precision = "auto",
    format: Format = "text",
) -> int:
    """Write the features of images: for each, the vector that the network's head receives."""
    from vitral.workflows.embed import check_suffix

    check_suffix(out)
    _, _, features = _features(run, images, "embed", batch_size, device, precision)
    features.save(out)
    if format == "json":
        errors = [{"image": error.name, "why": error.why} for error in features.errors]
        images_, width = features.values.shape
        print_json(
            {
                "model": run, "model_hash": features.model_hash, "out": out, "images": images_, "features": width,
                "errors": errors,
            }
        )  # fmt: skip
    say(f"Features {out}: {features.values.shape[0]:,} images, {features.values.shape[1]:,} numbers each")
    return _unread(features)


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
    from vitral.data.dataset import shown
    from vitral.workflows.contact_sheet import check_png
    from vitral.workflows.embed import most_similar

    if top < 1:
        raise UsageError("--top must be at least 1")
    if out is not None:
        check_png(out)
    predictor, sources, features = _features(run, images, "similar", batch_size, device, precision, image)
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
    return _unread(features)


def _features(
    run: str, images: tuple[str, ...], command: str, batch_size: int, device: str, precision: str, query: str = ""
) -> tuple[Any, Any, Any]:
    """Return the predictor, the sources of images, and their features. An unreadable `query` is refused first."""
    from vitral.inference.predictor import load
    from vitral.inference.sources import count, find
    from vitral.workflows.embed import embed

    if batch_size < 1:
        raise UsageError("--batch-size must be at least 1")
    if precision == "int8":
        raise UsageError("features are not computed in int8", hint="--precision auto")
    sources = find(images, command)
    predictor = load(run, device=device, precision=precision, engine="plain")
    print_predictor_notes(predictor)
    if query:
        predictor.prepare(query, query)
    with progress(stderr(), "embedding", count(sources)) as done:
        return predictor, sources, embed(predictor, sources, batch_size, done)


def _unread(features: Any) -> int:
    """Report the unreadable images; return the exit code."""
    for error in features.errors:
        say(f"error: {error}")
    if features.errors:
        say(f"{len(features.errors):,} of {len(features.errors) + len(features.names):,} could not be read")
    return 1 if features.errors else 0


def _draw(predictor: Any, sources: Any, image: str, found: list[Any], path: Path) -> None:
    """Draw the image and the similar ones, before preprocessing."""
    from vitral.inference.inputs import pixels_of
    from vitral.workflows.contact_sheet import contact_sheet
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
