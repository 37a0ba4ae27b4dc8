"""A session: the state, its journal and its table on disk, under a lock.

The journal is written first. The table follows within a moment, as a whole, and again when the session begins: after a
process was killed, it lags behind the journal and catches up. A table that another program changed is kept under
another name before a new one is written.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitral.atomic import write_text
from vitral.data.label_table import NAME, file_cell, is_label_table, is_set_aside, label_table
from vitral.errors import UsageError, VitralError
from vitral.filesystem import locked, move, refused, relative
from vitral.folders import can_write
from vitral.labeling.collect import Found, collect, is_table, of_table
from vitral.labeling.journal import Journal
from vitral.labeling.state import (
    Action,
    LabeledImage,
    Mark,
    State,
    applied,
    changed_images,
    check_class,
    with_held,
    with_images,
)
from vitral.wording import count, some

_PAGE = re.compile(r"http://127\.0\.0\.1:\d+/#[\w-]+")
"""The address of a page with its token. Nothing else that a file contains is printed."""
FORMAT = 1
"""Version of the journal."""

_PAUSE = 0.3
"""Seconds in which several actions share one writing of the table."""


@dataclass(frozen=True)
class Delta:
    """Changes since a version of the session."""

    version: int
    images: tuple[int, ...]
    """Numbers of images whose marks changed."""


class Session:
    """The labels of one table while someone works on them. Its methods may be called from several threads.

    Use it as a context manager; `close` writes the table a last time.
    """

    def __init__(self, data: Sequence[str], table: Path, classes: Sequence[str] = (), *, labels: bool = True):
        """Open or continue the work on `table`; see `default_table` for where that is.

        Raises `UsageError` if another process has the table open, or another program wrote it; the errors of `collect`;
        `DataError` for a damaged journal; `WriteError` if the folder cannot be written.
        """
        self.table, self.data = table.absolute(), tuple(data)
        self.folder = self.table.parent
        self.notes: list[str] = []
        """Sentences for the person, on what was left out or kept under another name."""
        self.on_change: Callable[[], None] = lambda: None
        """Called after each change, from the thread that made it."""
        self._changes: list[tuple[int, ...]] = []
        self._guard, self._writing = threading.RLock(), threading.Lock()
        self._dirty, self._closing = threading.Event(), threading.Event()
        self._held = contextlib.ExitStack()
        self._digests: set[str] = set()
        """SHA-256 of all tables that this journal wrote."""
        self._hidden = Journal(self.folder / f".{self.table.name}.journal")
        self._page = self.folder / f".{self.table.name}.page"
        self._lock()
        try:
            self._open(classes, labels)
        except BaseException:
            self._held.close()
            raise
        self._writer = threading.Thread(target=self._write_when_dirty, name="label-table", daemon=True)
        self._writer.start()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *failed: object) -> None:
        self.close()

    # ------------------------------------------------------------ opening

    def _lock(self) -> None:
        file = self.folder / f".{self.table.name}.lock"
        try:
            self._held.enter_context(locked(file))
        except BlockingIOError:
            page = self._published()
            hint = f"open its page, {page}, or end it" if page else "use its page, or end it"
            why = "another vitral label has it open"
            raise UsageError("this table is in use", where=self.table, why=why, hint=hint) from None
        except OSError as error:
            raise refused(file, error, "--out FILE writes the table elsewhere") from error
        self._unpublish()  # what a killed process left
        self._held.callback(self._unpublish)

    def publish(self, page: str) -> None:
        """Keep the address of the page for a second command on this table, in a file that only its owner can read."""
        with (
            contextlib.suppress(OSError),
            open(self._page, "x", encoding="utf-8", opener=lambda path, flags: os.open(path, flags, 0o600)) as file,
        ):
            file.write(page)

    def _published(self) -> str:
        with contextlib.suppress(OSError, ValueError):
            page = self._page.read_text("utf-8")
            return page if _PAGE.fullmatch(page) else ""
        return ""

    def _unpublish(self) -> None:
        with contextlib.suppress(OSError):
            self._page.unlink()

    def _open(self, classes: Sequence[str], labels: bool) -> None:
        for name in classes:
            check_class(name)
        entries = self._hidden.read()
        found, self.notes = collect(self.data, labels=labels)
        self.state = self._replayed(entries)
        if not entries and self.table.exists():
            found = _overlaid(found, self._own_table())
        new = self._unknown(found)
        known = self.state.classes
        self.state = with_images(self.state, new, classes)
        added: list[dict[str, object]] = [] if entries else [{"format": FORMAT}]
        if new or self.state.classes != known:
            more = [name for name in classes if name not in known]
            added.append({"add": [_plain(*one) for one in new], "classes": more})
        self.is_kept = bool(entries)
        """True once there is something on the disk: only looking writes nothing."""
        self._pending = added
        """Entries that are written with the first action, so that a look changes no file."""
        self.missing = frozenset(i for i, one in enumerate(self.state.images) if not os.path.isfile(self.path(i)))
        if self.missing:
            names = some(self.state.images[i].file for i in sorted(self.missing))
            self.notes.append(f"{count(len(self.missing), 'image')} of the journal cannot be found: {names}")
        self._write()

    def _replayed(self, entries: Sequence[dict[str, object]]) -> State:
        state = State()
        for number, entry in enumerate(entries, 1):
            try:
                state = self._entry(state, entry)
            except (KeyError, TypeError, ValueError) as error:
                raise self._hidden.damaged(f"line {number}: {error}") from error
        return state

    def _entry(self, state: State, entry: dict[str, Any]) -> State:
        if "format" in entry:
            if entry["format"] != FORMAT:
                raise ValueError(f"it is of format {entry['format']}")
            return state
        if "table" in entry:
            self._digests.add(entry["table"])
            return state
        if "add" in entry:
            new = [(LabeledImage(*plain[:4]), Mark(*plain[4:])) for plain in entry["add"]]
            return with_images(state, new, entry["classes"])
        if "held" in entry:
            return with_held(state, entry["held"])
        return applied(state, Action.from_json(entry))

    def _own_table(self) -> list[Found]:
        """Return the rows of a table that is there before the journal; refuse one that vitral did not write."""
        with open(self.table, encoding="utf-8-sig", errors="replace") as file:
            header = [name.strip().lower() for name in file.readline().split(",")]
        if not is_label_table(header):
            why = "it has no columns given and checked, so it is a table of your own"
            hint = f"vitral label {self.table.name}, which leaves it as it is; or another --out"
            raise UsageError("this table exists already", where=self.table, why=why, hint=hint)
        self._digests.add(_digest(self.table))
        return of_table(str(self.table))[0]

    def _unknown(self, found: Iterable[Found]) -> list[tuple[LabeledImage, Mark]]:
        """Return the images that the state does not know yet."""
        known = {self.path(i) for i in range(len(self.state.images))}
        new = []
        for one in found:
            if os.path.normpath(one.path) not in known:
                file = file_cell(relative(one.path, self.folder) or one.path)
                new.append((LabeledImage(file, one.given, one.split, one.group), Mark(one.label, one.checked)))
        return new

    # ------------------------------------------------------------ work

    def path(self, image: int) -> str:
        """Return the absolute path of an image by its number."""
        return os.path.normpath(os.path.join(self.folder, self.state.images[image].file))

    @property
    def version(self) -> int:
        """The number of changes so far."""
        return len(self._changes)

    @property
    def labeled(self) -> int:
        """The number of images with a label that are not set aside."""
        return sum(not is_set_aside(mark.label, mark.checked) for mark in self.state.marks)

    def act(self, action: Action) -> State:
        """Apply an action and keep it on the disk; return the new state.

        Raises `UsageError` for an action that is not possible, `WriteError` if the disk refuses it; nothing has changed
        then.
        """
        with self._guard:
            before = self.state
            after = applied(before, action)
            if after is before:
                return before
            self._hidden.append([*self._pending, action.to_json()])
            self._pending, self.state, self.is_kept = [], after, True
            self._changes.append(tuple(changed_images(before, after)))
        self._dirty.set()
        self.on_change()
        return after

    def hold_out(self, images: Sequence[int]) -> None:
        """Show these images without a suggestion from now on, also after a restart. Raises `WriteError`."""
        with self._guard:
            held = with_held(self.state, images)
            self._hidden.append([*self._pending, {"held": list(images)}])
            self._pending, self.state, self.is_kept = [], held, True
        self._dirty.set()

    def since(self, version: int) -> Delta:
        """Return the changes after a version; of one that never was, all images."""
        with self._guard:
            now = self.version
            if not 0 <= version <= now:
                return Delta(now, tuple(range(len(self.state.marks))))
            numbers = {one for change in self._changes[version:] for one in change}
            return Delta(now, tuple(sorted(numbers)))

    # ------------------------------------------------------------ the table

    def _write_when_dirty(self) -> None:
        while not self._closing.is_set():
            self._dirty.wait()
            self._closing.wait(_PAUSE)
            self._dirty.clear()
            try:
                self._write()
            except VitralError as error:  # the journal has everything, and the next action tries again
                self._tell(str(error).replace("\n", ";"))

    def flush(self) -> None:
        """Write the table now, for another program. Raises `WriteError`."""
        self._write()

    def _write(self) -> None:
        """Write the table, unless it is already as it should be; keep one that another program changed."""
        if not self.is_kept:
            return
        with self._writing:
            text = self._text()
            new, there = hashlib.sha256(text.encode()).hexdigest(), _digest(self.table)
            if new == there:
                return
            if there and there not in self._digests:
                kept = self._set_aside()
                self._tell(f"another program changed {self.table.name}: its version is now {kept.name}")
            with self._guard:
                self._hidden.append([{"table": new}])  # first: a table on the disk is always known
                self._digests.add(new)
            write_text(self.table, text)

    def _text(self) -> str:
        state = self.state
        pairs = zip(state.images, state.marks, strict=True)
        tested = any(not is_set_aside(state.marks[i].label, state.marks[i].checked) for i in state.held)
        return label_table(
            {
                "file": image.file,
                "label": mark.label,
                "split": image.split or (("train", "test")[i in state.held] if tested else ""),
                "given": image.given,
                "checked": mark.checked,
                "group": image.group,
            }
            for i, (image, mark) in enumerate(pairs)
            if i not in self.missing
        )

    def _set_aside(self) -> Path:
        numbers = (self.table.with_stem(f"{self.table.stem}.changed-{n}") for n in range(1, 10_000))
        kept = next(path for path in numbers if not os.path.lexists(path))
        try:
            move(self.table, kept)
        except OSError as error:
            raise refused(kept, error, f"{self.table} is unchanged") from error
        return kept

    def _tell(self, note: str) -> None:
        with self._guard:
            if note not in self.notes:
                self.notes.append(note)
                self._changes.append(())
        self.on_change()

    def close(self) -> None:
        """Write the table a last time, if anything changed, and release the lock."""
        self._closing.set()
        self._dirty.set()
        self._writer.join()
        try:
            self._write()
        finally:
            self._hidden.close()
            self._held.close()


def default_table(data: Sequence[str]) -> Path:
    """Return where the labels of these data are kept: `labels.csv` in a folder, beside a list, or for several data in
    the current folder. A table that `vitral label` wrote is continued; another one gets a neighbor.
    """
    if len(data) != 1:
        return Path(NAME)
    path = Path(data[0])
    if is_table(data[0]):
        with open(path, encoding="utf-8-sig", errors="replace") as file:
            own = is_label_table([name.strip().lower() for name in file.readline().split(",")])
        return path if own else path.with_name(f"{path.stem}-labels.csv")
    table = (path if path.is_dir() else path.parent) / NAME
    if not can_write(table):
        raise UsageError("the folder of the images cannot be written", where=table.parent, hint="--out labels.csv")
    return table


def _overlaid(found: Sequence[Found], rows: Sequence[Found]) -> list[Found]:
    """Return the images with what a table says of them; images that only the table knows come last."""
    known = {one.path: one for one in rows}
    return [*(known.pop(one.path, one) for one in found), *known.values()]


def _plain(image: LabeledImage, mark: Mark) -> list[str]:
    return [image.file, image.given, image.split, image.group, mark.label, mark.checked]


def _digest(path: Path) -> str:
    """Return the SHA-256 of a file; "" if it does not exist."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return ""
