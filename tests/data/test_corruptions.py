"""Corruptions depend on image, number and strength alone, keep the shape, and grow with the strength."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

import vitral
from running import as_json, printed
from vitral.console import stdout
from vitral.data.images.corruptions import CORRUPTIONS, STRENGTHS, corrupted
from vitral.data.options import OWN_DATA
from vitral.errors import UsageError
from vitral.inference.options import InferenceOptions
from vitral.workflows.corruptions import evaluate_corruptions
from vitral.workflows.evaluate import evaluate_images

SIDE = 96


def images(channels: int = 3, count: int = 3) -> Tensor:
    """Smooth images with edges and some texture."""
    grid = torch.linspace(40, 215, SIDE)
    one = (grid[:, None] + grid[None, :]).div(2).repeat(count, channels, 1, 1)
    one[:, :, 20:57, 31:70] = 230
    texture = torch.randint(0, 25, (count, channels, SIDE, SIDE), generator=torch.Generator().manual_seed(0))
    return (one + texture).to(torch.uint8)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_corruption_is_a_function_of_image_number_and_strength(name: str) -> None:
    for channels in (1, 3):
        given = images(channels)
        made = corrupted(given, name, 3, np.array([5, 6, 7]))
        assert made.shape == given.shape
        assert made.dtype == torch.uint8
        torch.manual_seed(1)
        alone = corrupted(given[1:2], name, 3, np.array([6]))
        assert torch.equal(alone[0], made[1])


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_stronger_one_changes_more(name: str) -> None:
    given = images(count=8)
    changes = [
        float((corrupted(given, name, strength, np.arange(8)).float() - given.float()).abs().mean())
        for strength in STRENGTHS
    ]
    assert changes[0] > 0.2
    assert changes[-1] > 1.1 * changes[0]
    assert all(more > 0.9 * less for less, more in itertools.pairwise(changes))


def test_the_same_figures_whatever_the_order_and_the_global_seed(
    trained: vitral.TrainedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(trained.folder)
    first = as_json(capsys, "evaluate", run, "--corruptions")["corrupted"]
    assert set(first["corruptions"]) == set(CORRUPTIONS)
    assert all(len(one["accuracy"]) == 5 for one in first["corruptions"].values())
    evaluated = evaluate_images(run, OWN_DATA, InferenceOptions("cpu"))
    assert first["clean"] == evaluated.evaluation.accuracy
    torch.manual_seed(9)
    again = evaluate_corruptions(evaluated)
    assert again.to_json() == first
    again.print_table(stdout())
    assert f"mean accuracy {again.mean:.2%} under corruptions" in capsys.readouterr().out


def test_other_evaluations_are_refused(trained: vitral.TrainedRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--corruptions" in printed(capsys, "evaluate", str(trained.folder), "--corruptions", "--knn", "3", code=2)[1]
    evaluated = evaluate_images(str(trained.folder), OWN_DATA, InferenceOptions("cpu"))
    evaluated.predictor.output = type("Other", (), {"task": "numbers", "one_class": False})()  # type: ignore[assignment]
    with pytest.raises(UsageError, match="one class per image"):
        evaluate_corruptions(evaluated)
