"""`vitral bench`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from vitral.cli.options import DataRoot, Device, Format, Help
from vitral.cli.output import print_notes, print_result, say
from vitral.console import stderr


def bench(
    models: Annotated[
        tuple[str, ...], Help("names such as S/16, run folders or weights files (default: S/16)", "[MODEL …]")
    ] = (),
    *,
    what: Annotated[
        tuple[Literal["inference", "training", "jpeg"], ...],
        Help("inference, training (one step) or jpeg (training from image files)"),
    ] = ("inference", "training"),
    image_size: Annotated[tuple[int, ...], Help("pixels, one or several sizes (default: the network's)")] = (),
    batch: Annotated[
        tuple[int, ...], Help("batch size, one or several (default: 1 and 32; in training 32, on a GPU 256)")
    ] = (),
    precision: Annotated[tuple[str, ...], Help("auto, bf16 or fp32, one or several")] = ("auto",),
    device: Device = "auto",
    peers: Annotated[
        tuple[str, ...],
        Help("other libraries: timm, transformers, torchvision, vit-pytorch, vit-pytorch-flash, all or none"),
    ] = ("all",),
    engines: Annotated[
        tuple[str, ...], Help("inference engines besides auto: plain, int8, openvino, openvino-int8 or all")
    ] = ("auto",),
    compile: Annotated[bool, Help("also measure vitral and each other library under torch.compile")] = False,
    rounds: Annotated[int, Help("number of rounds; in each, all contenders take turns")] = 5,
    data: Annotated[str | None, Help("folder or archive of images to train from, for --what jpeg")] = None,
    data_root: DataRoot = "data",
    out: Annotated[str | None, Help("also write all measurements to this JSON file")] = None,
    format: Format = "text",
) -> int:
    """Compare speed and memory with other installed libraries, in interleaved rounds."""
    from vitral.atomic import write_text
    from vitral.bench.command import BenchOptions, bench
    from vitral.training.progress import progress_bar

    options = BenchOptions(
        models or ("S/16",),
        what,
        image_size,
        batch,
        precision,
        device,
        peers,
        engines,
        compile,
        rounds,
        data,
        data_root,
    )
    with progress_bar(stderr()) as bar:
        task = bar.add_task("", total=None, note="")
        result = bench(
            options, lambda what, done, total: bar.update(task, description=what, completed=done, total=total)
        )
    print_result(result, format)
    print_notes(result.notes)
    if out:
        write_text(Path(out), json.dumps(result.to_json(), indent=1) + "\n")
        say(f"Figures  {out}")
    return 0
