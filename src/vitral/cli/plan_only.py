"""`--plan-only` of `vitral train` and `pretrain`: the plan, and a page that explains it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from vitral.cli.options import Option
from vitral.cli.output import print_json, program, say
from vitral.console import stderr
from vitral.distributed.environment import launched
from vitral.errors import UsageError

OPTIONS = (
    Option("plan_only", bool, "print all choices of the plan, and train nothing", False),
    Option("report", bool, "with --plan-only: also write plans/NAME.html, which explains each choice", False),
)


def take(given: dict[str, Any]) -> dict[str, bool] | None:
    """Remove the options from `given`; return them, or None without --plan-only."""
    values = {option.name: given.pop(option.name, False) for option in OPTIONS}
    if values["report"] and not values["plan_only"]:
        why = "a run writes report.html by itself"
        raise UsageError("--report goes with --plan-only", why=why, hint="--plan-only --report, or leave it out")
    if not values["plan_only"]:
        return None
    if launched():
        raise UsageError("a plan is made by one process", hint="leave out --nproc, or torchrun")
    for name in ("resume", "overwrite"):
        given.pop(name, None)
    return values


def print_only(given: dict[str, Any], report: bool, format: str) -> int:
    """Plan a run of these options, and print it; write its page with `report`."""
    began = time.monotonic()
    from vitral.pretraining.methods import command
    from vitral.training.progress import print_plan
    from vitral.training.run_folder import RunFolder
    from vitral.workflows.planning.plan import plan_run

    quiet = given.pop("quiet", False)
    job = plan_run({name: value for name, value in given.items() if value is not None}, began)
    folder = RunFolder(str(job.run.out))
    other = {"out": folder.next_free()} if folder.exists() and given.get("out") is None else {}
    typed = command({**given, **other}).replace("vitral", program(), 1)
    if format == "json":
        from vitral.workflows.planning.explained import to_json

        print_json(to_json(job))
    else:
        print_plan(stderr(quiet=quiet), job.plan, whole=True)
    if report:
        from vitral.workflows.planning.explained import write_plan

        path = Path("plans") / f"{Path(job.run.out or job.dataset.name).name}.html"
        write_plan(path, job, command(given))
        say(f"Page     {path}")
    say(f"\nNext:\n  {typed}")
    return 0
