"""`vitral summary`, `models`, `convert`, `quantize` and `verify`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal

from vitral.cli.options import BadImages, DataRoot, Format, Help, Levels
from vitral.cli.output import print_json, print_result, print_text, say
from vitral.console import counting, stderr, stdout, table


def summary(
    model: Annotated[str, Help("a name (S/16, mnist-7562), a run folder or a weights file", "MODEL")],
    *,
    image_size: Annotated[int | tuple[int, int] | None, Help("pixels: one number, or height and width")] = None,
    channels: Annotated[int | None, Help("1 for gray, 3 for color")] = None,
    classes: Annotated[int | None, Help("outputs of the head")] = None,
    batch: Annotated[int, Help("batch size of the input")] = 1,
    full: Annotated[bool, Help("show every block, including identical ones")] = False,
    format: Format = "text",
) -> int:
    """Show the layers of a named network, a run or a weights file: shapes, parameters, FLOPs, memory."""
    from vitral.model import config, summarize
    from vitral.weights.read.references import is_weights

    given = {"image_size": image_size, "channels": channels, "classes": classes}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    in_folder = len(Path(model).parts) > 1 and Path(model).parent.is_dir()  # probably a misspelled run
    if is_weights(model) or in_folder:
        from vitral.weights.load import read

        shape = dataclasses.replace(read(model).weights.config, **changes)
    else:
        shape = config(model, **changes)
    result = summarize(shape, batch=batch, name=model)
    print_result(result, format, full=full)
    return 0


def models(*, format: Format = "text") -> int:
    """List the named networks."""
    from vitral.model.variants import catalog

    entries = catalog()
    if format == "json":
        print_json(entries)
        return 0
    rows = table()
    for name in ("name", "width", "layers", "heads", "MLP", "parameters", "note"):
        rows.add_column(name, justify="left" if name in ("name", "note") else "right", no_wrap=name != "note")
    for entry in entries:
        sizes = (
            "" if entry[k] is None else f"{entry[k]:,}" for k in ("dim", "depth", "heads", "mlp_dim", "parameters")
        )
        rows.add_row(entry["name"], *sizes, entry["note"])
    stdout().print(rows)
    say("\nSizes combine with any patch size (S/4, Ti/16x8) and any stem (R50+S/16). Show layers: vitral summary S/16")
    return 0


def quantize(
    run: Annotated[str, Help("run folder or weights file", "RUN")],
    data: Annotated[str | None, Help("images to measure on (default: the run's own)", "[DATA]")] = None,
    *,
    images: Annotated[int, Help("number of training images for calibration")] = 256,
    judged: Annotated[int, Help("number of held-out images to compare accuracy and speed on")] = 1000,
    bad_images: BadImages = "error",
    data_root: DataRoot = "data",
    format: Format = "text",
) -> int:
    """Calibrate a network for --precision int8 on a CPU, and compare its accuracy and speed."""
    from vitral.data.options import DataOptions
    from vitral.workflows.quantize import quantize as measure

    own_or_other = DataOptions(data, None, data_root, bad_images)
    with counting(stderr(), "measuring") as progress:
        result = measure(run, own_or_other, images=images, judged=judged, progress=progress)
    if format == "json":
        print_json({"model": run, **result.to_json()})
    else:
        result.print_table(stdout())
        say(f"Ranges   {result.file}")
    return 0


def convert(
    source: Annotated[str, Help("run, weights file, folder, timm:NAME or hf:ORG/NAME", "SOURCE")],
    target: Annotated[str, Help("file or folder to write; it must not exist", "TARGET")],
    *,
    to: Annotated[
        Literal["native", "timm", "hf", "torchvision", "jax", "mae", "dino"], Help("format to write")
    ] = "native",
    image_size: Annotated[int | tuple[int, int] | None, Help("resize the positions to this image size")] = None,
    patch_size: Annotated[int | tuple[int, int] | None, Help("resize the patch kernels to this patch size")] = None,
    channels: Annotated[int | None, Help("adapt the first layer to this number of channels")] = None,
    classes: Annotated[int | None, Help("number of classes of the new head, with --new-head")] = None,
    new_head: Annotated[bool, Help("replace the head with zeros")] = False,
    from_: Annotated[str | None, Help("format of the source, if it cannot be detected")] = None,
    heads: Annotated[int | None, Help("number of attention heads, if the source does not define it")] = None,
    like: Annotated[str | None, Help("timm:NAME of the architecture, if the source does not define it")] = None,
    scheme: Annotated[str | None, Help("method to resize positions (default: as in the source library)")] = None,
    weights_key: Annotated[
        str | None, Help("prefix of the network in a file that holds several: teacher.backbone")
    ] = None,
    levels: Levels = None,
    allow_non_finite: Annotated[bool, Help("read weights that hold NaN or an infinity, too")] = False,
    account: Annotated[bool, Help("show the status of every tensor")] = False,
    format: Format = "text",
) -> int:
    """Convert weights of any known format to that of another library, and report the status of every tensor."""
    from vitral.weights.convert import convert

    result = convert(
        source,
        target,
        to,
        format=from_,
        heads=heads,
        like=like,
        scheme=scheme,
        new_head=new_head,
        image_size=image_size,
        patch_size=patch_size,
        channels=channels,
        classes=classes,
        weights_key=weights_key,
        levels=levels,
        allow_non_finite=allow_non_finite,
    )
    if format == "json":
        print_json(result.to_json())
    else:
        result.print_table(stdout(), full=account)
        for path in result.written:
            print_text(f"wrote {path}")
    return 0


def verify(
    run: Annotated[str | None, Help("run folder, weights file or shards (default: the caches)", "[RUN]")] = None,
    *,
    accept: Annotated[
        bool, Help("accept the text files, such as config.json, as they are now, and check the other files")
    ] = False,
    format: Format = "text",
) -> int:
    """Check the files of a run, a weights file, shards or the caches against their digests."""
    from vitral.workflows.verify import verify

    result = verify(run, accept=accept)
    print_result(result, format)
    for one in result.damaged:
        say(f"error: {one.file} is damaged\n  why: {one.why}\n  try: {one.hint}")
    return 1 if result.damaged else 0
