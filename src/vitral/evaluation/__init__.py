"""Measure a classifier, and write what was found as one page that a person enjoys reading.

`vitral.evaluation.report` is imported by who writes a report: it needs matplotlib and jinja2, which measuring does not.
"""

from vitral.evaluation.metrics import CalibrationBin, ClassScore, Evaluation, measure

__all__ = ["CalibrationBin", "ClassScore", "Evaluation", "measure"]
