"""The dense layer with its GELU: the same numbers as the two by themselves, and the kernel as Triton interprets it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from vitral.model.gelu import gelu_backward, linear_gelu, takes

FORMS = ["none", "tanh"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_it_is_the_two_by_themselves(form, kind):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(3, 5, 8), torch.randn(12, 8), torch.randn(12)
    found = []
    for function in (lambda *a: F.gelu(F.linear(*a), approximate=form), lambda *a: linear_gelu(*a, form)):
        leaves = [each.to(kind).requires_grad_() for each in (x, weight, bias)]
        result = function(*leaves)
        result.backward(torch.arange(180.0).view(3, 5, 12).to(kind) / 180)
        found.append((result.detach(), *(leaf.grad for leaf in leaves)))
    within = 1e-5 if kind == torch.float32 else 0.02
    for ours, plain in zip(*found, strict=True):
        assert ours.dtype == plain.dtype == kind
        torch.testing.assert_close(ours, plain, rtol=within, atol=within)


def test_torch_can_trace_it():
    torch.library.opcheck(gelu_backward, (torch.randn(4, 6), torch.randn(4, 6), False))


def test_it_is_not_taken_on_a_processor():
    x = torch.randn(2, 8)
    assert not takes(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not takes(x)


_INTERPRETED = """
import torch
from vitral.model.gelu_kernel import launch

for shape in ((3, 50, 200), (7, 64), (300, 130)):
    for form in ("none", "tanh"):
        gradient, before = torch.randn(shape), 3 * torch.randn(shape)
        before.flatten()[:2] = torch.tensor([80.0, -80.0])
        after, sums = launch(gradient, before, form == "tanh")
        wanted = torch.ops.aten.gelu_backward(gradient, before, approximate=form)
        torch.testing.assert_close(after, wanted, rtol=1e-4, atol=2e-5)
        torch.testing.assert_close(sums, wanted.flatten(0, -2).sum(0), rtol=1e-4, atol=2e-4)
print("alike")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="this torch has no Triton")
def test_the_kernel_computes_it():
    """Without a GPU: Triton's interpreter takes it line by line."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", _INTERPRETED], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "alike", done.stderr[-2000:]
