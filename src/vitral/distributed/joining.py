"""Meet the other ranks before the first collective, and name those that do not come.

torch waits for other ranks in calls that no signal interrupts, and does not say for whom. Here each rank asks torch's
store in short turns. Rank 0 calls under a name that is new for each meeting, the others answer, and rank 0 confirms
each answer: the store of torchrun keeps the keys of ranks that have ended, after it has started them again.
"""

from __future__ import annotations

import os
import signal
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from vitral.distributed.environment import NAMES
from vitral.distributed.heartbeat import Heartbeat
from vitral.errors import Elsewhere, RankError
from vitral.stopping import handling

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

JOINING = timedelta(minutes=10)
"""Longest wait for the other ranks. A launcher ends it before, if one of them has ended."""
TIMEOUT = timedelta(minutes=30)
"""Longest wait for another rank, which may be planning, decoding or saving."""
TURN = 0.1
"""Seconds between two questions to the store."""
ANSWER = timedelta(seconds=5)
"""Longest wait for a connection to the store while the ranks meet: no signal interrupts it."""

_CALL, _ALL, _GIVEN_UP = "vitral/call", "vitral/all", "vitral/given up"
_HINT = "start as many ranks as WORLD_SIZE has, with the same MASTER_ADDR and MASTER_PORT"
_AGAIN = "the same command again: nothing had begun"


class Place(NamedTuple):
    """The place of this process among the ranks, as its launcher sets it."""

    number: int
    world: int
    address: str
    port: int
    process: int

    @classmethod
    def of_environment(cls) -> Place:
        rank, count, address, port = (os.environ[name] for name in NAMES)
        return cls(int(rank), int(count), address, int(port), os.getpid())


def meet(place: Place, beat: Callable[[Store], Heartbeat]) -> tuple[Store, Heartbeat]:
    """Wait for all ranks; return a store with keys of their own, and this rank's heartbeat, which has begun.

    `beat` makes a heartbeat on a store. Raises `RankError` with the missing ranks if they do not come in time, or if a
    launcher ends this rank meanwhile; then one rank raises it, and the others `Elsewhere`.
    """
    until = time.monotonic() + JOINING.total_seconds()
    with _terminated():
        try:
            base = _base(place, until)
        except _Terminated:
            raise _missing([0], f"no answer from {place.address}:{place.port}", _ENDED) from None
        base.set_timeout(ANSWER)
        arrival = (_Caller if place.number == 0 else _Follower)(base, place, beat)
        try:
            why = _ENDED
            with suppress(_Terminated):
                if _all_have_come(arrival, until):
                    base.set_timeout(TIMEOUT)
                    return arrival.store, arrival.heartbeat
                why = f"waited for {JOINING.total_seconds():g} s"
            raise arrival.failure(why)
        except BaseException:
            arrival.leave()
            raise


_ENDED = "this rank received a signal to end, as from a launcher after another one has ended"


def _all_have_come(arrival: _Arrival, until: float) -> bool:
    while time.monotonic() < until:
        try:
            if arrival.turn():
                return True
        except dist.DistError as error:
            raise _lost_store(error) from None
        time.sleep(TURN)
    return False


class _Arrival:
    """A rank that waits for the others."""

    heartbeat: Any = None

    def __init__(self, base: Store, place: Place, beat: Callable[[Store], Heartbeat]):
        self.base, self.place, self.beat = base, place, beat
        self.store = base

    def turn(self) -> bool:
        """Do what can be done now; return True if all ranks have come."""
        raise NotImplementedError

    def missing(self) -> list[int]:
        """Return the ranks that have not come."""
        others = range(1, self.place.world)
        return [n for n in others if n != self.place.number and not self.store.check([_here(n)])]

    def enter(self, name: str) -> None:
        """Go to the store of a call."""
        from torch._C._distributed_c10d import PrefixStore

        self.store = PrefixStore(f"vitral/{name}", self.base)
        self.heartbeat = self.beat(self.store)
        self.heartbeat.watched = []

    def watch(self, number: int) -> None:
        self.heartbeat.watched = [*self.heartbeat.watched, number]

    def check_given_up(self) -> None:
        """Raise `Elsewhere` if another rank has given up, which names the missing ones."""
        if self.store.check([_GIVEN_UP]):
            raise Elsewhere

    def failure(self, why: str) -> Exception:
        """Return the error of the missing ranks, on the first rank that gives up."""
        try:
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            first = self.store.add(f"vitral/missed/{attempt}", 1) == 1
            missing = self.missing()
            self.store.set(_GIVEN_UP, "")
        except dist.DistError as error:
            return _lost_store(error)
        if not first:
            return Elsewhere()
        if self.place.number == 0:
            time.sleep(5 * TURN)  # the store may be in this process, and the others still ask it
        return _missing(missing, f"noticed by rank {self.place.number} on {socket.gethostname()}", why)

    def leave(self) -> None:
        if self.heartbeat is not None:
            self.heartbeat.close()


class _Caller(_Arrival):
    """Rank 0."""

    def __init__(self, base: Store, place: Place, beat: Callable[[Store], Heartbeat]):
        super().__init__(base, place, beat)
        name = uuid.uuid4().hex
        self.enter(name)
        self.heartbeat.start()
        self.waiting = list(range(1, place.world))
        base.set(_CALL, name)

    def turn(self) -> bool:
        self.check_given_up()
        for number in list(self.waiting):
            if self.store.check([_here(number)]):
                self.store.set(_confirmed(number), self.store.get(_here(number)).decode())
                self.watch(number)
                self.waiting.remove(number)
        if not self.waiting:
            self.store.set(_ALL, "")
        return not self.waiting


class _Follower(_Arrival):
    """Any other rank."""

    def __init__(self, base: Store, place: Place, beat: Callable[[Store], Heartbeat]):
        super().__init__(base, place, beat)
        self.called, self.token, self.confirmed = b"", uuid.uuid4().hex, False

    def turn(self) -> bool:
        if not self.confirmed:
            self.answer()
        if not self.confirmed:
            return False
        self.check_given_up()
        return bool(self.store.check([_ALL]))

    def answer(self) -> None:
        """Answer the latest call, which may be one of a rank 0 that has ended: that one does not confirm."""
        if self.base.check([_CALL]) and (called := self.base.get(_CALL)) != self.called:
            self.called = called
            self.enter(called.decode())
            self.store.set(_here(self.place.number), self.token)
        key = _confirmed(self.place.number)
        if self.called and self.store.check([key]) and self.store.get(key).decode() == self.token:
            self.confirmed = True
            self.heartbeat.start()
            self.watch(0)

    def missing(self) -> list[int]:
        return super().missing() if self.confirmed else [0]

    def leave(self) -> None:
        if self.confirmed:
            super().leave()


def _base(place: Place, until: float) -> Store:
    """Return torch's store of these ranks. A process may join, leave and join again at the same one."""
    global _met
    if _met is None or _met[0] != place:
        _met = place, _connected(place, until)
    return _met[1]


_met: tuple[Place, Store] | None = None


def _connected(place: Place, until: float) -> Store:
    from torch._C._distributed_c10d import TCPStore

    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # by the launcher
    hosts = place.number == 0 and not hosted
    while True:
        try:
            if not hosts:
                _wait_for_server(place, until)
            return TCPStore(
                place.address, place.port, place.world, hosts, ANSWER, wait_for_workers=False, multi_tenant=True
            )
        except (OSError, dist.DistNetworkError, dist.DistStoreError) as error:
            # A server that can be reached may end before torch connects.
            if hosts or time.monotonic() > until:
                why = " ".join(str(error).split())[:200]
                raise _missing([0], f"no answer from {place.address}:{place.port}", why) from None


def _wait_for_server(place: Place, until: float) -> None:
    """Wait until the store can be reached: torch's own wait ignores signals."""
    while True:
        try:
            socket.create_connection((place.address, place.port), timeout=5).close()
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(TURN)
        else:
            return


class _Terminated(Exception):  # noqa: N818 - not an error
    """A launcher ends this rank."""


@contextmanager
def _terminated() -> Iterator[None]:
    """Raise `_Terminated` for SIGTERM."""

    def stop(number: int, frame: object) -> None:
        raise _Terminated

    with handling({signal.SIGTERM: stop}):
        yield


def _missing(ranks: list[int], where: str, why: str) -> RankError:
    numbers = ", ".join(map(str, ranks))
    what = f"rank {numbers} has not joined" if len(ranks) == 1 else f"ranks {numbers} have not joined"
    return RankError(what, where=where, why=why, hint=_AGAIN if why == _ENDED else _HINT)


def _lost_store(error: Exception) -> RankError:
    why = f"torch's store does not answer: {error}"[:200]
    return RankError("lost rank 0's machine", why=why, hint=_HINT)


def _here(number: int) -> str:
    return f"vitral/here/{number}"


def _confirmed(number: int) -> str:
    return f"vitral/confirmed/{number}"
