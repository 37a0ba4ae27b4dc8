"""Notice a rank that is killed, hangs, or cannot be reached, and name it.

A thread of each rank writes its position into torch's store every second. Rank 0 reads those of all ranks, the others
that of rank 0. Collectives of torch fail when a peer's process ends, but do not say which rank it was; and they wait
for a process that is stopped, or behind a cut link. Then the process ends itself: nothing in Python can interrupt a
collective.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

BEAT = 1.0
"""Seconds between two beats."""
LOST = 20.0
"""Seconds without a beat after which a rank counts as lost."""
DIAGNOSIS = 3.5
"""Seconds without a beat after which a rank counts as lost when a collective has failed."""
GRACE, GRACE_OF_MAIN = 3.0, 20.0
"""Seconds that a rank has to end by itself after another one failed; rank 0 may be saving."""
ENDED = "ended"

LOST_CODE = 2
"""Exit code of a process that ends because it lost another rank."""


class Heartbeat(threading.Thread):
    """Beat for one rank, and watch others, until `close`."""

    def __init__(self, store: Store, number: int, count: int, host: str, position: Callable[[], str]):
        """`store`: a connection of its own, since another thread may wait on the first one."""
        super().__init__(name="vitral-heartbeat", daemon=True)
        self.store, self.number, self.host, self.position = store, number, host, position
        self.watched = [n for n in (range(count) if number == 0 else (0,)) if n != number]
        self.everyone = [n for n in range(count) if n != number]
        self.report: Callable[[str, str, bool], None] = lambda what, why, store: None
        """Called before the process ends, with what happened, the reason, and if the store can be asked."""
        self.failing = False
        """True once this rank ends by itself, and only beats."""
        self._closing = threading.Event()
        self._turn, self._waiting = time.monotonic(), False
        store.set_timeout(timedelta(seconds=LOST))
        self._beat()  # the others may look for it from now on

    def run(self) -> None:
        """Beat and watch; end the process if a watched rank, or the store, is lost."""
        seen = _Seen()
        threading.Thread(target=self._guard, name="vitral-guard", daemon=True).start()
        while not self._closing.wait(BEAT):
            self._turn = time.monotonic()
            try:
                self._beat()
                lost = seen.silent(self._beats(self.watched), LOST)
                verdict = self.store.get(_VERDICT).decode() if self.store.check([_VERDICT]) else ""
            except Exception as error:  # of a store whose process has ended, or that cannot be reached
                if not self._closing.is_set() and not self.failing:
                    self.report("lost rank 0's machine", f"torch's store does not answer: {error}"[:200], False)
                    os._exit(LOST_CODE)
                return
            if self._closing.is_set() or self.failing:
                continue
            if lost:
                self.store.set(_VERDICT, "; ".join(map(_shown, lost)))
                self._end(f"lost {'; '.join(map(_shown, lost))}", f"no sign of life for {LOST:g} s")
            elif verdict and not self._ends_by_itself():
                self._end(f"lost {verdict}", "another rank reports it")  # it still waits for that one

    def _guard(self) -> None:
        """End the process if the store does not answer: torch waits forever for one whose process is stopped."""
        while not self._closing.wait(BEAT):
            if time.monotonic() - self._turn > LOST + GRACE_OF_MAIN * self._waiting + BEAT:
                self.report("lost rank 0's machine", f"torch's store has not answered for {LOST:g} s", False)
                os._exit(LOST_CODE)

    def _ends_by_itself(self) -> bool:
        until, self._waiting = time.monotonic() + (GRACE_OF_MAIN if self.number == 0 else GRACE), True
        while time.monotonic() < until and not self.failing and not self._closing.wait(BEAT / 2):
            with contextlib.suppress(Exception):  # of a store whose process has ended
                self._beat()
        return self.failing or self._closing.is_set()

    def missing(self) -> str:
        """Name the ranks that no longer beat, after a collective has failed; "" if all beat or end by themselves.

        Several silent ranks get more time: a rank on a busy machine may only be slow, and beats again.
        """
        seen, until = _Seen(), time.monotonic() + 3 * DIAGNOSIS
        lost: list[str] = []
        while time.monotonic() < until:
            try:
                lost = seen.silent(self._beats(self.everyone), DIAGNOSIS)
            except Exception:  # as above
                return "rank 0's machine"
            if len(lost) == 1 or seen.all_ended:
                break
            time.sleep(BEAT / 2)
        return "; ".join(map(_shown, lost))

    def tell(self) -> None:
        """Tell the others that this rank fails, so that they end, too."""
        with contextlib.suppress(RuntimeError):  # of a store whose process has ended
            self.store.set(_VERDICT, f"rank {self.number} on {self.host}")

    def wait_for_others(self) -> None:
        """Wait until every other rank has ended, or is silent: one that looks for a lost rank asks the store here."""
        seen, until = _Seen(), time.monotonic() + 3 * DIAGNOSIS + GRACE
        while time.monotonic() < until:
            try:
                beats = self._beats(self.everyone)
            except Exception:  # of a store whose process has ended
                return
            if {*seen.silent(beats, DIAGNOSIS), ENDED} >= {*beats.values()}:
                return
            time.sleep(BEAT / 2)

    def close(self) -> None:
        """Stop, and tell the others that this rank ends by itself."""
        self._closing.set()
        self.join(LOST)
        self._mark_ended()

    def _mark_ended(self) -> None:
        with contextlib.suppress(RuntimeError):  # as above
            self.store.set(_key(self.number), ENDED)

    def _beat(self) -> None:
        name = ", ".join(filter(None, (f"rank {self.number} on {self.host}", self.position())))
        self.store.set(_key(self.number), f"{time.monotonic()}|{name}")

    def _beats(self, ranks: list[int]) -> dict[int, str]:
        if not ranks:
            return {}
        values = self.store.multi_get([_key(number) for number in ranks])
        return {number: value.decode() for number, value in zip(ranks, values, strict=True)}

    def _end(self, what: str, why: str) -> None:
        self.report(what, why, True)
        if self.number == 0:  # the store may be in this process, and the others still ask it
            until = time.monotonic() + GRACE + 3 * BEAT
            while time.monotonic() < until:
                time.sleep(BEAT)
                self._beat()
        self._mark_ended()
        os._exit(LOST_CODE)


class _Seen:
    """The latest beat of each rank, and when it was new by this process's clock."""

    def __init__(self) -> None:
        self._latest: dict[int, tuple[str, float]] = {}

    def silent(self, beats: dict[int, str], seconds: float) -> list[str]:
        """Return the beats that have not changed for so long, except of ranks that ended by themselves."""
        now = time.monotonic()
        for number, beat in beats.items():
            if self._latest.get(number, ("", 0.0))[0] != beat:
                self._latest[number] = beat, now
        return [beat for beat, since in self._latest.values() if beat != ENDED and now - since > seconds]

    @property
    def all_ended(self) -> bool:
        return all(beat == ENDED for beat, _ in self._latest.values())


_VERDICT = "vitral/lost"


def _key(number: int) -> str:
    return f"vitral/beat/{number}"


def _shown(beat: str) -> str:
    return beat.partition("|")[2]
