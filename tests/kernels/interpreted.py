"""Run `vitral.kernels.cuda` on a CPU by Triton's interpreter, compare with fp64, and print the names that agree."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.kernels import cuda


def agree(found: Tensor, wanted: Tensor, within: float) -> None:
    error = ((found.double() - wanted).norm() / wanted.norm()).item()
    assert error <= within, f"{error:.1e}"


def gelu(tanh: bool) -> None:
    x = torch.cat([torch.linspace(-9, 9, 3 * 257), torch.randn(255 * 257)]).view(-1, 257)
    gradient = torch.randn_like(x)
    there = x.double().requires_grad_()
    wanted = F.gelu(there, approximate="tanh" if tanh else "none")
    (slope,) = torch.autograd.grad(wanted, there, gradient.double())
    found, total = cuda.gelu_backward(gradient, x, tanh)
    assert (cuda.gelu(x, tanh) - wanted).abs().max() < 1e-6
    assert (found - slope).abs().max() < 5e-6
    agree(total, slope.sum(0), 1e-5)


def attention(tokens: int, lower: float = 0.0) -> None:
    """Attention with all scores lowered by a constant, which has no effect."""
    qkv, gradient = torch.randn(2, tokens, 3, 2, 64), torch.randn(2, tokens, 128)
    qkv[:, :, 0, :, 0], qkv[:, :, 1, :, 0] = 1.0, -lower / 0.2
    there = qkv.double().requires_grad_()
    q, k, v = there.permute(2, 0, 3, 1, 4).unbind()
    out = F.scaled_dot_product_attention(q, k, v, scale=0.2).transpose(1, 2).flatten(2)
    (wanted,) = torch.autograd.grad(out, there, gradient.double())
    lse = (q @ k.transpose(-2, -1) * 0.2).logsumexp(-1)
    found = cuda.attention_backward(qkv, out.detach().float(), gradient, lse.detach().float(), 0.2)
    agree(found[..., 1:], wanted[..., 1:], 1e-4)  # of the first number sums cancel that are a thousand times as large


if __name__ == "__main__":
    torch.manual_seed(0)
    for name, check in {"gelu": lambda: gelu(False), "gelu-tanh": lambda: gelu(True)}.items():
        check()
        print(name)
    for tokens in (70, 64, 7):
        attention(tokens)
        attention(tokens, lower=200.0)  # what is no token scores 0
        print(f"attention-{tokens}")
