"""Test single planning steps: each returns a new draft and does not modify its input."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from images import MakeImages
from vitral import device
from vitral.data import load
from vitral.device import choose
from vitral.errors import UsageError
from vitral.workflows.planning import compute as plan_compute
from vitral.workflows.planning import network as plan_network
from vitral.workflows.planning import plan
from vitral.workflows.planning.draft import Draft
from vitral.workflows.planning.plan import STEPS, draft_run, plan_run


@pytest.fixture
def drafted(make_images: MakeImages):
    photos = make_images({"cat": 12, "dog": 8})

    def make(until: str | None = None, **given: Any) -> Draft:
        """Return a draft after the steps before `until`."""
        draft = draft_run({"data": str(photos), **given}, load(str(photos)), choose("cpu"))
        for step in STEPS:
            if step.__name__ == until:
                break
            draft = step(draft)
        return draft

    return make


def names(draft: Draft, before: Draft) -> list[str]:
    return [choice.name for choice in draft.choices[len(before.choices) :]]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_a_step_does_not_modify_its_input(step, drafted):
    before = drafted(step.__name__)
    kept = dataclasses.replace(before)
    after = step(before)
    assert all(getattr(before, f.name) is getattr(kept, f.name) for f in dataclasses.fields(Draft))
    assert after.choices[: len(before.choices)] == before.choices
    assert step(before).run == after.run  # the same draft gives the same result


def test_data_are_split_and_the_device_is_chosen_once(make_images, monkeypatch):
    calls = []
    for module, name in ((plan, "split_for"), (device, "_device")):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, name=name, do=original: calls.append(name) or do(*a))
    plan_run({"data": str(make_images({"cat": 12, "dog": 8})), "minutes": 0.01, "device": "cpu"})
    assert sorted(calls) == ["_device", "split_for"]


def test_given_options_have_a_line_each(drafted):
    before = drafted("state_given", epochs=3, lr=0.1)
    after = plan.state_given(before)
    assert names(after, before) == ["init", "epochs", "lr"]


def test_a_named_model_sets_its_size(drafted):
    before = drafted("take_network", model="S/16")
    after = plan_network.take_network(before)
    assert after.run.model == "S/16"
    assert all(side % 16 == 0 for side in after.run.size)


def test_bounded_logits_are_scaled(drafted):
    before = drafted("scale_logits", model="mnist-7562")
    after = plan_compute.scale_logits(before)
    assert after.run.logit_scale == plan_compute.TANH_LOGIT_SCALE
    assert names(after, before) == ["logit scale", "label smoothing"]
    asked = drafted("scale_logits", model="mnist-7562", logit_scale=2.0)
    assert plan_compute.scale_logits(asked) is asked


def test_precision_depends_on_the_width(drafted):
    before = drafted("set_precision", precision="fp32")
    assert plan.set_precision(before).machine.precision == "fp32"
    assert plan.set_precision(before).machine.device == before.machine.device


def test_whitening_without_a_stem_is_refused(drafted):
    before = drafted("whiten", model="S/16", whiten=True)
    with pytest.raises(UsageError, match="cannot whiten the first layer"):
        plan_compute.whiten(before)


def test_a_tiny_network_has_no_shifts(drafted):
    before = drafted("drop_shifts", model="mu/4", dim=8, depth=1, heads=2, mlp_dim=8, image_size=8)
    before = before.change(crop="shift")
    after = plan_compute.drop_shifts(before)
    assert after.run.crop == "none"
    assert names(after, before) == ["geometry"]


def test_compiling_is_decided_unless_it_is_given(drafted):
    before = drafted("use_compiler")
    assert names(plan_compute.use_compiler(before), before) == ["compile"]
    given = drafted("use_compiler", compile=False)
    assert plan_compute.use_compiler(given) is given


def test_options_of_distillation_need_a_teacher(drafted):
    with pytest.raises(UsageError, match="requires a teacher"):
        plan_network.read_teacher(drafted("read_teacher", distill_weight=0.5))
