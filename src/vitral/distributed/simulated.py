"""One rank of any number, simulated: real strategies on a fake process group, with tensors that have no storage.

Nothing is computed and nothing travels. A `Recorder` notes the collectives that the step calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from vitral.distributed import ranks as current_ranks
from vitral.distributed.ranks import ALONE, Ranks
from vitral.distributed.strategies import STRATEGIES, Ddp, Strategy

Kind = Literal["all-gather", "reduce-scatter", "all-reduce"]


class Counted(Ranks):
    """The first of `count` ranks, `local_count` on a machine, which are only counted."""

    simulated = True

    def __init__(self, count: int, local_count: int):
        self.count, self.local_count = count, local_count

    @property
    def together(self) -> bool:
        return True


@contextmanager
def simulated(count: int, local_count: int) -> Iterator[Ranks]:
    """Be the first of `count` ranks, none of which exists, until the block ends."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if current_ranks.current() is not ALONE or dist.is_initialized():
        raise RuntimeError("real ranks cannot simulate others")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    ranks = current_ranks._current = Counted(count, local_count)
    try:
        yield ranks
    finally:
        current_ranks._current = ALONE
        dist.destroy_process_group()


def without_storage(model: nn.Module) -> nn.Module:
    """Replace the parameters and buffers of a network on the meta device by fake ones on the CPU. Call it inside
    torch's `FakeTensorMode`.
    """
    for module in model.modules():
        for name, value in module._parameters.items():
            if value is not None:
                fake = torch.empty(value.shape, dtype=value.dtype, device="cpu")
                module._parameters[name] = nn.Parameter(fake, value.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
    return model


class _Ddp(Ddp):
    """`Ddp` that calls its collective from Python, where it is recorded."""

    options = MappingProxyType({**Ddp.options, "init_sync": False})

    def __init__(self, model: nn.Module, ranks: Ranks):
        super().__init__(model, ranks)
        self.module.register_comm_hook(None, _reduce)


def _reduce(_: object, bucket: Any) -> Any:
    values = bucket.buffer()
    dist.all_reduce(values)
    done: Any = torch.futures.Future()
    done.set_result(values)
    return done


_reduce.__annotations__.clear()  # torch accepts none, or types and not their names


def simulated_strategy(name: str, model: nn.Module, ranks: Ranks) -> Strategy:
    """Return the strategy of this name for a network without storage."""
    return _Ddp(model, ranks) if name == "ddp" else STRATEGIES[name](model, ranks)


@dataclass(frozen=True)
class Collective:
    """One collective of a step."""

    kind: Kind
    ranks: tuple[int, ...]
    bytes: int
    """Of the whole tensor: that all ranks have gathered, or that each brings to a reduction."""

    @property
    def sent(self) -> float:
        """Bytes that each rank sends in a ring, as NCCL and gloo do for large tensors; it receives as many."""
        count = len(self.ranks)
        return self.bytes * (count - 1) / count * (2 if self.kind == "all-reduce" else 1)

    def on_links(self, per_machine: int) -> tuple[float, float]:
        """Return the bytes that a rank sends within its machine, and between machines.

        A ring leaves each machine once. The adapters of a machine's ranks share its traffic.
        """
        machines = len({rank // per_machine for rank in self.ranks})
        members = len(self.ranks) // machines
        if machines == 1:
            return self.sent, 0.0
        return self.sent * (members > 1), self.sent / members


class Recorder(TorchDispatchMode):
    """Notes the collectives inside the block, except those of a few values, such as a norm's."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[Collective] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function)
        if name.startswith("c10d."):
            self._note(name.split(".")[1], args)
        return function(*args, **(kwargs or {}))

    def _note(self, name: str, args: Any) -> None:
        if name == "_allgather_base_":
            whole, kind, group = args[0], "all-gather", args[2]
        elif name == "_reduce_scatter_base_":
            whole, kind, group = args[1], "reduce-scatter", args[2]
        elif name == "allreduce_":
            whole, kind, group = args[0][0], "all-reduce", args[1]
        else:
            return
        if whole.numel() > 1:
            members = tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(group)))
            self.collectives.append(Collective(kind, members, _bytes(whole)))  # type: ignore[arg-type]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
