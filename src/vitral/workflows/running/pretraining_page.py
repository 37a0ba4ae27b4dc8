"""The report of pretraining: one self-contained page."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from vitral.evaluation.figures import Spec, curves, embedded
from vitral.evaluation.page_numbers import duration
from vitral.evaluation.pages import environment, finished, write_page
from vitral.pretraining.monitor import SAMPLED
from vitral.workflows.running.pretraining_samples import Cells
from vitral.workflows.running.running import Running

SPECS: list[Spec] = [
    ("Loss", [("train", "train_loss")], "{:.4g}"),
    ("Probe accuracy", [("linear probe", "probe_accuracy")], "{:.2%}"),
    ("Neighbors accuracy", [("k nearest neighbors", "knn_accuracy")], "{:.2%}"),
    ("Rank", [("rank of the features", "feature_rank")], "{:.1f}"),
    ("Distance of features", [("train", "feature_loss")], "{:.4g}"),
    ("Divergence of logits", [("train", "logit_loss")], "{:.4g}"),
    ("Usage of prototypes", [("entropy of all images' mean", "usage_entropy")], "{:.3f}"),
    ("Entropy", [("of each image's prototypes", "target_entropy")], "{:.3f}"),
    ("Color accuracy", [("train", "color_accuracy")], "{:.2%}"),
]
"""Curves of the page; those without values are left out."""
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
    text = environment(__package__).get_template("pretraining.html.jinja").render(
        title=job.dataset.name, result=result, took=duration(result["seconds"]),
        accuracies=[(what, result[key]) for key, what in NAMES.items() if key in result],
        support=min(SAMPLED, len(job.dataset["train"])), held_out=min(SAMPLED, len(job.dataset.splits.get("val", ()))),
        guess=1 / max(1, len(job.dataset.classes)),
        samples=[(embedded(pixels, _SIDE), what) for pixels, what in cells], explained=EXPLAINED[job.run.recipe],
        plots=curves(history, None, SPECS), plan=job.plan.choices, command=running.command, run=run,
    )  # fmt: skip
    write_page(running.folder.report, finished(text))


NAMES = {"probe_accuracy": "linear probe", "knn_accuracy": "k nearest neighbors"}
"""Measure in the result → its name on the page."""
