"""config.json and result.json of a run."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from statistics import median

from vitral._version import __version__
from vitral.data.held_out import HeldOut
from vitral.errors import VitralError
from vitral.filesystem import relative
from vitral.folders import same_path
from vitral.pretraining.methods import METHODS, command_of
from vitral.training.plan import Plan
from vitral.weights.read.references import is_included
from vitral.workflows.running.running import Running
from vitral.workflows.running.start_digests import start_entries


def write_config(running: Running) -> None:
    """Clear the run folder and write config.json."""
    folder, plan = running.folder, running.job.plan
    folder.clear()
    record: dict[str, object] = {
        "command": running.command,
        "run": plan.run.to_json(),
        "plan": [asdict(choice) for choice in plan.choices],
        "paths": path_entries(plan, folder.path),
        "versions": versions(),
    }
    record |= {name: value for name in ("most_epochs", "training_seconds") if (value := getattr(plan, name))}
    record |= start_entries(running.job)
    if plan.fingerprint:
        record["data"] = plan.fingerprint.to_json()
    if plan.kept:
        record["kept"] = " ".join(map(str, plan.kept))
    if plan.near:
        record["near"] = [list(one) for one in plan.near]
    if plan.near_held_out:
        record["near_held_out"] = {name: [list(one) for one in sets] for name, sets in plan.near_held_out.items()}
    folder.write(folder.config, json.dumps(record, indent=2) + "\n")


def write_held_out(running: Running) -> None:
    """Write the record of the held-out images, if the data are on this disk, where they may change."""
    folder, run = running.folder, running.job.run
    if run.recipe in METHODS or not os.path.exists(os.path.expanduser(run.data)):
        return
    if (held_out := HeldOut.of(running.job.dataset)) is not None:
        folder.write(folder.held_out, held_out.to_lines())


def path_entries(plan: Plan, folder: Path) -> dict[str, str]:
    """Return the paths in the options of a run, and that of the earlier run on its data, relative to its folder, so
    that all can be moved together.
    """
    run, entries = plan.run, dict[str, str]()
    if (earlier := plan.paths.get("earlier")) and not same_path(earlier, folder):
        entries |= path_entry("earlier", earlier, folder)
    for name in ("data", "data_root", "init", "teacher"):
        path = os.path.expanduser(getattr(run, name) or "")
        if os.path.exists(path) and not (name in ("init", "teacher") and is_included(getattr(run, name))):
            entries |= path_entry(name, path, folder)
    return entries


def path_entry(name: str, path: str, folder: Path) -> dict[str, str]:
    place = relative(os.path.realpath(path), os.path.realpath(folder))
    return {} if place is None else {name: place}


def facts(running: Running, parameters: int) -> dict[str, object]:
    """Return the fields of result.json that every run has: model, data, time, machine, program."""
    job, state = running.job, running.state
    rates = [line["images_per_second"] for line in state.history if "images_per_second" in line]
    return {
        "model": job.run.model,
        "data": job.run.data,
        "parameters": parameters,
        "images": {name: len(split) for name, split in job.dataset.splits.items()},
        "epochs": state.epoch or None,
        "seconds": state.seconds,
        **({"compile_seconds": state.compile_seconds} if state.compile_seconds else {}),
        "images_per_second": median(rates) if rates else None,
        "device": job.machine.name,
        "precision": job.machine.precision,
        "seed": job.run.seed,
        "command": running.command,
        "versions": versions(),
    }


def write_result(running: Running, result: Mapping[str, object]) -> None:
    """Write result.json, which makes the run a finished one."""
    folder = running.folder
    folder.write(folder.result, json.dumps(result, indent=2) + "\n")
    folder.previous.unlink(missing_ok=True)


def resume_command(running: Running) -> str:
    """Return the command that goes on with a run: with its steps, or with its report alone."""
    command = command_of(running.job.run.recipe)
    return f"vitral {command} --out {shlex.quote(str(running.folder.path))} --resume"


@contextlib.contextmanager
def report_guarded(running: Running) -> Iterator[None]:
    """Print any error of the report as one line: it must not end a run that is trained and has its result.json."""
    try:
        yield
    except Exception as error:  # drawings and page use other libraries, which raise anything
        what = error.what if isinstance(error, VitralError) else f"{type(error).__name__}: {error}"
        folder, run = running.folder, shlex.quote(str(running.folder.path))
        again = f"vitral evaluate {run} --report {shlex.quote(str(folder.report))}"
        command = resume_command(running) if folder.last.is_file() else again
        why = " ".join(what.split())[:200]
        line = f"the report could not be written ({why}); the run is complete; to write it: {command}"
        running.console.print(line, style="yellow", highlight=False, soft_wrap=True, markup=False)


def versions() -> dict[str, str]:
    """Return the versions of vitral, Python and the main packages."""
    packages = {name: version(name) for name in ("torch", "torchvision", "numpy", "pillow")}
    return {"vitral": __version__} | packages | {"python": platform.python_version()}
