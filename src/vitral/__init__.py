"""Vision Transformers: train, measure, understand and ship them.

    model = vitral.create("S/4", classes=10, image_size=32)     a torch.nn.Module
    run = vitral.train(data="photos/", model="Ti/16", epochs=30)
    predictor = vitral.load("runs/photos")
    predictor("cat.jpg").top(5)
    vitral.explain(predictor, "cat.jpg")[0].save("why.png")

Names are imported when they are first used: `import vitral` alone does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitral.data import DataSet
    from vitral.data import load as load_data
    from vitral.data.check import check as check_data
    from vitral.data.transforms import Preprocessing
    from vitral.errors import VitralError
    from vitral.evaluation.metrics import Evaluation
    from vitral.explanation.explain import explain
    from vitral.explanation.heatmap import Heatmap
    from vitral.model import BiT, BiTConfig, ViT, ViTConfig, create, summarize
    from vitral.predict import Prediction, Predictor, load
    from vitral.recipes.evaluation import evaluate
    from vitral.recipes.execute import TrainedRun, train
    from vitral.recipes.inspection import inspect
    from vitral.training.run import Run
    from vitral.weights.convert import convert

__version__ = "0.1.0"

__all__ = [
    "BiT",
    "BiTConfig",
    "DataSet",
    "Evaluation",
    "Heatmap",
    "Prediction",
    "Predictor",
    "Preprocessing",
    "Run",
    "TrainedRun",
    "ViT",
    "ViTConfig",
    "VitralError",
    "check_data",
    "convert",
    "create",
    "evaluate",
    "explain",
    "inspect",
    "load",
    "load_data",
    "summarize",
    "train",
]

_HOME = {
    "BiT": "vitral.model",
    "BiTConfig": "vitral.model",
    "DataSet": "vitral.data",
    "Evaluation": "vitral.evaluation.metrics",
    "Heatmap": "vitral.explanation.heatmap",
    "Prediction": "vitral.predict",
    "Predictor": "vitral.predict",
    "Preprocessing": "vitral.data.transforms",
    "Run": "vitral.training.run",
    "TrainedRun": "vitral.recipes.execute",
    "ViT": "vitral.model",
    "ViTConfig": "vitral.model",
    "VitralError": "vitral.errors",
    "check_data": "vitral.data.check:check",
    "convert": "vitral.weights.convert",
    "create": "vitral.model",
    "evaluate": "vitral.recipes.evaluation",
    "explain": "vitral.explanation.explain",
    "inspect": "vitral.recipes.inspection",
    "load": "vitral.predict",
    "load_data": "vitral.data:load",
    "summarize": "vitral.model",
    "train": "vitral.recipes.execute",
}
"""Public name → module, with `:name` where it has another name there."""


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'vitral' has no attribute '{name}'")
    module, _, inner = _HOME[name].partition(":")
    value = getattr(importlib.import_module(module), inner or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
