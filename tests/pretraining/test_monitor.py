"""Measures of features, and the refusal of collapsed ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from images import noise
from vitral.data import DataSet, Split
from vitral.data.images.preprocessing import Preprocessing
from vitral.device import choose
from vitral.errors import TrainingError
from vitral.model import ViT, ViTConfig
from vitral.pretraining.monitor import Monitor, check_collapse, effective_rank, monitored, spread


def test_rank_counts_directions():
    torch.manual_seed(0)
    basis = torch.linalg.qr(torch.randn(40, 5))[0].T
    assert effective_rank(torch.randn(500, 5) @ basis + 7) == pytest.approx(5, abs=0.05)
    assert effective_rank(torch.randn(500, 1) @ basis[:1]) == pytest.approx(1, abs=1e-4)
    assert effective_rank(torch.ones(20, 8) * 3) == 0


def test_spread_is_one_for_all_directions_and_zero_for_one():
    torch.manual_seed(0)
    assert spread(torch.randn(5000, 64)) == pytest.approx(1, abs=0.01)
    assert spread(torch.rand(100, 1) @ torch.ones(1, 64)) == pytest.approx(0, abs=1e-6)


def test_collapse_is_refused_with_advice():
    healthy = {"feature_rank": 20.0, "feature_spread": 0.5}
    check_collapse(healthy, "")
    for bad in ({"feature_rank": 1.1}, {"feature_spread": 0.001}):
        with pytest.raises(TrainingError, match="collapsed") as refused:
            check_collapse({**healthy, **bad}, "a lower --lr")
        assert refused.value.hint == "a lower --lr"


def dataset(classes: int, **counts: int) -> DataSet:
    splits = {
        name: Split(
            [f"{i}" for i in range(n)], np.arange(n) % classes, lambda i: noise(i % 2, (8, 8)) // 4 + i % 2 * 99
        )
        for name, n in counts.items()
    }
    return DataSet("d", tuple(map(str, range(classes))), splits, "d")


def test_labels_are_measured_if_there_are_any():
    model = ViT(ViTConfig(image_size=8, patch_size=4, classes=0, dim=16, depth=1, heads=2, mlp_dim=16))
    measured = Monitor(dataset(2, train=30, val=10), Preprocessing((8, 8)), choose("cpu", "fp32"), 16)(model)
    assert measured["knn_accuracy"] == measured["probe_accuracy"] == 1
    assert set(measured) == {"feature_rank", "feature_spread", "knn_accuracy", "probe_accuracy"}
    assert model.training  # as before
    for other in (dataset(1, train=30, val=10), dataset(2, train=30)):
        assert set(Monitor(other, Preprocessing((8, 8)), choose("cpu", "fp32"), 16)(model)) == {
            "feature_rank",
            "feature_spread",
        }


def test_at_most_a_thousand_of_each_split():
    assert [len(split) for split in monitored(dataset(2, train=3000, val=1500, test=10))] == [1000, 1000]
    assert [len(split) for split in monitored(dataset(1, train=30))] == [30]
    assert [len(split) for split in monitored(dataset(1, train=30, val=10))] == [30], "nothing to classify"
