"""The base of all tasks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
from rich.console import Console
from torch import Tensor

from vitral.data import DataSet, Split
from vitral.data.targets import Targets
from vitral.epoch_metrics import TaskMetric
from vitral.evaluation.intervals import Groups
from vitral.inference.outputs import Output
from vitral.inference.predictor import Predictor
from vitral.training.callbacks import Epoch
from vitral.training.objectives.objective import TwoPartObjective
from vitral.workflows.planning.draft import Draft

if TYPE_CHECKING:
    from vitral.evaluation.report import ReportContent
    from vitral.workflows.planning.job import Job


class Metrics(Protocol):
    """Metrics of predictions on labeled images."""

    @property
    def images(self) -> int:
        """Number of images."""

    @property
    def groups(self) -> int:
        """Number of groups of images that belong together."""

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""

    def print_table(self, console: Console) -> None:
        """Print the main metrics."""


class Task:
    """From the labels of a data set to a head, a loss, metrics and predictions."""

    targets: ClassVar[Targets]
    """The meaning of the labels."""
    output_type: ClassVar[type[Output]]
    """The class of the outputs."""
    evaluation: ClassVar[type[Any]]
    """The class of the metrics of a split, with `from_json`."""
    figures: ClassVar[tuple[TaskMetric, ...]]
    """Metrics of an epoch besides the loss: key without `train_` or `val_`, title, format. The first one selects the
    best epoch.
    """

    def plan(self, draft: Draft) -> Draft:
        """Refuse options that this task does not support, and add its own choices."""
        return draft

    def objective(self, job: Job) -> TwoPartObjective:
        """Return the loss of a job."""
        raise NotImplementedError

    def output(self, dataset: DataSet) -> Output:
        """Return the output of a network for this data, before `fitted`."""
        return self.output_type(dataset.classes)

    def score(self, line: Epoch) -> tuple[float, float]:
        """Return the sort key of an epoch by its validation: the largest is the best one."""
        raise NotImplementedError

    def validate(self, logits: Tensor, labels: np.ndarray, output: Output) -> dict[str, float]:
        """Return `val_loss` and the other metrics of an epoch, from logits (n, K) fp32."""
        raise NotImplementedError

    def answers(self, logits: Tensor, output: Output) -> Tensor:
        """Return what a metric of the user compares with the labels: logits (n, K), or numbers in their units."""
        return logits

    def fitted(self, output: Output, logits: Tensor, labels: np.ndarray, groups: Groups = None) -> Output:
        """Return the output with what is chosen on the validation images, such as thresholds; `groups` as below."""
        return output

    def measure(self, values: np.ndarray, labels: np.ndarray, output: Output, groups: Groups = None) -> Metrics:
        """Return all metrics from values (n, K), as `Output.values` makes them, and the labels of the images.

        `groups` (n,) are equal for images that belong together, which intervals count; None if each is on its own.
        """
        raise NotImplementedError

    def summary(self, split: str, measured: Any) -> Mapping[str, float]:
        """Return the figures of a split that stand at the top of result.json."""
        raise NotImplementedError

    def page(
        self, content: ReportContent, predictor: Predictor, values: np.ndarray, images: Split, measured: Any, flops: int
    ) -> ReportContent:
        """Return the content of a report with the metrics and the errors on these images; `flops` is for one image."""
        raise NotImplementedError
