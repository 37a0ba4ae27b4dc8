"""The state of labeling as plain data, and the actions that change it: `applied(state, action) -> state`.

A state is never modified. Each change keeps what it replaced, so that it can be undone, and changes form a list by
their links: undoing moves one from `past` to `future`. The same actions always lead to the same state, which is how a
journal restores one.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from vitral.data.spellings import is_missing, listed
from vitral.errors import UsageError
from vitral.wording import count, natural, shown

LONGEST_NAME = 255
"""Characters of the name of a class: as many as the name of a folder may have."""
MOST_CLASSES = 1000


@dataclass(frozen=True, slots=True)
class LabeledImage:
    """An image, before anyone looks at it."""

    file: str
    """Its cell in the table: the path relative to the table's folder."""
    given: str = ""
    """The label that the data came with; "" for none."""
    split: str = ""
    group: str = ""


@dataclass(frozen=True, slots=True)
class Mark:
    """A person's judgment of an image."""

    label: str = ""
    """Its class; "" for none."""
    checked: str = "no"
    """One of `vitral.data.label_table.CHECKED`."""


@dataclass(frozen=True)
class Action:
    """One action of a person, as the page sends it and the journal keeps it."""

    do: str
    """A key of `ACTIONS`, or `undo` or `redo`."""
    images: tuple[int, ...] = ()
    label: str = ""
    """The class that the action is about."""
    name: str = ""
    """A new name for the class."""
    labels: tuple[str, ...] = ()
    """The class of each image, for suggestions that are accepted."""

    def to_json(self) -> dict[str, object]:
        """Return the fields that are set."""
        plain: dict[str, object] = {"do": self.do, "images": list(self.images), "label": self.label, "name": self.name}
        plain["labels"] = list(self.labels)
        return {key: value for key, value in plain.items() if value or key == "do"}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Action:
        """Check plain data, of which nothing is trusted; `UsageError` for any that is not an action."""
        images, labels = plain.get("images", []), plain.get("labels", [])
        texts = [plain.get(key, "") for key in ("do", "label", "name")]
        if plain.keys() - {"do", "images", "label", "name", "labels"} or not all(isinstance(one, str) for one in texts):
            raise UsageError("an action has the texts do, label and name, and lists of images and labels")
        if not isinstance(labels, list) or not all(isinstance(one, str) for one in labels):
            raise UsageError("the labels of an action are a list of names")
        if any(len(one) > LONGEST_NAME for one in (*texts, *labels)):
            raise UsageError(f"a name is longer than {LONGEST_NAME} characters")
        if not isinstance(images, list) or not all(type(one) is int for one in images):
            raise UsageError("the images of an action are a list of numbers")
        return cls(texts[0], tuple(dict.fromkeys(images)), texts[1], texts[2], tuple(labels))


@dataclass(frozen=True)
class Change:
    """An action with what it replaced."""

    action: Action
    before: Mapping[int, Mark]
    after: Mapping[int, Mark]
    classes: tuple[tuple[str, ...], tuple[str, ...]]
    """The classes before and after."""
    earlier: Change | None = field(default=None, repr=False)
    """The change under this one in `State.past` or `State.future`."""

    @property
    def text(self) -> str:
        """Name the change for a person: "label 3 images rose"."""
        images = count(len(self.after), "image")
        return _TEXTS[self.action.do].format(images=images, label=self.action.label, name=self.action.name)


@dataclass(frozen=True)
class State:
    """Images with their marks, and the classes in the order of their keys."""

    images: tuple[LabeledImage, ...] = ()
    marks: tuple[Mark, ...] = ()
    classes: tuple[str, ...] = ()
    past: Change | None = field(default=None, repr=False)
    """The last change that is not undone."""
    future: Change | None = field(default=None, repr=False)
    """The change that was undone last."""
    held: frozenset[int] = frozenset()
    """Images that were drawn to be shown without a suggestion."""

    @property
    def held_out(self) -> frozenset[int]:
        """Images that show no suggestion: the drawn ones, or the validation and test images of the data."""
        return self.held or frozenset(i for i, one in enumerate(self.images) if one.split in ("val", "test"))


def with_images(state: State, images: Iterable[tuple[LabeledImage, Mark]], classes: Iterable[str] = ()) -> State:
    """Add images that appeared in the data, and classes; this cannot be undone."""
    new = list(images)
    found = dict.fromkeys([*classes, *sorted({mark.label for _, mark in new if mark.label}, key=natural)])
    for name in found:
        check_class(name)
    return replace(
        state,
        images=(*state.images, *(image for image, _ in new)),
        marks=(*state.marks, *(mark for _, mark in new)),
        classes=(*state.classes, *(name for name in found if name not in state.classes)),
    )


def with_held(state: State, images: Iterable[int]) -> State:
    """Hold out these images; this cannot be undone. Raises `UsageError` for images that do not exist."""
    held = frozenset(images)
    _check_images(state, held)
    return replace(state, held=held)


def _check_images(state: State, images: Iterable[int]) -> None:
    if any(not 0 <= one < len(state.marks) for one in images):
        raise UsageError("an image that does not exist", why=f"there are {len(state.marks):,}")


def applied(state: State, action: Action) -> State:
    """Return the state after an action; the same object if it changes nothing.

    Raises `UsageError` for an action that does not exist, and for images and classes that do not.
    """
    if action.do == "undo":
        return _undone(state)
    if action.do == "redo":
        return _redone(state)
    if action.do not in ACTIONS:
        known = (*ACTIONS, "undo", "redo")
        raise UsageError(f"there is no action '{shown(action.do[:40])}'", why=f"known: {', '.join(known)}")
    _check_images(state, action.images)
    after, classes = ACTIONS[action.do](state, action)
    after = {one: mark for one, mark in after.items() if mark != state.marks[one]}
    if not after and classes == state.classes:
        return state
    before = {one: state.marks[one] for one in after}
    change = Change(action, before, after, (state.classes, classes), state.past)
    return replace(_with_marks(state, after), classes=classes, past=change, future=None)


Effect = tuple[dict[int, Mark], tuple[str, ...]]
"""New marks of images, and the classes."""


def _label(state: State, action: Action) -> Effect:
    _check_known(state, action.label)
    return dict.fromkeys(action.images, Mark(action.label, "yes")), state.classes


def _confirm(state: State, action: Action) -> Effect:
    labeled = [one for one in action.images if state.marks[one].label]
    return {one: Mark(state.marks[one].label, "yes") for one in labeled}, state.classes


def _accept(state: State, action: Action) -> Effect:
    """Accept suggestions: each image gets its class, and the table says that it was suggested."""
    if len(action.labels) != len(action.images):
        raise UsageError("suggestions are accepted with a class for each image")
    for name in set(action.labels):
        _check_known(state, name)
    pairs = zip(action.images, action.labels, strict=True)
    return {one: Mark(label, "accepted") for one, label in pairs}, state.classes


def _clear(state: State, action: Action) -> Effect:
    return dict.fromkeys(action.images, Mark()), state.classes


def _set_aside(state: State, action: Action) -> Effect:
    checked = {"unsure": "unsure", "exclude": "excluded", "restore": "no"}[action.do]
    return {one: Mark(state.marks[one].label, checked) for one in action.images}, state.classes


def _add_class(state: State, action: Action) -> Effect:
    check_class(action.label)
    if action.label in state.classes:
        raise UsageError(f"there is already a class '{action.label}'")
    if len(state.classes) >= MOST_CLASSES:
        raise UsageError(f"at most {MOST_CLASSES:,} classes")
    return {}, (*state.classes, action.label)


def _rename_class(state: State, action: Action) -> Effect:
    """Rename a class; the name of another class merges the two."""
    _check_known(state, action.label)
    check_class(action.name)
    classes = tuple(dict.fromkeys(action.name if name == action.label else name for name in state.classes))
    return _relabeled(state, action.label, action.name), classes


def _remove_class(state: State, action: Action) -> Effect:
    """Remove a class; its images lose their label."""
    _check_known(state, action.label)
    return _relabeled(state, action.label, ""), tuple(name for name in state.classes if name != action.label)


def _relabeled(state: State, label: str, name: str) -> dict[int, Mark]:
    own = [(one, mark) for one, mark in enumerate(state.marks) if mark.label == label]
    return {one: Mark(name, mark.checked if name or mark.checked == "excluded" else "no") for one, mark in own}


ACTIONS: dict[str, Callable[[State, Action], Effect]] = {
    "label": _label,
    "confirm": _confirm,
    "accept": _accept,
    "clear": _clear,
    "unsure": _set_aside,
    "exclude": _set_aside,
    "restore": _set_aside,
    "add class": _add_class,
    "rename class": _rename_class,
    "remove class": _remove_class,
}
"""Name of an action → its effect on a state."""

_TEXTS = {
    "label": "label {images} {label}",
    "confirm": "confirm {images}",
    "accept": "accept {images}",
    "clear": "clear {images}",
    "unsure": "mark {images} unsure",
    "exclude": "exclude {images}",
    "restore": "restore {images}",
    "add class": "add the class {label}",
    "rename class": "rename the class {label} to {name}",
    "remove class": "remove the class {label}",
}


def _undone(state: State) -> State:
    change = state.past
    if change is None:
        return state
    undone = replace(change, earlier=state.future)
    return replace(_with_marks(state, change.before), classes=change.classes[0], past=change.earlier, future=undone)


def _redone(state: State) -> State:
    change = state.future
    if change is None:
        return state
    done = replace(change, earlier=state.past)
    return replace(_with_marks(state, change.after), classes=change.classes[1], past=done, future=change.earlier)


def _with_marks(state: State, marks: Mapping[int, Mark]) -> State:
    if not marks:
        return state
    changed = list(state.marks)
    for one, mark in marks.items():
        changed[one] = mark
    return replace(state, marks=tuple(changed))


def changed_images(before: State, after: State) -> list[int]:
    """Return the numbers of the images whose marks differ between a state and the one after an action."""
    if before.marks is after.marks:
        return []
    pairs = enumerate(zip(before.marks, after.marks, strict=False))
    return [one for one, (old, new) in pairs if old is not new and old != new]


def check_class(name: str) -> None:
    """Raise `UsageError` for a name of a class that a table could not hold."""
    plain = unicodedata.normalize("NFC", shown(name))
    if not name or name != plain.strip() or len(name) > LONGEST_NAME:
        why = f"1 to {LONGEST_NAME} visible characters, without a line break, and without a space at either end"
        raise UsageError("this cannot be the name of a class", where=shown(name[:LONGEST_NAME]), why=why)
    if is_missing(name) or listed(name) is not None:
        why = "tables write a missing label or a list of labels in this way"
        raise UsageError(f"'{name}' cannot be the name of a class", why=why, hint="choose another name")


def _check_known(state: State, label: str) -> None:
    if label not in state.classes:
        raise UsageError(f"there is no class '{shown(label[:LONGEST_NAME])}'")
