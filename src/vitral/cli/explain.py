"""`vitral explain` and `vitral inspect`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

from vitral import activity
from vitral.cli.options import ClassOrder, DataRoot, Device, Format, Help, Levels
from vitral.cli.output import print_json, print_predictor_notes, print_text, say, unread
from vitral.console import counting, stderr, stdout
from vitral.errors import UsageError, VitralError
from vitral.wording import count

if TYPE_CHECKING:
    from vitral.errors import ImageError
    from vitral.explanation.attribution import Attribution
    from vitral.explanation.heatmap import Heatmap
    from vitral.explanation.texts import TextExplanation
    from vitral.inference.predictor import Predictor

T = TypeVar("T")


def explain(
    run: Annotated[str, Help("run folder or weights file", "RUN")],
    inputs: Annotated[tuple[str, ...], Help("image files or folders of images", "IMAGE …")] = (),
    *,
    target: Annotated[
        tuple[str, ...], Help("classes to explain, by name or number (default: the predicted class)")
    ] = (),
    method: Annotated[
        str | None,
        Help(
            "attribution method: fullgrad+, attcat, generic, legrad, rollout, attention, rise, occlusion, "
            "integrated-gradients, smoothgrad, input-gradient or grad-cam (default: fullgrad+, the best of the fast "
            "methods; for a network without attention, another one)"
        ),
    ] = None,
    compare: Annotated[bool, Help("draw all methods that support the network, side by side")] = False,
    check: Annotated[
        bool,
        Help("measure how faithful each map is, as its symmetric relevance gain (SRG); draw unfaithful maps in gray"),
    ] = False,
    layer: Annotated[
        int | None, Help("layer to explain, for methods that use one layer: 0 is the first, -1 the last")
    ] = None,
    out: Annotated[
        str | None, Help("folder for the maps, or a file for one image (default: RUN/explained or ./explained)")
    ] = None,
    benchmark: Annotated[str | None, Help("compare the methods on labeled images instead of explaining images")] = None,
    images: Annotated[int, Help("with --benchmark: number of images; more are more reliable, but take longer")] = 20,
    masks: Annotated[
        str | None, Help("with --benchmark: where the objects are, as a folder of masks or a .csv of boxes")
    ] = None,
    data_root: DataRoot = "data",
    device: Device = "auto",
    precision: Annotated[str, Help("number format: auto, bf16 or fp32")] = "fp32",
    class_order: ClassOrder = None,
    levels: Levels = None,
    format: Format = "text",
) -> int:
    """Explain predictions with heat maps over images, and measure how faithful the maps are."""
    from vitral.device import choose
    from vitral.explanation.files import explain_files, explain_options, files_for
    from vitral.inference.options import InferenceOptions
    from vitral.inference.sources import find_images
    from vitral.training.run_folder import RunFolder

    options = InferenceOptions(device, precision, class_order=class_order, levels=levels)
    if benchmark is not None:
        if inputs or target or compare or check or out or layer is not None:
            why = "it explains the predicted class of images of its own data"
            raise UsageError("--benchmark only combines with --method, --images, --masks and --data-root", why=why)
        predictor = options.load(run).cast()
        return _benchmark_methods(predictor, benchmark, data_root, method, images, masks, format)
    if masks is not None:
        raise UsageError("--masks requires --benchmark", hint="--benchmark DATA")
    paths = find_images(inputs, "explain")
    predictor = options.load(run).cast()
    print_predictor_notes(predictor)
    request = explain_options(predictor, target, method, compare=compare, layer=layer, check=check)
    files = files_for(paths, request, out, RunFolder(run).place_for("explained") or Path("explained"))
    doing = f"explaining {count(len(paths), 'image')}{', and checking each map' if check else ''}"
    results, failures, sheet = _draw_heatmaps(_announced(explain_files(request, paths), doing), files, format)
    if sheet and any(map(os.path.isdir, inputs)):
        from vitral.explanation.drawing import contact_sheet

        left_out = len(paths) - len(failures) - len(sheet)
        drawn = contact_sheet(
            sheet,
            files[0].parent / f"contact-sheet-{request.name}.png",
            left_out=left_out,
            classes=() if target else predictor.classes,
        )
        say(f"Sheet    {drawn}")
    if format == "json":
        errors = [{"image": failure.name, "why": failure.why} for failure in failures]
        print_json({"model": run, "explanations": results, "errors": errors})
    elif routing := [one.title for one in request.used if one.routing]:
        why = request.predictor.output.explained
        say(f"note: {', '.join(routing)}: shows where information was routed, not why this {why}")
    used = predictor.machine.precision
    if sheet and format == "text" and (usual := choose(device, dim=predictor.network.config.dim).precision) != used:
        say(f"note: computed in {used}; vitral predict takes {usual}, and probabilities differ a little")
    return unread(len(failures), len(paths))


def _benchmark_methods(
    predictor: Predictor, data: str, data_root: str, method: str | None, images: int, masks: str | None, format: str
) -> int:
    """Compare all methods, or measure one, on the test split of `data`, else on val, else on train."""
    from vitral.data import load as load_data
    from vitral.data.images.depth import leveled
    from vitral.data.sources import planted
    from vitral.explanation.benchmark import MaskOf, benchmark
    from vitral.explanation.masks import masks_from
    from vitral.inference.outputs.output import require_classes
    from vitral.workflows.evaluate import in_classes_of

    require_classes(predictor.output, "explain --benchmark", "vitral explain RUN IMAGE")
    dataset = in_classes_of(predictor, load_data(data, root=data_root))
    dataset = leveled(dataset, predictor.preprocessing.levels)
    split = dataset[next(name for name in ("test", "val", "train") if name in dataset.splits)]
    truth: MaskOf | None = planted.masks_for(split) if planted.accepts(data) else None
    if masks is not None:
        truth = masks_from(masks, split)
    with counting(stderr(), "explaining", min(images, len(split))) as progress:
        result = benchmark(predictor, split, [method] if method else None, count=images, masks=truth, progress=progress)
    if format == "json":
        print_json(result.to_json())
    else:
        result.print_table(stdout())
    return 0


def _announced(items: Iterable[T], doing: str) -> Iterator[T]:
    """Yield the items, and say what is done until each one comes."""
    activity.tell(doing)
    for item in items:
        yield item
        activity.tell(doing, passing=True)


def _draw_heatmaps(
    explained: Iterable[list[Heatmap] | TextExplanation | ImageError], files: Sequence[Path], format: str
) -> tuple[list[dict[str, object]], list[ImageError], list[Attribution]]:
    """Write and print the maps of each image in turn; return their JSON, the failures and the maps for a sheet."""
    from vitral.explanation.drawing import SHEET_IMAGES, checks_text, save
    from vitral.explanation.texts import TextExplanation
    from vitral.wording import shown

    results: list[dict[str, object]] = []
    failures: list[ImageError] = []
    sheet: list[Attribution] = []
    for maps, file in zip(explained, files, strict=True):
        if isinstance(maps, VitralError):
            failures.append(maps)
            say(f"error: {maps}")
            continue
        if isinstance(maps, TextExplanation):
            results.append(_draw_text(maps, file, format))
            continue
        recommended = maps[0].method if len({one.method for one in maps}) > 1 else ""
        save(maps, file, recommended=recommended)
        if len(sheet) < SHEET_IMAGES:
            sheet.append(maps[0])
        for one in maps:
            if format == "json":
                results.append({**one.to_json(), "file": str(file)})
                continue
            method = f"{one.method} (recommended)" if one.method == recommended else one.method
            parts = [one.title, method, *checks_text(one)]
            parts += [one.note] if one.checks.get("believable") is False else []
            print_text(f"{shown(one.name)}\t" + "\t".join([*parts, shown(str(file))]))
    return results, failures, sheet


def _draw_text(explained: TextExplanation, file: Path, format: str) -> dict[str, object]:
    """Draw and print the maps of a text, and return their JSON. Without a character there is no file."""
    from vitral.wording import shown

    drawn = explained.save(file) if explained.maps else None
    if format != "json":
        parts = [
            *explained.text.cells(),
            explained.method,
            shown(str(drawn)) if drawn else "no character: nothing drawn",
        ]
        print_text("\t".join([shown(explained.text.name), *parts]))
    return {**explained.to_json(), "file": drawn and str(drawn)}


def inspect(
    model: Annotated[str, Help("run folder, weights file, timm:NAME, hf:ORG/NAME, or a name such as S/16", "MODEL")],
    *,
    data: Annotated[str | None, Help("images to measure on (default: the run's own)")] = None,
    split: Annotated[str | None, Help("train, val or test (default: val, otherwise test or train)")] = None,
    images: Annotated[int, Help("number of images to measure on, evenly spread over the split")] = 128,
    layers: Annotated[tuple[int, ...], Help("layers, from 0; -1 is the last (default: all)")] = (),
    prefix: Annotated[
        Literal["drop", "keep"], Help("attention distance: drop class token and registers, or keep them at distance 0")
    ] = "drop",
    components: Annotated[int, Help("number of principal components of the patch filters")] = 28,
    out: Annotated[str | None, Help("folder (default: RUN/inspect or ./inspect/NAME)")] = None,
    data_root: DataRoot = "data",
    device: Device = "auto",
    precision: Annotated[str, Help("number format: auto, bf16 or fp32")] = "fp32",
    format: Format = "text",
) -> int:
    """Draw what a network has learned: patch filters, positions, attention distance (Figure 7 of the ViT paper)."""
    from vitral.workflows.inspection import folder_for
    from vitral.workflows.inspection import inspect as run_inspection

    folder = folder_for(model) if out is None else Path(out)
    with counting(stderr(), "inspecting", images) as progress:
        result = run_inspection(
            model,
            data,
            split=split,
            images=images,
            layers=layers or None,
            prefix=prefix,
            components=components,
            out=folder,
            data_root=data_root,
            device=device,
            precision=precision,
            progress=progress,
        )
    if format == "json":
        print_json(result.to_json())
        return 0
    for line in result.summary():
        print_text(line)
    for note in result.notes:
        say(f"note: {note}")
    say(f"Page     {folder / 'inspect.html'}")
    return 0
