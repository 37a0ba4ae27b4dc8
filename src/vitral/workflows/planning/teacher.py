"""Plan the features of a teacher (`vitral pretrain --method distill`): kept on disk or not, their size and time."""

from __future__ import annotations

import dataclasses
import time
from statistics import median

import torch

from vitral.data.loader import DISK_SHARE
from vitral.data.pixel_cache import PixelCache
from vitral.distributed.ranks import current
from vitral.errors import UsageError
from vitral.model import summarize
from vitral.pretraining.methods import needs_teacher
from vitral.training.plan import Choice
from vitral.wording import count, duration, memory_size
from vitral.workflows.planning.draft import Draft
from vitral.workflows.planning.job import Job
from vitral.workflows.running.teaching import BATCH, feature_teacher, views_of

NAME = "teacher's features"
_TRIAL_FLOPS, _TRIALS = 1e11, 4
"""FLOPs of a trial of the teacher, and the number of trials, of which the first is not counted."""


def keep_features(draft: Draft) -> Draft:
    """Decide if the teacher's features are kept, by the room in the cache.

    Raises `UsageError` for a teacher without features, and for a request to keep them that cannot be met.
    """
    run = draft.run
    if not needs_teacher(run.recipe) or draft.teacher is None:
        return draft
    width = feature_teacher(draft.teacher, run, draft.machine).width()
    if not run.teacher_views:
        return draft.change(
            Choice(NAME, f"{width:,} per image, computed in every step", "because each epoch uses new crops")
        )
    views, cache = min(run.teacher_views, run.epochs), PixelCache()
    size, free = 2 * width * draft.images * views, cache.free_bytes
    room = "" if size < DISK_SHARE * free else f"{memory_size(size)} needed, {memory_size(free)} free in {cache.folder}"
    why = "ranks on several machines have no common cache" if current().machines > 1 else room
    if not why:
        where = f"computed once for {count(views, 'crop')} of each image: {memory_size(size)} in {cache.folder}"
        return draft.change(Choice(NAME, f"{width:,}, kept", where))
    if draft.given.get("teacher_views"):
        raise UsageError("the teacher's features cannot be kept", why=why, hint="--teacher-views 0")
    return draft.change(Choice(NAME, f"{width:,} per image, computed in every step", why), teacher_views=0)


def seconds_of_teacher(job: Job) -> float:
    """Measure the seconds in which the teacher computes an image."""
    assert job.teacher is not None
    teacher = feature_teacher(job.teacher, job.run, job.machine)
    images = max(1, min(BATCH, int(_TRIAL_FLOPS / max(1, summarize(job.teacher.weights.config).flops))))
    pixels = torch.zeros(images, job.run.channels, *job.run.size, dtype=torch.uint8, device=job.machine.device)
    taken = []
    for _ in range(_TRIALS):
        started = time.perf_counter()
        teacher(pixels).sum().item()
        taken.append(time.perf_counter() - started)
    return median(taken[1:]) / images


def time_features(job: Job) -> Job:
    """Add the measured time to the line on the teacher's features."""
    each, images = seconds_of_teacher(job), len(job.dataset["train"])
    whole = views_of(job.run) * images * each / current().count
    taken = f"about {duration(whole)} before the first step" if whole else f"{1e3 * each:.3g} ms per image"

    def timed(choice: Choice) -> Choice:
        return dataclasses.replace(choice, reason=f"{choice.reason}; {taken}") if choice.name == NAME else choice

    plan = dataclasses.replace(job.plan, choices=tuple(map(timed, job.plan.choices)))
    return dataclasses.replace(job, plan=plan)
