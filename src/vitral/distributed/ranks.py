"""This process among the ranks that train together, and what they agree on.

Rank 0 plans, prints and writes. `Ranks` is one process alone: each method returns its argument. `Group` has the same
methods on top of `torch.distributed`. Values on the CPU travel by gloo, gradients by nccl where there are GPUs.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from vitral.console import stderr
from vitral.distributed.environment import launched
from vitral.distributed.heartbeat import Heartbeat
from vitral.distributed.joining import TIMEOUT, Place, meet
from vitral.errors import Elsewhere, RankError, VitralError
from vitral.stopping import no_stops

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")

RESUME = "start the same command with --resume: the last checkpoint is whole"


class Ranks:
    """One process that trains alone."""

    number, count = 0, 1
    local_count = 1
    """Ranks on this machine."""

    @property
    def machines(self) -> int:
        """Machines with ranks, if each has as many as this one; else 1."""
        whole, rest = divmod(self.count, self.local_count)
        return 1 if rest else whole

    @property
    def together(self) -> bool:
        """True for a rank of a group, even of one."""
        return False

    @property
    def main(self) -> bool:
        """True for the rank that plans, prints and writes."""
        return self.number == 0

    def share(self, make: Callable[[], T]) -> T:
        """Call `make` on rank 0 and return its result on every rank. If it raises, the others raise `Elsewhere`."""
        return make()

    def share_tensors(self, make: Callable[[], tuple[Mapping[str, Tensor], T]]) -> tuple[dict[str, Tensor], T]:
        """`share` of tensors on the CPU, sent one by one, and of anything beside them."""
        tensors, beside = make()
        return dict(tensors), beside

    def collect(self, value: T) -> list[T] | None:
        """Return the values of all ranks, in their order, on rank 0; None on the others."""
        return [value]

    def collect_in_turn(self, values: list[T]) -> list[T] | None:
        """Return values of which each rank has every count-th, in the order of all, on rank 0; None on the others."""
        parts = self.collect(values)
        if parts is None:
            return None
        total = sum(map(len, parts))
        return [parts[number % self.count][number // self.count] for number in range(total)]

    def exchange(self, value: T) -> list[T]:
        """Return the values of all ranks, in their order, on every rank."""
        return [value]

    def agree(self, make: Callable[[], T]) -> T:
        """Call `make`, without collectives, on every rank. The first rank of those where it raises raises the error;
        all others raise `Elsewhere`.
        """
        return make()

    def pool(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Add the scalars of all ranks, name by name."""
        return dict(sums)

    def stopping(self, requested: threading.Event) -> Stopping:
        """Follow a request to stop that any rank may get."""
        return Stopping(requested)

    def at(self, epoch: int, step: int) -> None:
        """Note the position, for an error."""

    def reached(self, position: str) -> None:
        """Note the position in words, for an error."""


class Stopping:
    """A request to stop, of one process."""

    def __init__(self, requested: threading.Event):
        self.requested = requested

    def after_step(self) -> bool:
        """True if the run shall stop after this step. Call it once a step."""
        return self.requested.is_set()

    def after_epoch(self) -> bool:
        """True if the run shall stop after this epoch. Call it once an epoch."""
        return self.requested.is_set()


class Group(Ranks):
    """One of several processes that train together."""

    control: dist.ProcessGroup
    """Carries what ranks agree on, on the CPU."""

    def __init__(self, hint: str):
        """Wait for the others. `hint` has the words to type after a rank was lost."""
        place = Place.of_environment()
        self.number, self.count = place.number, place.world
        self.local_count = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        self.host, self.position, self.hint = socket.gethostname(), "", hint
        self.store, self.heartbeat = meet(place, self._heartbeat)

    def _heartbeat(self, store: Store) -> Heartbeat:
        self.store = store
        heartbeat = Heartbeat(store.clone(), self.number, self.count, self.host, lambda: self.position)
        heartbeat.report = lambda what, why, asks: _print_lost(self, what, why, asks)
        return heartbeat

    def connect(self, device: str) -> None:
        """Connect the ranks for collectives."""
        gpus = device in ("auto", "cuda") and torch.cuda.is_available()
        if gpus:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if gpus else "gloo",
            timeout=TIMEOUT,
            store=self.store,
            rank=self.number,
            world_size=self.count,
        )
        control: Any = dist.new_group(backend="gloo", timeout=TIMEOUT)
        self.control = control

    @property
    def together(self) -> bool:
        return True

    def share(self, make: Callable[[], T]) -> T:
        if self.main:
            try:
                made = make()
            except BaseException:
                self._send(None)
                raise
            self._send((made,))
            return made
        box: list[tuple[T] | None] = [None]
        dist.broadcast_object_list(box, src=0, group=self.control)
        if box[0] is None:
            raise Elsewhere
        return box[0][0]

    def _send(self, value: object) -> None:
        dist.broadcast_object_list([value], src=0, group=self.control)

    def share_tensors(self, make: Callable[[], tuple[Mapping[str, Tensor], T]]) -> tuple[dict[str, Tensor], T]:
        tensors: Mapping[str, Tensor] = {}

        def made() -> tuple[dict[str, Tensor], T]:
            nonlocal tensors
            tensors, beside = make()
            return {name: value.to("meta") for name, value in tensors.items()}, beside

        shapes, beside = self.share(made)
        received = {}
        for name, shape in shapes.items():
            received[name] = tensors[name].contiguous() if self.main else torch.empty_like(shape, device="cpu")
            dist.broadcast(received[name], src=0, group=self.control)
        return received, beside

    def collect(self, value: T) -> list[T] | None:
        values: list[Any] | None = [None] * self.count if self.main else None
        dist.gather_object(value, values, dst=0, group=self.control)
        return values

    def exchange(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, group=self.control)
        return values

    def agree(self, make: Callable[[], T]) -> T:
        made: T | None = None
        failure: Exception | None = None
        try:
            made = make()
        except Exception as error:
            failure = error
        failed = [number for number, failing in enumerate(self.exchange(failure is not None)) if failing]
        if failure is not None and failed[0] == self.number:
            raise failure
        if failed:
            raise Elsewhere from failure
        return cast("T", made)

    def pool(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if not sums:
            return {}
        names = sorted(sums)
        values = torch.stack([sums[name] for name in names])
        added = values.cpu()
        dist.all_reduce(added, group=self.control)
        of = dict(zip(names, added.to(values.device).unbind(), strict=True))
        return {name: of[name] for name in sums}

    def stopping(self, requested: threading.Event) -> Stopping:
        return _AgreedStopping(requested, self.control)

    def at(self, epoch: int, step: int) -> None:
        self.reached(f"epoch {epoch + 1}, step {step}")

    def reached(self, position: str) -> None:
        self.position = position


class _AgreedStopping(Stopping):
    """A request to stop that all ranks heed after the same step: the one after the first that any rank knows of it.

    The answer to a step's question is read a step later, when it has long arrived.
    """

    def __init__(self, requested: threading.Event, control: dist.ProcessGroup):
        super().__init__(requested)
        self.control = control
        self.asked: tuple[Tensor, dist.Work | None] | None = None

    def after_step(self) -> bool:
        if self._answer():
            return True
        self._ask()
        return False

    def after_epoch(self) -> bool:
        if self._answer():
            return True
        self._ask()
        return self._answer()

    def _ask(self) -> None:
        flag = torch.tensor(int(self.requested.is_set()), dtype=torch.int32)
        self.asked = flag, dist.all_reduce(flag, group=self.control, async_op=True)

    def _answer(self) -> bool:
        if self.asked is None:
            return False
        flag, work = self.asked
        self.asked = None
        assert work is not None  # this rank is in the group
        work.wait()
        return bool(flag)


def summed(value: Tensor) -> Tensor:
    """Sum of a tensor over the ranks, without gradients."""
    if not _current.together:
        return value
    total = value.detach().clone()
    dist.all_reduce(total)
    return total


ALONE = Ranks()
_current: Ranks = ALONE


def current() -> Ranks:
    """Return this process among the ranks."""
    return _current


@contextmanager
def joined(device: str = "auto", hint: str = RESUME) -> Iterator[Ranks]:
    """Join the ranks that a launcher started, until the block ends; without a launcher this process is alone.

    `hint` is for the error that reports a lost rank.

    An exception ends all ranks. The first rank that fails raises it, with its number, machine and position unless it is
    rank 0; the others raise `Elsewhere`. If a collective fails because a rank is gone, the error names that rank.
    """
    global _current
    if not launched() or _current is not ALONE:
        yield _current
        return
    group = _current = Group(hint)
    failed = False
    try:
        group.connect(device)
        yield group
    except (KeyboardInterrupt, SystemExit, Elsewhere):
        raise
    except Exception as error:
        with no_stops():  # a launcher that saw another rank end signals this one, which shall say what happened
            failed = group.heartbeat.failing = True
            if not _is_first_failure(group):
                raise Elsewhere from error
            if group.main and isinstance(error, VitralError):
                raise
            raise _named(error, group) from error
    finally:
        _current = ALONE
        if failed:
            group.heartbeat.tell()
        group.heartbeat.close()
        if failed and group.main:  # the store may be in this process, and they still ask it who failed first
            group.heartbeat.wait_for_others()
        if dist.is_initialized():
            dist.destroy_process_group()


def _is_first_failure(group: Group) -> bool:
    try:
        return bool(group.heartbeat.store.add("vitral/failures", 1) == 1)  # another thread may wait on `group.store`
    except RuntimeError:  # the store's process is gone, and with it whoever could tell
        return True


def _print_lost(group: Group, what: str, why: str, store: bool) -> None:
    """Print the error of a rank whose process ends while it waits for another one.

    Without torch's `store` every rank does, since nobody can tell which one was the first.
    """
    if not store or _is_first_failure(group):
        where = f"noticed by rank {group.number} on {group.host}"
        stderr().print(
            f"error: {RankError(what, where=where, why=why, hint=group.hint)}", highlight=False, soft_wrap=True
        )


def _named(error: Exception, group: Group) -> RankError:
    where = ", ".join(filter(None, (f"rank {group.number} on {group.host}", group.position)))
    if isinstance(error, VitralError):
        return RankError(f"{where}: {error.what}", where=error.where, why=error.why, hint=error.hint)
    message = " ".join(str(error).split())[:300]
    if isinstance(error, RuntimeError) and (lost := group.heartbeat.missing()):
        return RankError(f"lost {lost}", where=f"noticed by {where}", why=message, hint=group.hint)
    return RankError(f"{where}: {type(error).__name__}", why=message or None, hint="re-run with --debug")
