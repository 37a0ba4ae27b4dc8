"""MLflow. Server, experiment and credentials are MLflow's own settings (`MLFLOW_TRACKING_URI`, …)."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from vitral.trackers import results, scalars
from vitral.trackers.remembered import EpochOnce, Remembered
from vitral.training.callbacks import Epoch, RunStart

_LONGEST = 500
"""Characters of a parameter: MLflow's oldest limit."""


class Tracker(EpochOnce):
    """Log epochs and options. A run that continues keeps its identifier, and logs no epoch twice."""

    def __init__(self) -> None:
        self.client: MlflowClient
        self.noted: Remembered

    def on_run_start(self, run: RunStart) -> None:
        self.client = MlflowClient()
        self.noted = Remembered.read(run.folder / "mlflow.json")
        if not (self.noted.run and self._continues(self.noted.run)):
            self.noted = Remembered(self.noted.path, self._create(run))
        self.catch_up(run)

    def on_run_end(self, result: Mapping[str, object] | None) -> None:
        for name, value in results(result or {}).items():
            self.client.log_metric(self.noted.run, f"result/{name}", value)
        self.client.set_terminated(self.noted.run, "FINISHED" if result is not None else "KILLED")

    def _continues(self, run: str) -> bool:
        """Reopen the run of this identifier; false if the server has none (another server, or a deleted run)."""
        try:
            self.client.update_run(run, "RUNNING")
        except MlflowException:
            return False
        return True

    def _create(self, run: RunStart) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "vitral")
        found = self.client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self.client.create_experiment(name)
        identifier: str = self.client.create_run(experiment, run_name=run.folder.name).info.run_id
        options = [Param(key, str(value)[:_LONGEST]) for key, value in run.options.items() if value is not None]
        self.client.log_batch(identifier, params=options)
        return identifier

    def log(self, line: Epoch) -> None:
        now = int(1000 * time.time())
        metrics = [Metric(name, value, now, line["epoch"]) for name, value in scalars(line).items()]
        self.client.log_batch(self.noted.run, metrics=metrics)
