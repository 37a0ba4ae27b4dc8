"""Measure a classifier, and write what was found as one page that a person enjoys reading."""

from vitral.evaluate.metrics import CalibrationBin, ClassScore, Evaluation, measure

__all__ = ["CalibrationBin", "ClassScore", "Evaluation", "measure"]
