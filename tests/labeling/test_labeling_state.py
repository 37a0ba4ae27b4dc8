"""The state of labeling: every action, undo and redo, and what is refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitral.data.label_table import CHECKED
from vitral.errors import UsageError
from vitral.labeling.state import ACTIONS, Action, LabeledImage, Mark, State, applied, changed_images, with_images


def begun(images: int = 6) -> State:
    """Some images, the first two labeled by their folder, and two classes."""
    pairs = [(LabeledImage(f"{n}.jpg", "rose" if n < 2 else ""), Mark("rose" if n < 2 else "")) for n in range(images)]
    return with_images(State(), pairs, ["rose", "tulip"])


def marks(state: State) -> list[tuple[str, str]]:
    return [(mark.label, mark.checked) for mark in state.marks]


def test_an_image_is_labeled_and_checked():
    state = applied(begun(), Action("label", (0, 3), "tulip"))
    assert marks(state)[0] == marks(state)[3] == ("tulip", "yes")
    assert marks(state)[1] == ("rose", "no"), "the label of its folder, which nobody has checked"
    assert state.images[0].given == "rose"


def test_a_label_is_kept_only_where_there_is_one():
    state = applied(begun(), Action("confirm", (0, 4)))
    assert marks(state)[0] == ("rose", "yes")
    assert marks(state)[4] == ("", "no")


def test_images_are_set_aside_and_come_back_unchecked():
    state = applied(begun(), Action("label", (0,), "tulip"))
    for do, checked in (("unsure", "unsure"), ("exclude", "excluded"), ("restore", "no")):
        state = applied(state, Action(do, (0,)))
        assert marks(state)[0] == ("tulip", checked)
    assert marks(applied(state, Action("clear", (0,))))[0] == ("", "no")


def test_a_class_is_added_renamed_merged_and_removed():
    state = applied(begun(), Action("add class", label="iris"))
    assert state.classes == ("rose", "tulip", "iris")
    state = applied(applied(state, Action("label", (2,), "iris")), Action("rename class", label="iris", name="Iris"))
    assert (state.classes, marks(state)[2]) == (("rose", "tulip", "Iris"), ("Iris", "yes"))
    state = applied(state, Action("rename class", label="Iris", name="rose"))
    assert (state.classes, marks(state)[2]) == (("rose", "tulip"), ("rose", "yes")), "one class of two"
    state = applied(state, Action("remove class", label="rose"))
    assert (state.classes, {label for label, _ in marks(state)}) == (("tulip",), {""})


def test_what_changes_nothing_is_no_change():
    state = applied(begun(), Action("label", (0,), "tulip"))
    assert applied(state, Action("label", (0,), "tulip")) is state
    assert applied(begun(), Action("undo")).past is None


def test_a_new_action_after_undo_ends_what_could_be_redone():
    state = applied(applied(begun(), Action("label", (3,), "rose")), Action("undo"))
    assert state.future is not None
    state = applied(state, Action("label", (4,), "tulip"))
    assert state.future is None
    assert marks(applied(state, Action("redo"))) == marks(state)


def test_a_change_is_named_for_a_person():
    state = applied(begun(), Action("label", (2, 3), "tulip"))
    assert state.past is not None
    assert state.past.text == "label 2 images tulip"


NAMES = st.sampled_from(["rose", "tulip", "iris", "<b>oak</b>"])
STEPS = st.builds(
    Action,
    st.sampled_from([*ACTIONS, "undo", "redo"]),
    st.lists(st.integers(0, 5), max_size=4, unique=True).map(tuple),
    NAMES,
    NAMES,
)


@settings(max_examples=150, deadline=None, database=None)
@given(st.lists(STEPS, max_size=25))
def test_all_is_undone_and_redone_and_a_journal_leads_to_the_same_state(steps):
    start = begun()
    state, kept = start, []
    for step in steps:
        before = marks(state)
        try:
            after = applied(state, step)
        except UsageError:
            continue
        assert marks(state) == before, "a state is never modified"
        assert set(changed_images(state, after)) == {i for i in range(6) if state.marks[i] != after.marks[i]}
        assert {mark.label for mark in after.marks} <= {"", *after.classes}
        assert {mark.checked for mark in after.marks} <= set(CHECKED)
        kept += [json.loads(json.dumps(step.to_json()))]
        state = after
    again = start
    for plain in kept:
        again = applied(again, Action.from_json(plain))
    assert (again.marks, again.classes) == (state.marks, state.classes)
    while state.future is not None:
        state = applied(state, Action("redo"))
    last = (state.marks, state.classes)
    while state.past is not None:
        state = applied(state, Action("undo"))
    assert (state.marks, state.classes) == (start.marks, start.classes)
    while state.future is not None:
        state = applied(state, Action("redo"))
    assert (state.marks, state.classes) == last


@pytest.mark.parametrize(
    "action",
    [
        Action("label", (0,), "oak"),
        Action("label", (6,), "rose"),
        Action("label", (-1,), "rose"),
        Action("paint", (0,)),
        Action("add class", label="rose"),
        Action("rename class", label="oak", name="elm"),
        Action("rename class", label="rose", name=""),
        Action("remove class", label="oak"),
    ],
)
def test_refused_actions(action):
    with pytest.raises(UsageError):
        applied(begun(), action)


@pytest.mark.parametrize(
    "name", ["", " rose", "rose ", "a\nb", "a\tb", "x" * 256, "NaN", "null", "['a', 'b']", "e\u0301", "\u202erose"]
)
def test_names_that_no_table_could_hold(name):
    with pytest.raises(UsageError, match="name of a class"):
        applied(begun(), Action("add class", label=name))


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", "a, b; c", 'say "no"', "한국어", "=1+1", "0"])
def test_names_are_text(name):
    assert applied(begun(), Action("add class", label=name)).classes[-1] == name


@pytest.mark.parametrize(
    "plain",
    [
        {"do": 1},
        {"do": "label", "images": "0"},
        {"do": "label", "images": [True]},
        {"do": "label", "images": [0.0]},
        {"do": "label", "label": None},
        {"do": "label", "path": "/etc/passwd"},
        {"do": "label", "name": "x" * 256},
    ],
)
def test_plain_data_that_are_no_action(plain):
    with pytest.raises(UsageError):
        Action.from_json(plain)
