"""torch: a program of torch.export in a `.pt2` file, which PyTorch loads without vitral installed.

    program = torch.export.load("model.pt2").module()
    logits = program(images)            # (B, C, H, W) float32, standardized

The graph contains only PyTorch's own operators.
"""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import numpy as np
import torch

from vitral.export.target import Job, Precision, Runtime, traced

FILE = "model.pt2"


class TorchTarget:
    """`.pt2`: the graph with its weights, and the metadata as extra files."""

    name, title = "torch", "torch.export"
    precisions: tuple[Precision, ...] = ("fp32",)
    preprocesses = True
    distances = False
    opening = "python -c \"import torch; print(torch.export.load('{folder}/model.pt2').graph_signature)\""

    def check_installed(self) -> None:
        """PyTorch is always installed."""

    def write(self, job: Job, folder: Path) -> dict[str, str]:
        """Write `model.pt2`, through memory: torch's error for a full disk does not name it."""
        packed, program = BytesIO(), traced(job)
        for node in program.graph.nodes:
            node.meta.pop("stack_trace", None)  # paths of this machine
        torch.export.save(program, packed, extra_files=dict(job.metadata))
        (folder / FILE).write_bytes(packed.getbuffer())
        return {"torch": torch.__version__}

    def load(self, folder: Path) -> Runtime:
        """Load the export by `torch.export.load`."""
        program = torch.export.load(folder / FILE).module()

        @torch.inference_mode()
        def run(images: np.ndarray) -> np.ndarray:
            output: np.ndarray = program(torch.from_numpy(images)).numpy()
            return output

        return Runtime(f"PyTorch {torch.__version__}, fp32", run)


TORCH = TorchTarget()
