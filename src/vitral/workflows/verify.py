"""`vitral verify`: check every file of a run, of shards or of the caches against its digest."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.text import Text

from vitral.console import Described, table
from vitral.data.pixel_cache import Entry, PixelCache, damage_of
from vitral.data.shards.index import MANIFEST as SHARDS
from vitral.data.shards.index import Manifest
from vitral.data.shards.reading import sha256_of
from vitral.digest import check, check_tensors, read_json
from vitral.errors import DataError, RunError, UsageError, VitralError
from vitral.folders import EXPORT, cache_folder, is_run
from vitral.inference.engines.int8_ranges import ranges_file
from vitral.kinds import checked
from vitral.training.run_folder import RunFolder
from vitral.weights.load import locate
from vitral.weights.read.safetensors_mmap import ANOTHER_COPY, read_safetensors
from vitral.weights.read.source import open_source
from vitral.wording import count

_OLDER = "it has no digest: written by another program or by an earlier version"


@dataclass(frozen=True)
class Checked:
    """The status of one file."""

    file: str
    state: Literal["whole", "damaged", "without digest"]
    why: str = ""
    """The reason if it is not whole."""
    hint: str = ""
    """The remedy for a damaged file."""


@dataclass(frozen=True, repr=False)
class Verification(Described):
    """The status of every file.

    Example:
        print(vitral.verify("runs/photos").damaged)
    """

    of: str
    """The run, the weights file, the folder of shards, or "caches"."""
    files: tuple[Checked, ...]

    @property
    def damaged(self) -> tuple[Checked, ...]:
        """Files that have changed since they were written."""
        return tuple(one for one in self.files if one.state == "damaged")

    def described(self) -> dict[str, str]:
        """Return the facts that `repr` and notebooks show, as a dict from name to text."""
        damaged = {one.file: f"damaged: {one.file}" for one in self.damaged}
        return {"of": self.of, "files": count(len(self.files), "file"), **(damaged or {"state": "none damaged"})}

    def to_json(self) -> dict[str, object]:
        """Plain data."""
        return {"of": self.of, "whole": not self.damaged, "files": [asdict(one) for one in self.files]}

    def print_table(self, console: Console) -> None:
        """Print one line per file."""
        rows = table()
        for name in ("file", "state", ""):
            rows.add_column(name, overflow="fold")
        for one in self.files:
            rows.add_row(Text(one.file), one.state, Text(one.why if one.state != "damaged" else ""))
        console.print(rows if self.files else "the caches are empty")


@checked
def verify(run: str | Path | None = None, *, accept: bool = False) -> Verification:
    """Check the digests of all files of a run, an export, a weights file or a folder of shards.

    Every byte is read.

    Args:
        run: The folder or file; a run folder includes its exports (default: the files in your cache).
        accept: First accept the current text files of the run, such as `config.json`, after you changed them by hand.

    Returns:
        The files that were checked, and what is wrong with them.

    Raises:
        RunError: There is no such run.
        WeightsError: There is no such file.
        UsageError: There is nothing to accept.

    Example:
        print(vitral.verify("runs/photos"))
    """
    if run is None:
        if accept:
            raise UsageError("--accept requires a run", hint="vitral verify RUN --accept")
        return Verification("caches", tuple(_caches()))
    path = Path(run)
    if path.is_dir() and (is_run(path) or RunFolder(path).manifest.path.is_file()):
        folder = RunFolder(path)
        if accept:
            folder.accept()
        return Verification(str(run), tuple(_run(folder)))
    if accept:
        raise RunError("not a run folder", where=path, why="--accept is for the text files of a run")
    if (path / SHARDS).is_file():
        return Verification(str(run), tuple(_shards(path)))
    if (path / EXPORT).is_file():
        return Verification(str(run), tuple(_export(path)))
    if path.is_dir() and (path / "model.safetensors").is_file():
        path = path / "model.safetensors"
    elif not path.is_file():
        path = locate(run)[0]
    return Verification(str(run), tuple(_weights(path)))


def _run(folder: RunFolder) -> Iterator[Checked]:
    quoted = shlex.quote(str(folder.path))
    restore = "restore it from a copy"
    accept = f"if you changed it on purpose, vitral verify {quoted} --accept"
    resume = f"vitral train --out {quoted} --resume"
    try:
        listed: Any = folder.manifest.known()
    except ValueError as error:
        listed = {}
        yield Checked(
            str(folder.manifest.path), "damaged", str(error), f"if the files next to it are correct: {accept}"
        )
    else:
        if folder.manifest.path.is_file():
            yield Checked(str(folder.manifest.path), "whole")
    rewrite = "the run rewrites it when it resumes" if not folder.result.is_file() else restore
    finish = f"remove it and finish the run again: {resume}"
    known = f"{restore}: without it the run is not measured after changes to its data"
    hints = {folder.config: restore, folder.held_out: known, folder.metrics: rewrite, folder.result: finish}
    for file in hints:
        if not file.is_file():
            if file == folder.config or file.name in listed:
                yield Checked(str(file), "damaged", "it is missing", hints[file])
        elif file.name in listed:
            yield _one(file, partial(_listed, folder, file), f"{hints[file]}; {accept}")
        else:
            yield Checked(str(file), "without digest", "no intact manifest.json next to it lists one")
    if folder.weights.is_file():
        yield from _weights(folder.weights)
    elif folder.result.is_file():
        yield Checked(
            str(folder.weights), "damaged", "it is missing", f"{restore}, or repeat the run's command with --overwrite"
        )
    for file in (folder.last, folder.previous):
        if file.is_file():
            yield _one(file, partial(_tensors, file), _checkpoint(folder, file))
    if folder.report.is_file():
        yield _one(folder.report, lambda: check(folder.report.read_bytes()), f"vitral evaluate {quoted} --report FILE")
    for record in sorted(folder.path.glob(f"export/*/{EXPORT}")):
        yield from _export(record.parent)


_EXPORTING = {
    "vitral export": "vitral export RUN --to TARGET --overwrite",
    "vitral label": "vitral label --export {folder} --overwrite",
}
"""Writer of an export → its command."""


def _export(folder: Path) -> Iterator[Checked]:
    """Check the record of an export, then each of its files; earlier records state no digests of these."""
    again = "export it again with --overwrite"
    try:
        about = read_json(folder / EXPORT)
        files, digests = list(map(str, about["files"])), dict(about.get("sha256", {}))
        if command := _EXPORTING.get(about.get("written by")):
            again = f"export it again: {command.format(folder=shlex.quote(str(folder)))}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        yield Checked(str(folder / EXPORT), "damaged", str(error), again)
        return
    yield Checked(str(folder / EXPORT), "whole")
    for path in (folder / name for name in files):
        if not path.is_file():
            yield Checked(str(path), "damaged", "it is missing", again)
        elif sha256 := digests.get(path.relative_to(folder).as_posix()):
            yield _one(path, partial(_shard, path, str(sha256)), again)
        else:
            yield Checked(str(path), "without digest", f"{EXPORT} has none of it")


def _listed(folder: RunFolder, file: Path) -> bool:
    folder.manifest.read(file)
    return True


def _checkpoint(folder: RunFolder, file: Path) -> str:
    """Return the remedy for a damaged checkpoint."""
    other, quoted = shlex.quote(str(folder.previous)), shlex.quote(str(folder.path))
    if file == folder.last and folder.previous.is_file():
        try:
            _tensors(folder.previous)
        except (ValueError, VitralError):
            return "restore it from a copy"
        last = shlex.quote(str(folder.last))
        return f"resume from the intact previous one: mv {other} {last} && vitral train --out {quoted} --resume"
    if folder.result.is_file() or file == folder.previous:
        return f"it is no longer needed: rm {shlex.quote(str(file))}"
    return f"restore it from a copy, or train from the best weights: vitral train DATA --init {quoted} --out OTHER"


def _weights(path: Path) -> Iterator[Checked]:
    """Check a weights file, and the file of int8 ranges next to it."""
    if path.name.endswith(".safetensors"):
        yield _one(path, lambda: _tensors(path), ANOTHER_COPY)
    else:
        yield _one(path, lambda: bool(open_source(path)) and False, ANOTHER_COPY)
    ranges = ranges_file(path)
    if ranges.is_file():
        hint = f"measure them again: vitral quantize {shlex.quote(str(path.parent if is_run(path.parent) else path))}"
        yield _one(ranges, lambda: check(ranges.read_bytes()), hint)


def _tensors(path: Path) -> bool:
    read_safetensors(path)
    return check_tensors(path)


def _shards(folder: Path) -> Iterator[Checked]:
    """Check the index of a folder of shards, then the SHA-256 of each shard."""
    try:
        manifest = Manifest.read(folder)
    except DataError as error:
        yield Checked(str(folder / SHARDS), "damaged", error.why or error.what, error.hint or "")
        return
    yield Checked(str(folder / SHARDS), "whole")
    for index in manifest.splits.values():
        for shard in index.shards:
            hint = "copy it again; vitral train with --bad-images skip leaves out its damaged images"
            yield _one(folder / shard.name, partial(_shard, folder / shard.name, shard.sha256), hint)


def _shard(path: Path, sha256: str) -> bool:
    if (found := sha256_of(path)) != sha256:
        raise ValueError(f"its contents have changed (SHA-256 {found[:8]}…, not {sha256[:8]}…)")
    return True


def _caches() -> Iterator[Checked]:
    remove = "vitral data cache --clear; images are decoded again when needed"
    for path in PixelCache().paths():
        if damaged := damage_of(path):
            yield Checked(str(damaged), "damaged", "its contents have changed", remove)
        else:
            yield _one(path / "pixels.bin", partial(_pixels, path), remove)
    kinds: tuple[tuple[str, str, Callable[[Path], bool]], ...] = (
        ("features", "*.safetensors", _tensors),
        ("openvino", "*.blob", lambda path: check(path.read_bytes())),
        ("kernels", "*.so", lambda path: check(path.read_bytes())),
    )
    for kind, pattern, check_file in kinds:
        for path in sorted(cache_folder(kind).glob(pattern)):
            hint = f"rm {shlex.quote(str(path))}; it is created again when needed"
            yield _one(path, partial(check_file, path), hint)


def _pixels(path: Path) -> bool:
    Entry(path).verify()
    return True


def _one(path: Path, check_file: Callable[[], bool], hint: str) -> Checked:
    try:
        return Checked(str(path), "whole") if check_file() else Checked(str(path), "without digest", _OLDER)
    except VitralError as error:
        return Checked(str(path), "damaged", error.why or error.what, hint)
    except (OSError, ValueError) as error:
        return Checked(str(path), "damaged", str(error), hint)
