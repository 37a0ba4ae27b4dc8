"""Batch norms whose statistics are those of all ranks' rows. torch's own, `SyncBatchNorm`, needs GPUs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitral.distributed.whole_batch import differentiable_sum


class SharedBatchNorm2d(nn.BatchNorm2d):
    """`BatchNorm2d` over the whole batch (N, C, H, W), of which each rank has some rows; in evaluation the same."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        values = x.float()
        C = x.shape[1]
        count = differentiable_sum(values.new_tensor(x.numel() // C))
        mean = differentiable_sum(values.sum((0, 2, 3))) / count
        centered = values - mean[:, None, None]
        variance = differentiable_sum(centered.square().sum((0, 2, 3))) / count
        with torch.no_grad():
            assert self.running_mean is not None
            assert self.running_var is not None
            assert self.num_batches_tracked is not None
            self.running_mean.lerp_(mean, self.momentum or 0.0)
            self.running_var.lerp_(variance * (count / (count - 1)), self.momentum or 0.0)
            self.num_batches_tracked.add_(1)
        scale = self.weight * (variance + self.eps).rsqrt()
        return (centered * scale[:, None, None] + self.bias[:, None, None]).to(x.dtype)


def share_norms(model: nn.Module) -> None:
    """Replace the batch norms of a network by `SharedBatchNorm2d` with the same parameters and buffers."""
    for parent in list(model.modules()):
        for name, norm in list(parent.named_children()):
            if type(norm) is nn.BatchNorm2d:
                shared = SharedBatchNorm2d(norm.num_features, norm.eps, norm.momentum, device="meta")
                shared.__dict__.update(vars(norm))
                setattr(parent, name, shared)
