"""The session as plain data for the page: everything once, then only what changed."""

from __future__ import annotations

from vitral.data.label_table import CHECKED
from vitral.labeling.assistant import Assistant
from vitral.labeling.session import Session
from vitral.labeling.state import Change
from vitral.wording import shown


def whole(session: Session, assistant: Assistant | None = None) -> dict[str, object]:
    """Return all images with their marks. Names are shown, never used as paths: the page asks by number."""
    state = session.state
    given = sorted({image.given for image in state.images if image.given})
    place = {name: i for i, name in enumerate(given)}
    return {
        "title": session.table.parent.name or str(session.table.parent),
        "names": [shown(image.file) for image in state.images],
        "given_names": given,
        "given": [place.get(image.given, -1) for image in state.images],
        "missing": sorted(session.missing),
        **changed(session, -1, assistant),
    }


def changed(session: Session, version: int, assistant: Assistant | None = None, number: int = -1) -> dict[str, object]:
    """Return the changes since a version: marks, classes, what can be undone, and insight other than of `number`."""
    delta = session.since(version)
    state = session.state
    place = {name: i for i, name in enumerate(state.classes)}
    marks = [state.marks[i] for i in delta.images]
    news = {} if assistant is None or assistant.number == number else {"insight": assistant.to_json()}
    return {
        **news,
        "version": delta.version,
        "classes": list(state.classes),
        "numbers": list(delta.images),
        "labels": [place.get(mark.label, -1) for mark in marks],
        "checked": [CHECKED.index(mark.checked) for mark in marks],
        "undo": _text(state.past),
        "redo": _text(state.future),
        "table": shown(str(session.table)),
        "notes": [shown(note) for note in session.notes],
    }


def _text(change: Change | None) -> str:
    return change.text if change else ""
