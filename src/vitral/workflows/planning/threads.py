"""Choose the number of CPU threads of a run."""

from __future__ import annotations

import dataclasses
import itertools

import torch

from vitral.containers import cores
from vitral.distributed.ranks import current
from vitral.errors import UsageError
from vitral.model import summarize
from vitral.recipes.table import UNSUPPORTED
from vitral.training.plan import Choice
from vitral.workflows.planning.job import Job
from vitral.workflows.planning.throughput import step_seconds

LEAST_GAIN = 1.4
"""Least speed-up by twice the threads that is worth them. Every layer waits for the slowest thread: beside another
program on its core, a network that gains less becomes many times slower than on fewer threads.
"""
_LARGE = 3e11
"""FLOPs of an image, forward and backward, above which a step gains by every thread, and a trial would take long."""
_TRIAL = 1e11
"""Most FLOPs of a trial step."""


def choose_threads(job: Job) -> Job:
    """Return the job with its number of threads: the most that gain enough in trial steps, or what is requested.

    The bits of a run depend on it, so it is saved with the run. Raises `UsageError` for more threads than cores.
    """
    if job.machine.device.type != "cpu" or current().together:  # a launcher gives each rank its cores
        return job
    if job.run.threads is not None:
        if job.run.threads > cores():
            why = "this process may use no more cores"
            raise UsageError(f"--threads must be from 1 to {cores()}, not {job.run.threads}", why=why)
        return job
    most = torch.get_num_threads()
    if "batch_size" in UNSUPPORTED.get(job.run.recipe, ()):  # fitted in closed form, without steps
        return job
    count, why = (most, "") if most == 1 else _tried(job, most)
    choices = (*job.plan.choices, Choice("threads", str(count), why)) if why else job.plan.choices
    run = dataclasses.replace(job.run, threads=count)
    return dataclasses.replace(job, plan=dataclasses.replace(job.plan, run=run, choices=choices))


def _tried(job: Job, most: int) -> tuple[int, str]:
    flops = 3 * summarize(job.config).flops
    if flops > _LARGE:
        return most, "a network of this size gains from every thread"
    counts = [*(1 << bit for bit in range((most - 1).bit_length())), most]
    seconds = dict(zip(counts, step_seconds(job, counts, max(1, int(_TRIAL / flops))), strict=True))
    best = counts[0]
    for fewer, more in itertools.pairwise(counts):
        if seconds[fewer] / seconds[more] < 1 + (LEAST_GAIN - 1) * (more / fewer - 1):
            break
        best = more
    gain = seconds[1] / seconds[most]
    few = "" if best == most else "only "
    speed = f"{few}{gain:.1f} times as fast as one" if gain >= 1 else f"{1 / gain:.1f} times slower than one"
    why = f"{most} threads are {speed} in trial steps"
    return best, why if best == most else f"{why}, and become much slower while other programs run"
