"""Publish a run on the Hugging Face hub: weights, preprocessing and a model card."""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from vitral.atomic import replacing_folder, write_text
from vitral.errors import RunError, UsageError, VitralError, WeightsError
from vitral.inference.outputs import output_of
from vitral.inference.outputs.output import require_classes
from vitral.kinds import checked
from vitral.training.run_folder import RunFolder
from vitral.weights import convert, native
from vitral.weights.formats.huggingface_code import MODELING
from vitral.weights.load import read
from vitral.weights.native import Weights
from vitral.weights.notes import Alarm
from vitral.weights.read.hub import is_network_error, parse
from vitral.workflows.model_card import Facts, card

_LICENSE = re.compile(r"[a-z0-9][a-z0-9.-]{0,63}")


@dataclass(frozen=True)
class Pushed:
    """A published run, or one that is ready to be."""

    repository: str
    files: tuple[str, ...]
    folder: Path | None = None
    """The folder of a dry run."""
    url: str = ""
    """The page of the repository; empty after a dry run."""
    reason: str = ""
    """Why the weights are in vitral's own layout instead of Hugging Face's."""

    def to_json(self) -> dict[str, object]:
        """Plain data."""
        folder = str(self.folder) if self.folder else None
        return {
            "repository": self.repository,
            "files": list(self.files),
            "folder": folder,
            "url": self.url or None,
            "layout": "vitral" if self.reason else "hf",
            "reason": self.reason or None,
        }


@checked
def push(run: str | Path, repository: str, *, license: str, private: bool = False) -> Pushed:
    """Publish a finished run as `repository` (ORG/NAME), which is created if it does not exist.

    Raises `UsageError` for a malformed name, and if the hub refuses the upload or cannot be reached; `RunError` for a
    run without a result.
    """
    _check(repository, license)
    with tempfile.TemporaryDirectory(prefix="vitral-") as folder:
        reason = _write(run, repository, license, Path(folder))
        files = tuple(sorted(path.name for path in Path(folder).iterdir()))
        return Pushed(repository, files, None, _upload(Path(folder), repository, private), reason)


def prepare(run: str | Path, repository: str, out: str | Path, *, license: str) -> Pushed:
    """Write the files that `push` uploads into the new folder `out`."""
    _check(repository, license)
    out = Path(out)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UsageError("the target exists already", where=out, hint="choose another --out, or remove it")
    with replacing_folder(out) as made:
        reason = _write(run, repository, license, made)
        files = tuple(sorted(path.name for path in made.iterdir()))
    return Pushed(repository, files, out, "", reason)


def _check(repository: str, license: str) -> None:
    parse(f"hf:{repository}")
    if "@" in repository:
        raise UsageError(f"not the name of a repository: '{repository}'", hint="ORG/NAME, without a revision")
    if not _LICENSE.fullmatch(license):
        raise UsageError(f"not the identifier of a license: '{license}'", hint="--license mit, apache-2.0, cc-by-4.0")


def _write(run: str | Path, repository: str, license: str, folder: Path) -> str:
    """Write weights and card into an empty folder. Return why the layout is vitral's own, or an empty text."""
    source = RunFolder(run)
    plan = source.read_plan()
    if not source.result.is_file():
        why = "there is no result.json in it"
        raise RunError("this run is not finished", where=run, why=why, hint=f"vitral train --resume --out {run}")
    weights = read(run).weights
    if not weights.classes:
        why = "a card states how well classes are distinguished"
        hint = "vitral train DATA --init RUN"
        raise UsageError("a network without classes cannot be published", where=run, why=why, hint=hint)
    require_classes(output_of(weights.classes, weights.output, weights.statistics), "vitral push", "copy its folder")
    reason = _write_weights(weights, folder)
    lost = [] if reason else convert.lost(weights, "hf")
    notes = [note.removeprefix("WARNING for hf: ") for note in lost if isinstance(note, Alarm)]
    facts = Facts(
        repository,
        license,
        source.read_result(),
        plan.run.recipe,
        weights.preprocessing,
        reason,
        tuple(notes),
        (folder / MODELING).exists(),
    )
    write_text(folder / "README.md", card(facts))
    return reason


def _write_weights(weights: Weights, folder: Path) -> str:
    """Write weights as Hugging Face does, or for a network that it does not know as vitral does."""
    try:
        convert.write(weights, folder, "hf")
    except WeightsError as error:
        native.save(folder / "model.safetensors", weights)
        return error.why or error.what
    return ""


def _upload(folder: Path, repository: str, private: bool) -> str:
    """Create the repository and upload the folder in one commit. Return the address of its page."""
    from huggingface_hub import HfApi

    api = HfApi(library_name="vitral")
    try:
        url = api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Weights and card of a vitral run")
    except VitralError:
        raise
    except Exception as error:  # as in weights.read.hub: errors of whatever library it fetches with
        if not is_network_error(error):
            raise
        raise _refused(error, repository) from error
    return str(url)


def _refused(error: Exception, repository: str) -> UsageError:
    status = getattr(getattr(error, "response", None), "status_code", None)
    reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    if status in (401, 403):
        why = f"the hub answered {status}: no token, or one that may not write to {repository}"
        return UsageError("the upload was refused", where=repository, why=why, hint="hf auth login")
    hint = "try again; --dry-run --out FOLDER writes the files without uploading them"
    return UsageError("the upload failed", where=repository, why=reason[:200], hint=hint)
