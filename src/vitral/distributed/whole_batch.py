"""Statistics of a whole batch of which each rank has some rows. For a batch that is not shared, torch's own.

The loss is a sum over ranks, so the gradient of a sum over ranks is the sum of their gradients.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from vitral.distributed.ranks import summed
from vitral.kernels import random


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        total = gradient.contiguous().clone()
        dist.all_reduce(total)
        return total


def differentiable_sum(x: Tensor) -> Tensor:
    """Sum over ranks, with gradients."""
    total: Tensor = _Sum.apply(x)
    return total


def all_rows(x: Tensor) -> Tensor:
    """Rows of the whole batch, with gradients, from this rank's rows (B, …)."""
    rows = random.current()
    if rows is None:
        return x
    before, after = (x.new_zeros(count, *x.shape[1:]) for count in (rows.start, rows.total - rows.stop))
    return differentiable_sum(torch.cat([before, x, after]))


def own_rows(count: int) -> range:
    """Places of this rank's `count` rows in `all_rows`."""
    start = 0 if (rows := random.current()) is None else rows.start
    return range(start, start + count)


def total(value: Tensor) -> Tensor:
    """Sum over the ranks that share the batch, without gradients."""
    return value if random.current() is None else summed(value)


def count(x: Tensor) -> int:
    """Number of rows (n, …) on all ranks. One process does not wait for a GPU."""
    return len(x) if random.current() is None else int(summed(torch.tensor(len(x), device=x.device)))


def mean(x: Tensor) -> Tensor:
    """Mean over rows (n, …), as many for each image, of the whole batch; without gradients."""
    rows = random.current()
    return x.mean(0) if rows is None else summed(x.sum(0)) / (len(x) * rows.total // (rows.stop - rows.start))


def logsumexp(x: Tensor, dim: tuple[int, ...]) -> Tensor:
    """`x.logsumexp(dim, keepdim=True)` over rows (n, K) of all ranks, of which this one may have none; without
    gradients.
    """
    if random.current() is None:
        return x.logsumexp(dim, keepdim=True)
    padded = torch.cat([x, x.new_full((1, x.shape[1]), -torch.inf)])
    most = padded.amax(dim, keepdim=True)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return most + summed((padded - most).exp().sum(dim, keepdim=True)).log()
