"""Evaluate a classifier and write a report.

Import `vitral.evaluation.report` explicitly: it needs matplotlib and jinja2, which the metrics do not.
"""

from vitral.evaluation.metrics import ClassScore, Evaluation, measure
from vitral.evaluation.scores import CalibrationBin

__all__ = ["CalibrationBin", "ClassScore", "Evaluation", "measure"]
