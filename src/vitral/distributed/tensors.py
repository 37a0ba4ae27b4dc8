"""Tensors of which each rank holds a part (`DTensor`), and plain ones, by the same functions.

`DTensor` takes a while to import, so one process does without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """True if each rank holds a part of the tensor."""
    return hasattr(tensor, "full_tensor")


def has_shards(model: nn.Module) -> bool:
    """True if each rank holds a part of the parameters: then all ranks have to call the network equally often."""
    return any(map(is_sharded, model.parameters()))


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part; a plain tensor as it is."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor on each rank. All ranks have to call this for the same tensors in the same order."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def whole_of(part: Tensor, other: Tensor) -> Tensor:
    """Return the whole tensor of which each rank has a `part` as of `other`, on the ranks' device; a plain `part` as it
    is. All ranks have to call this.
    """
    if not is_sharded(other):
        return part
    from torch.distributed.tensor import DTensor

    moved, mesh = part.to(other.device_mesh.device_type), other.device_mesh
    parts = DTensor.from_local(moved, mesh, other.placements, shape=other.shape, stride=other.stride())
    return parts.full_tensor()


def like(tensor: Tensor, other: Tensor) -> Tensor:
    """Return a whole tensor, the same on every rank, on the device of `other`; of the same shape, with its parts."""
    moved = tensor.to(other.device)
    if not is_sharded(other) or tensor.shape != other.shape:
        return moved
    from torch.distributed.tensor import distribute_tensor

    parts = distribute_tensor(moved, other.device_mesh, other.placements, src_data_rank=None)
    return parts.to(other.device)  # the mesh's device has another one's parts while they are offloaded


def all_like(tensors: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`like` by name; a name that `own` lacks stays as it is."""
    return {name: like(value, own[name]) if name in own else value for name, value in tensors.items()}
