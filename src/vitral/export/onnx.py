"""onnx: one `model.onnx` for ONNX Runtime and every other program that reads ONNX.

    session = onnxruntime.InferenceSession("model.onnx")
    logits = session.run(["logits"], {"images": images})[0]     # (B, C, H, W) float32, standardized

Weights above 2 GB, the limit of the format, are in `model.onnx.data` next to it. fp16 computes in fp16 between an input
and an output in fp32. int8 quantizes dense layers on tokens, in QDQ form, with ranges from training images; patches,
attention, norms and head stay in fp32. Integer weights have 7 bits: with 8, sums overflow on x86 without VNNI.

A network that reads text is two graphs (`onnx_text`), in fp32.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from vitral.errors import MissingExtraError, UsageError
from vitral.export.onnx_text import ENCODER, programs, reader
from vitral.export.target import Job, Precision, Runtime, exportable, recorded_warnings, traced
from vitral.model import EncoderDecoder

if TYPE_CHECKING:
    import onnx_ir
    from onnxruntime import InferenceSession
    from torch.onnx import ONNXProgram

FILE = "model.onnx"
OPSET = 23
"""The newest opset that PyTorch writes; tested with ONNX Runtime 1.32."""
LARGEST = 2**31 - 2**24
"""Most bytes of weights in one file: a protocol buffer is limited to 2 GiB, and the graph needs some of that."""


class ONNXTarget:
    """ONNX, in fp32, fp16 or int8."""

    name, title = "onnx", "ONNX"
    precisions: tuple[Precision, ...] = ("fp32", "fp16", "int8")
    preprocesses = True
    distances = False
    opening = (
        "python -c \"import onnxruntime; print(onnxruntime.InferenceSession('{folder}/model.onnx').get_inputs()[0])\""
    )

    def check_installed(self) -> None:
        """Raise `MissingExtraError` if onnx, onnxscript or onnxruntime is missing."""
        packages()

    def write(self, job: Job, folder: Path) -> dict[str, str]:
        """Write `model.onnx`; of a network for text `encoder.onnx` and `decoder_step.onnx`."""
        onnx, runtime = packages()
        versions = {"torch": torch.__version__, "onnx": onnx.__version__, "onnxruntime": runtime.__version__}
        versions["opset"] = str(OPSET)
        if isinstance(job.network, EncoderDecoder):
            network = exportable(job.network)
            assert isinstance(network, EncoderDecoder)
            for file, (traced_part, *names) in programs(job, network).items():
                converted(job, traced_part, *names).save(folder / file, external_data=_is_large(job.network))
            return versions
        axes = ("height", "width") if job.with_preprocessing else ("batch",)
        program = converted(job, _traced(job), [job.input_name], [job.output_name], axes)
        external = _is_large(job.network)
        if job.precision == "int8":
            with tempfile.TemporaryDirectory(dir=folder) as exact:
                program.save(Path(exact, FILE), external_data=external)
                _quantize(job, Path(exact, FILE), folder / FILE, external)
        else:
            program.save(folder / FILE, external_data=external)
        return versions

    def load(self, folder: Path) -> Runtime:
        """Load the export in ONNX Runtime on the CPU, with torch's number of threads."""
        if (folder / ENCODER).exists():
            return Runtime(*reader(folder, session_for))
        session, title = session_for(folder / FILE)
        name = session.get_inputs()[0].name

        def run(images: np.ndarray) -> np.ndarray:
            output: np.ndarray = session.run(None, {name: images})[0]
            return output

        return Runtime(title, run)


class HalfPrecision(nn.Module):
    """A network in fp16 with input and output in fp32."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network.half()

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.network(images.half())
        return logits.float()


def _is_large(network: nn.Module) -> bool:
    """True if the weights need a file of their own."""
    return sum(one.numel() * one.element_size() for one in network.state_dict().values()) > LARGEST


def packages() -> tuple[ModuleType, ModuleType]:
    """onnx and onnxruntime; `MissingExtraError` if one is missing."""
    try:
        import onnx
        import onnxruntime
        import onnxscript  # noqa: F401 - PyTorch's exporter needs it
    except ImportError as error:
        hint = "pip install 'vitral[onnx]'"
        raise MissingExtraError("ONNX is not installed", why=str(error), hint=hint) from error
    return onnx, onnxruntime


def session_for(file: Path) -> tuple[InferenceSession, str]:
    """A session of ONNX Runtime on the CPU, with torch's number of threads, and the runtime's title."""
    _, runtime = packages()
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # the network is timed in alternation
    session = runtime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    return session, f"ONNX Runtime {runtime.__version__}, CPU"


def _traced(job: Job) -> ExportedProgram:
    network = exportable(job.network)
    return traced(job, HalfPrecision(network) if job.precision == "fp16" else network)


def converted(
    job: Job, program: ExportedProgram, inputs: Sequence[str], outputs: Sequence[str], axes: Sequence[str]
) -> ONNXProgram:
    """Convert a traced network to ONNX, without the source file names that the exporter adds to each node. `axes` names
    the dynamic axes of the first input.
    """
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass

    with recorded_warnings(job.warnings):
        found = torch.onnx.export(
            program, (), dynamo=True, opset_version=OPSET, input_names=inputs, output_names=outputs, verbose=False
        )
    assert found is not None
    ClearMetadataAndDocStringPass()(found.model)
    _name_axes(found.model.graph, axes)
    found.model.metadata_props.clear()
    found.model.metadata_props.update(job.metadata)
    found.model.producer_name, found.model.producer_version = "vitral", job.metadata["vitral.version"]
    return found


def _name_axes(graph: onnx_ir.Graph, names: Sequence[str]) -> None:
    """Rename the dynamic axes of the input, which torch.export numbers, also in sums such as `s0 + 1`."""
    sizes = zip(graph.inputs[0].shape, names, strict=False)
    named = {str(size): name for size, name in sizes if not isinstance(size, int)}
    for value in (*graph.inputs, *(value for node in graph for value in node.outputs)):
        for axis, size in enumerate(value.shape or ()):
            if not isinstance(size, int):
                value.shape[axis] = re.sub(r"\w+", lambda found: named.get(found[0], found[0]), str(size))


def _quantize(job: Job, exact: Path, target: Path, external: bool) -> None:
    """Quantize the fp32 model `exact` into `target`. Temporary files are written next to `exact`."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.left = iter(job.calibration)

        def get_next(self) -> dict[str, np.ndarray] | None:
            images = next(self.left, None)
            return None if images is None else {job.input_name: images}

    shaped = exact.with_name("shaped.onnx")
    with recorded_warnings(job.warnings):
        # Infer shapes only: its optimization would replace the matrix products with other operators.
        quant_pre_process(
            str(exact), str(shaped), skip_optimization=True, skip_symbolic_shape=True, save_as_external_data=external
        )
        if not _constant_products(shaped):
            why = "int8 is for dense layers on tokens, and it has none"
            raise UsageError("this network has no int8 form", why=why, hint="--precision fp16")
        quantize_static(
            str(shaped),
            str(target),
            Reader(),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=["MatMul"],
            per_channel=True,
            reduce_range=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            use_external_data_format=external,
            extra_options={"MatMulConstBOnly": True},
        )


def _constant_products(file: Path) -> int:
    """Count the matrix products with weights."""
    onnx, _ = packages()
    graph = onnx.load(str(file), load_external_data=False).graph
    weights = {one.name for one in graph.initializer}
    return sum(node.op_type == "MatMul" and node.input[1] in weights for node in graph.node)


ONNX = ONNXTarget()
