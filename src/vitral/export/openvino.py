"""openvino: OpenVINO's intermediate representation (IR), `model.xml` with its weights in `model.bin`.

    model = openvino.Core().compile_model("model.xml", "CPU")
    logits = model(images)["logits"]    # (B, C, H, W) float32, standardized

In fp16 the weights are stored in 16 bits, and the runtime chooses the precision of the computation, as with OpenVINO's
own converter. The proof computes in fp32: rounding by a CPU with bf16 instructions is not an error of the export.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from vitral.export.target import Job, Precision, Runtime, recorded_warnings, traced
from vitral.inference.engines.openvino import package, shared_core

if TYPE_CHECKING:
    import openvino

FILE = "model.xml"


class OpenVINOTarget:
    """OpenVINO IR, in fp32 or with fp16 weights."""

    name, title = "openvino", "OpenVINO IR"
    precisions: tuple[Precision, ...] = ("fp32", "fp16")
    preprocesses = False
    distances = False
    opening = "python -c \"import openvino; print(openvino.Core().read_model('{folder}/model.xml'))\""

    def check_installed(self) -> None:
        """Raise `MissingExtraError` if OpenVINO is missing."""
        package()

    def write(self, job: Job, folder: Path) -> dict[str, str]:
        """Write `model.xml` and `model.bin`."""
        ov = package()
        model = _converted(job)
        for name, text in job.metadata.items():
            model.set_rt_info(text, name.split("."))
        try:
            ov.save_model(model, str(folder / FILE), compress_to_fp16=job.precision == "fp16")
        except RuntimeError as error:  # OpenVINO reports a full disk so
            raise OSError(" ".join(str(error).split())[:300]) from error
        return {"openvino": str(ov.__version__), "torch": torch.__version__}

    def load(self, folder: Path) -> Runtime:
        """Load the export in OpenVINO on the CPU, with torch's number of threads."""
        ov = package()
        settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
        model = shared_core().compile_model(str(folder / FILE), "CPU", settings)
        version = str(ov.__version__).partition("-")[0]

        def run(images: np.ndarray) -> np.ndarray:
            return np.array(model(images)[0])

        return Runtime(f"OpenVINO {version}, CPU, fp32", run)


def _converted(job: Job) -> openvino.Model:
    """Convert the traced network to an OpenVINO model with named input and output."""
    from openvino.frontend import FrontEndManager
    from openvino.frontend.pytorch.fx_decoder import TorchFXPythonDecoder

    height, width = job.preprocessing.image_size
    program = traced(job)
    with recorded_warnings(job.warnings):
        decoder = TorchFXPythonDecoder.from_exported_program(program)  # the frontend does not keep it alive
        frontend = FrontEndManager().load_by_framework("pytorch")
        model = frontend.convert(frontend.load(decoder))
    model.reshape([-1, job.preprocessing.channels, height, width])
    model.input(0).get_tensor().set_names({job.input_name})
    model.output(0).get_tensor().set_names({job.output_name})
    model.validate_nodes_and_infer_types()
    return model


OPENVINO = OpenVINOTarget()
