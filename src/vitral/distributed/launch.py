"""Start ranks on this machine with torch's elastic launcher, in this process."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import sys
import uuid
from collections.abc import Sequence
from typing import Any

from vitral.containers import cores
from vitral.distributed.environment import NPROC
from vitral.errors import RankError, UsageError

SIGNALS = tuple(name for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1") if hasattr(signal, name))
"""Signals that the launcher passes on to the ranks, which save and stop; Windows has the first two."""
GRACE = 300
"""Seconds that ranks have to save after a signal, before they are killed. In torch 2.11 it is 30, and cannot be set."""

RESUME = "--resume goes on from the last checkpoint"


def launch(words: Sequence[str], count: int, hint: str = RESUME) -> int:
    """Run `vitral` with these words as `count` ranks; return the exit code.

    The ranks print for themselves. Raises `RankError` with `hint` if one is killed, which prints nothing.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    check(count)
    for name in list(logging.root.manager.loggerDict):  # the ranks print for themselves; each has a level of its own
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    environment = dict(os.environ)
    os.environ[NPROC] = str(count)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // count)))
    known = {field.name for field in dataclasses.fields(LaunchConfig)}
    grace: dict[str, Any] = {"shutdown_timeout": GRACE} if "shutdown_timeout" in known else {}
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        signals_to_handle=",".join(SIGNALS),
        **grace,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "vitral", *words)
    except SignalException as stopped:
        return 130 if stopped.sigval == signal.SIGINT else 0
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode > 0:  # it has reported the reason
            return failure.exitcode
        why = f"it was ended by {failure.signal_name()}"
        raise RankError(f"rank {rank} ended", why=why, hint=hint) from None
    finally:  # torch's launcher sets variables of this process
        os.environ.clear()
        os.environ.update(environment)
    return 0


def check(count: int) -> None:
    """Raise `UsageError` for a number of ranks that cannot be."""
    if not 1 <= count <= _MOST:
        raise UsageError(f"--nproc must be from 1 to {_MOST}, not {count}", hint="--nproc 2")


_MOST = 1024
