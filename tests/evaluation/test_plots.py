"""Plots with extreme values: no text is cut or lies over another, and no legend lies over the data."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.figure import Figure

from plots import faults
from vitral.epoch_metrics import of_training
from vitral.evaluation import figures
from vitral.evaluation.numbers import measure_numbers
from vitral.evaluation.scores import CalibrationBin


@pytest.fixture
def drawn(monkeypatch) -> list[Figure]:
    """The figures that a plot draws."""
    found: list[Figure] = []
    inline = figures.inline

    def kept(figure: Figure, prefix: str) -> str:
        found.append(figure)
        return inline(figure, prefix)

    monkeypatch.setattr(figures, "inline", kept)
    return found


METRICS = of_training([("accuracy", "accuracy", "{:.2%}")])
HISTORIES = {
    "two epochs": 2 * [(1.0, 0.5)],
    "a thousand epochs": [(2.3 / (1 + k / 50), 1 - 0.9 / (1 + k / 80)) for k in range(1000)],
    "huge losses": [(10.0 ** (12 - k), 0.001 * k) for k in range(12)],
    "tiny changes": [(0.0123456 + 1e-6 * k, 0.97512 + 1e-5 * k) for k in range(9)],
    "all right": [(1e-9, 1.0)] * 5,
}


@pytest.mark.parametrize("name", HISTORIES)
def test_curves(drawn, name):
    history = [
        {
            "epoch": k + 1,
            "train_loss": loss,
            "val_loss": 1.1 * loss,
            "train_accuracy": accuracy,
            "val_accuracy": 0.98 * accuracy,
            "lr": 1e-3 * (1 - k / 2000),
            "gradient_norm": loss,
        }
        for k, (loss, accuracy) in enumerate(HISTORIES[name])
    ]
    plots = figures.curves(history, len(history), METRICS)
    assert len(plots) == len(drawn) == 4
    assert [faults(figure) for figure in drawn] == [[], [], [], []]


def test_a_single_epoch_draws_no_curve(drawn):
    assert figures.curves([{"epoch": 1, "train_loss": 1.0, "val_loss": 2.0, "lr": 1e-3}], 1, METRICS) == []


@pytest.mark.parametrize("filled", [[9], [0], range(10), [3, 4]])
def test_reliability(drawn, filled):
    bins = [
        CalibrationBin(k / 10, (k + 1) / 10, 1_000_000 if k in filled else 0, (k + 0.5) / 10, (k + 0.2) / 10)
        for k in range(10)
    ]
    figures.reliability(bins, 0.03)
    assert faults(drawn[0]) == []


NUMBERS = {
    "dates": np.linspace(1.6e9, 1.7e9, 50),
    "tiny": np.linspace(-1e-7, 3e-7, 50),
    "one outlier": np.array([0.0] * 49 + [1e6]),
    "two images": np.array([1.0, 2.0]),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers(drawn, name):
    true = NUMBERS[name]
    predicted = true + 0.1 * true.std() * np.sin(np.arange(len(true)))
    measured = measure_numbers(predicted[:, None], true[:, None], ["a number with a rather long name, in km/h"])
    figures.scatter(measured.per_number[0], predicted, true, 0)
    figures.residuals(measured.per_number[0], predicted, true, 0)
    assert [faults(figure) for figure in drawn] == [[], []]


def test_faults_are_found():
    figure = Figure(figsize=(3, 2))
    axes = figure.subplots()
    axes.plot(range(50), np.zeros(50), label="a curve of a long name")
    axes.legend(loc="center")
    axes.set_xticks([0, 1], ["a long label", "another long label"])
    axes.set_ylabel("a label that is far longer than the axis is tall")
    found = " ".join(faults(figure))
    for part in ("cut: a label", "a long label over another long label", "points below a legend"):
        assert part in found
