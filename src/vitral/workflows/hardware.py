"""Rates of GPUs and of the links between them, for estimates. Each has a source; none was measured on many GPUs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """One GPU of a machine with several, of its SXM form."""

    name: str
    memory: int
    """Bytes."""
    bf16: float
    """Peak of dense products, operations a second."""
    fp32: float
    inside: float
    """Bytes a second to the others of its machine, in each direction."""
    between: float
    """Bytes a second of its network adapter, in each direction."""
    cores: int
    """CPU cores of a machine, for each GPU."""
    source: str


def _gpu(name: str, gigabytes: int, bf16: float, fp32: float, inside: int, adapter: int, cores: int, dgx: str) -> Gpu:
    """`bf16` and `fp32` in TFLOP/s, `inside` in GB/s, `adapter` in Gbit/s."""
    source = f"data sheets of NVIDIA {name} (SXM) and {dgx}"
    return Gpu(
        name, gigabytes * 10**9, bf16 * 1e12, fp32 * 1e12, inside * 1e9, adapter / 8 * 1e9, cores, source
    )  # fmt: skip


GPUS = {
    "a100": _gpu("A100", 80, 312, 19.5, 300, 200, 16, "DGX A100"),
    "h100": _gpu("H100", 80, 989, 67, 450, 400, 14, "DGX H100"),
    "h200": _gpu("H200", 141, 989, 67, 450, 400, 14, "DGX H200"),
    "b200": _gpu("B200", 180, 2250, 75, 900, 400, 14, "DGX B200"),
}
"""GPUs by the name of `--gpu`."""

REACHED = {True: 0.48, False: 0.32}
"""Share of a GPU's bf16 peak that training steps reach, compiled or not."""
REACHED_SOURCE = (
    "measured on one H200 in bf16 (docs/log/training-speed.md): L/16 compiled, 128 images in 99 ms; B/16 not compiled, "
    "256 images in 84.5 ms"
)
LINK_SHARE = 0.8
"""Share of a link's rate that collectives reach."""
