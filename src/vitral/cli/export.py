"""`vitral export`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from vitral.cli.options import BadImages, DataRoot, Format, Help
from vitral.cli.output import print_json, print_text, python, say
from vitral.console import counting, stderr, stdout
from vitral.errors import ExportError

if TYPE_CHECKING:
    from vitral.export.exporting import Exported


def export(
    run: Annotated[str, Help("run folder or weights file", "RUN")],
    data: Annotated[str | None, Help("images to compare on (default: the run's own, or drawings)", "[DATA]")] = None,
    *,
    to: Annotated[Literal["onnx", "torch", "openvino", "web"], Help("target")] = "onnx",
    precision: Annotated[Literal["fp32", "fp16", "int8"], Help("int8: calibrated on training images")] = "fp32",
    with_preprocessing: Annotated[
        bool, Help("preprocess in the graph, from a uint8 image to probabilities; else as in preprocessing.json")
    ] = False,
    out: Annotated[str | None, Help("folder (default: RUN/export/TARGET or ./export/NAME/TARGET)")] = None,
    overwrite: Annotated[bool, Help("replace an existing export in that folder")] = False,
    accept: Annotated[bool, Help("keep an fp16 or int8 export that loses more accuracy than allowed")] = False,
    images: Annotated[int | None, Help("number of images to compare on (default: 64, or 1000 for int8)")] = None,
    runtime: Annotated[
        str | None, Help("with --to web: archive of the npm package of ONNX Runtime Web (default: downloaded)")
    ] = None,
    example: Annotated[str | None, Help("image that the page of --to web offers to try, and contains")] = None,
    bad_images: BadImages = "error",
    data_root: DataRoot = "data",
    format: Format = "text",
) -> int:
    """Export a model to ONNX, PyTorch, OpenVINO or a web page, and check that the export gives the same results."""
    from vitral.export import TARGETS, export_model
    from vitral.export.web import publishing

    options: dict[str, Any] = {
        "precision": precision,
        "with_preprocessing": with_preprocessing,
        "out": out,
        "overwrite": overwrite,
        "accept": accept,
        "images": images,
        "runtime": runtime,
        "example": example,
        "bad_images": bad_images,
        "data_root": data_root,
    }
    try:
        with counting(stderr(), "comparing", images) as progress:
            exported = export_model(run, to, data, progress=progress, **options)
    except ExportError as failed:
        _print_proof(failed.proof, None, format)
        say(f"error: {failed}")
        return failed.exit_code
    for warning in exported.warnings:
        say(f"warning: {warning}")
    _print_proof(exported.proof, exported, format)
    if exported.proof.failure:
        say(f"note: accepted although {exported.proof.failure}")
    say(f"Export   {exported.folder}")
    if "encoder.onnx" not in exported.record["files"]:  # two graphs, which only a program runs
        opening = TARGETS[to].opening.format(folder=exported.folder)
        say(f"\nNext:\n  {opening.replace('python', python(), 1)}")
    if to == "web":
        for line in publishing(exported.folder):
            say(line)
    return 0


def _print_proof(proof: Any, exported: Exported | None, format: str) -> None:
    """Print the figures; as JSON `export.json`, or the proof of a failed export."""
    if format == "json":
        print_json(exported.record if exported else {"proof": proof.to_json()})
        return
    proof.print_table(stdout())
    if exported is not None:
        print_text(f"wrote {', '.join(exported.record['files'])}, export.json")
