"""Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon): each matrix moves along the orthogonal matrix that is
nearest to its momentum. torch's own does the same to the bit, one matrix after the other; here all of one shape are
one product, so that a GPU starts a hundred kernels for the step of a network of twelve blocks and not a thousand.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_COEFFICIENTS = 3.4445, -4.7750, 2.0315  # of the polynomial whose repetition brings singular values near 1
_REPETITIONS = 5
_SMALLEST_NORM = 1e-7


class Muon(torch.optim.Muon):
    """torch's Muon with Nesterov momentum, its steps of AdamW's size ("match_rms_adamw", arXiv 2502.16982)."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the matrices (a, b) that have gradients."""
        assert closure is None
        for group in self.param_groups:
            matrices = [p for p in group["params"] if p.grad is not None]
            if not matrices:
                continue
            gradients = [p.grad for p in matrices]
            momenta = [self._momentum(p) for p in matrices]
            torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
            updates = torch._foreach_lerp(gradients, momenta, group["momentum"])
            torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
            for shape, places in _by_shape(matrices).items():
                directions = orthogonalised(torch.stack([updates[i] for i in places]))
                size = group["lr"] * 0.2 * math.sqrt(max(shape))
                torch._foreach_add_([matrices[i] for i in places], directions.float().unbind(), alpha=-size)

    def _momentum(self, matrix: Tensor) -> Tensor:
        state = self.state[matrix]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(matrix)
        return state["momentum_buffer"]


def _by_shape(matrices: Sequence[Tensor]) -> dict[torch.Size, list[int]]:
    places = defaultdict(list)
    for place, matrix in enumerate(matrices):
        places[matrix.shape].append(place)
    return places


def orthogonalised(matrices: Tensor) -> Tensor:
    """Matrices (n, a, b) with all singular values near 1, the singular vectors kept, in bf16: five repetitions of a
    polynomial of degree five (Newton-Schulz), which products alone compute.
    """
    wide = matrices.shape[1] <= matrices.shape[2]
    x = matrices.bfloat16() if wide else matrices.bfloat16().mT
    x = x / x.flatten(1).norm(dim=1).clamp(min=_SMALLEST_NORM)[:, None, None]
    a, b, c = _COEFFICIENTS
    for _ in range(_REPETITIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.mT
