"""Vision Transformers: train, measure, understand and ship them.

    model = vitral.create("S/4", classes=10, image_size=32)     a torch.nn.Module
    run = vitral.train(data="photos/", epochs=30)
    predictor = vitral.load("runs/photos")
    predictor("cat.jpg").top(5)
    vitral.explain(predictor, "cat.jpg")[0].save("why.png")

Names are imported on first use: `import vitral` alone does not import torch. Type checkers and editors read their
signatures in `__init__.pyi`.
"""

from __future__ import annotations

import importlib
from typing import Any

from vitral._version import __version__ as __version__

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
    "compare",
    "convert",
    "create",
    "evaluate",
    "explain",
    "inspect",
    "load",
    "load_data",
    "plan",
    "pretrain",
    "runs",
    "save",
    "summarize",
    "train",
    "verify",
]

_HOME = {
    "BiT": "vitral.model",
    "BiTConfig": "vitral.model",
    "DataSet": "vitral.data",
    "Evaluation": "vitral.evaluation.metrics",
    "Heatmap": "vitral.explanation.heatmap",
    "Prediction": "vitral.inference.predictions",
    "Predictor": "vitral.inference.predictor",
    "Preprocessing": "vitral.data.images.preprocessing",
    "Run": "vitral.training.options",
    "TrainedRun": "vitral.workflows.running.trained",
    "ViT": "vitral.model",
    "ViTConfig": "vitral.model",
    "VitralError": "vitral.errors",
    "check_data": "vitral.data.checks.validate:check",
    "compare": "vitral.studies.comparison",
    "convert": "vitral.weights.convert",
    "create": "vitral.model",
    "evaluate": "vitral.workflows.evaluate",
    "explain": "vitral.explanation.explain",
    "inspect": "vitral.workflows.inspection",
    "load": "vitral.inference.loading",
    "load_data": "vitral.data:load",
    "plan": "vitral.workflows.planned",
    "pretrain": "vitral.workflows.pretrain",
    "runs": "vitral.workflows.running.trained",
    "save": "vitral.weights.convert",
    "summarize": "vitral.model",
    "train": "vitral.workflows.train",
    "verify": "vitral.workflows.verify",
}
"""Public name → module, with `:name` where the module uses another name."""


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'vitral' has no attribute '{name}'")
    module, _, inner = _HOME[name].partition(":")
    try:
        value = getattr(importlib.import_module(module), inner or name)
    except Exception as error:
        from vitral.imports import import_failure

        if failed := import_failure(error):
            raise failed from None
        raise
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
