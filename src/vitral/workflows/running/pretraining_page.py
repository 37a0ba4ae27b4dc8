"""The report of pretraining: one self-contained page."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from vitral.epoch_metrics import KNN, PROBE, of_pretraining
from vitral.evaluation.figures import curves, embedded
from vitral.evaluation.page_numbers import duration
from vitral.evaluation.pages import environment, finished, write_page
from vitral.pretraining.monitor import SAMPLED
from vitral.workflows.running.pretraining_samples import Cells
from vitral.workflows.running.running import Running

_SIDE = 192

EXPLAINED: Mapping[str, str] = {
    "mae": "Gray patches are hidden from the network, which predicts their pixels. Details finer than a patch stay "
    "vague, and colors may be off: the network learns what belongs together.",
    "mpp": "Gray patches are hidden from the network, which predicts their mean color in 3 bits for each channel.",
    "dino": "Attention of the class token in the last block: bright patches weigh most. A network that has learned to "
    "tell images apart often attends to objects.",
    "distill": "Attention in the last block: bright patches weigh most. The network has learned the features of its "
    "teacher from whole crops.",
}
"""Method → a sentence below its samples."""


def write_report(running: Running, result: Mapping[str, Any], cells: Cells) -> None:
    """Write report.html, atomically."""
    job, history, run = running.job, running.state.history, shlex.quote(str(running.folder.path))
    text = (
        environment(__package__)
        .get_template("pretraining.html.jinja")
        .render(
            title=job.dataset.name,
            result=result,
            took=duration(result["seconds"]),
            accuracies=[(one.title, result[one.key]) for one in (PROBE, KNN) if one.key in result],
            support=min(SAMPLED, len(job.dataset["train"])),
            held_out=min(SAMPLED, len(job.dataset.splits.get("val", ()))),
            guess=1 / max(1, len(job.dataset.classes)),
            samples=[(embedded(pixels, _SIDE), what) for pixels, what in cells],
            explained=EXPLAINED[job.run.recipe],
            plots=curves(history, None, of_pretraining()),
            plan=job.plan.choices,
            command=running.command,
            run=run,
        )
    )
    write_page(running.folder.report, finished(text))
