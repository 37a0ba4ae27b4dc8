"""The page of a plan."""

from __future__ import annotations

from pathlib import Path

from vitral.atomic import write_text
from vitral.digest import with_digest
from vitral.evaluation.pages import environment, without_control_characters
from vitral.workflows.considered import compare_sizes, explain_plan, untouched
from vitral.workflows.job import Job


def write_plan(path: Path, job: Job, command: str) -> None:
    """Write the page atomically, with folders that are missing."""
    text = environment(__package__).get_template("plan.html.jinja").render(
        title=job.dataset.name, run=job.run, machine=job.machine, explained=explain_plan(job), sizes=compare_sizes(job),
        images={name: len(split) for name, split in job.dataset.splits.items()}, untouched=untouched(job),
        command=command,
    )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    encoded = without_control_characters(text).encode("utf-8", errors="replace")
    write_text(path, with_digest(encoded, "\n<!-- ", " -->\n").decode())
