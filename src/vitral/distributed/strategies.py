"""Strategies: how ranks share the work of a step, as one table. All are PyTorch's own.

A strategy prepares a network for training, before its optimizer is built. `module` is called in a step; parameters,
state dict and averaged weights stay those of the network itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, TypeVar

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from vitral.distributed.norms import share_norms
from vitral.distributed.ranks import ALONE, Ranks
from vitral.distributed.tensors import whole

if TYPE_CHECKING:
    from torch.distributed.fsdp import OffloadPolicy

T = TypeVar("T")


class _Policy(TypedDict, total=False):
    """Arguments of `fully_shard`."""

    offload_policy: OffloadPolicy


class Strategy:
    """One process: nothing to share."""

    def __init__(self, model: nn.Module, ranks: Ranks = ALONE):
        self.module, self.ranks = model, ranks

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Return the context of forward and backward of a micro-batch; gradients are exchanged in the step's last."""
        return nullcontext()

    def shard(self, model: nn.Module) -> None:
        """Share out another network of the same kind that is never trained, such as the averaged one."""

    def gathered(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return whole tensors on rank 0, for saving. Called on all ranks."""
        return tensors

    def scaled(self, loss: Tensor, parts: int) -> Tensor:
        """Scale a rank's loss of one of `parts` micro-batches for backward. Ranks' losses add up to the batch's, and
        their gradients are averaged.
        """
        factor = self.ranks.count / parts
        return loss * factor if self.ranks.count > 1 else loss / parts if parts > 1 else loss


class Ddp(Strategy):
    """A whole network on each rank; gradients are averaged during backward (`DistributedDataParallel`)."""

    module: DistributedDataParallel
    options: Mapping[str, Any] = MappingProxyType({"gradient_as_bucket_view": True})

    def __init__(self, model: nn.Module, ranks: Ranks):
        if ranks.count > 1:
            share_norms(model)
        # the gradient of a token of one image is a view of a larger tensor, which is as good as its own
        warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
        warnings.filterwarnings("ignore", "find_unused_parameters=True was specified")
        # Otherwise torch rearranges gradients after its first step, and a run that goes on has a first step again: from
        # three ranks on the order in which they are added would differ, and with it the bits.
        unused = getattr(model, "may_leave_unused", False) or ranks.count > 2
        called = _Called(model)
        super().__init__(DistributedDataParallel(called, find_unused_parameters=unused, **self.options), ranks)

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self.module.no_sync()


class _Called(nn.Module):
    """A network, or a function of it, inside the module whose gradients are averaged."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, *inputs: object) -> object:
        if isinstance(inputs[0], _Function):
            return inputs[0].of(self.network)
        return self.network(*inputs)


class _Function(NamedTuple):
    of: Callable[[nn.Module], object]


def through(module: nn.Module, function: Callable[[Any], T]) -> T:
    """Compute a function of the network in a step; `module` is that of its strategy. Not for networks in parts."""
    return module(_Function(function)) if isinstance(module, DistributedDataParallel) else function(module)


class Fsdp(Strategy):
    """A part of each parameter, gradient and moment on each rank (FSDP2, `fully_shard`).

    Parameters of a block are gathered before its forward and its backward, and freed after them; gradients are averaged
    part by part. In fp32 on the wire, so that results are those of `Ddp`.
    """

    def __init__(self, model: nn.Module, ranks: Ranks):
        from torch.distributed.device_mesh import init_device_mesh

        if ranks.count > 1:
            share_norms(model)
        self.device = next(model.parameters()).device.type
        names: tuple[str, ...] = ("replicate", "shard") if len(self.shape(ranks)) == 2 else ("shard",)
        self.mesh = init_device_mesh(self.device, self.shape(ranks), mesh_dim_names=names)
        super().__init__(model, ranks)
        self._fully_shard(model)

    @staticmethod
    def shape(ranks: Ranks) -> tuple[int, ...]:
        """Return the shape of the mesh of ranks; parts are along its last dimension."""
        return (ranks.count,)

    def policy(self) -> _Policy:
        """Return more arguments of `fully_shard`."""
        return {}

    def shard(self, model: nn.Module) -> None:
        # By default the outermost parameters stay whole until backward, which never comes: the average would be updated
        # with parts of them.
        self._fully_shard(model, reshard_after_forward=True)

    def _fully_shard(self, model: nn.Module, reshard_after_forward: bool | None = None) -> None:
        from torch.distributed.fsdp import fully_shard

        lists = [module for name, module in model.named_modules() if name.rpartition(".")[2] == "blocks"]
        for block in [block for one in lists for block in one.children()]:
            fully_shard(block, mesh=self.mesh, **self.policy())
        fully_shard(model, mesh=self.mesh, reshard_after_forward=reshard_after_forward, **self.policy())

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        from torch.distributed.fsdp import FSDPModule

        assert isinstance(self.module, FSDPModule)
        self.module.set_requires_gradient_sync(last)
        return nullcontext()

    def gathered(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        found = {}
        for name, tensor in tensors.items():  # one by one: a GPU holds one whole tensor at a time
            value = whole(tensor)
            if self.ranks.main:
                found[name] = value.detach().cpu()
        return found


class Hsdp(Fsdp):
    """`Fsdp` within a machine, whose links are fast. Between machines travel only the gradients of a rank's part."""

    @staticmethod
    def shape(ranks: Ranks) -> tuple[int, ...]:
        return ranks.machines, ranks.local_count


class Offloaded(Fsdp):
    """`Fsdp` with parameters, gradients and moments in the CPU's memory: a GPU holds some blocks at a time."""

    def policy(self) -> _Policy:
        from torch.distributed.fsdp import CPUOffloadPolicy

        return {"offload_policy": CPUOffloadPolicy(pin_memory=self.device == "cuda")}


STRATEGIES: Mapping[str, Callable[[nn.Module, Ranks], Strategy]] = {
    "ddp": Ddp,
    "fsdp": Fsdp,
    "hsdp": Hsdp,
    "offload": Offloaded,
}
"""Strategies by the name of `--strategy`."""


def parts_of(name: str, ranks: Ranks) -> int:
    """Return the number of parts into which a strategy cuts parameters, gradients and moments."""
    strategy = STRATEGIES.get(name)
    return strategy.shape(ranks)[-1] if isinstance(strategy, type) and issubclass(strategy, Fsdp) else 1


def strategy_of(model: nn.Module, ranks: Ranks, name: str) -> Strategy:
    """Return the strategy of a run: the named one ("auto": ddp), or none for one process.

    A group of one rank has nothing to cut or exchange, so that only `offload` differs from one process.
    """
    if ranks.count == 1 and name != "offload":
        return Strategy(model, ranks)
    return STRATEGIES["ddp" if name == "auto" else name](model, ranks) if ranks.together else Strategy(model)
