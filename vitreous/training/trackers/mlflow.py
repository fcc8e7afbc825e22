"""MLflow: MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME say where to, as its own programs have it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from PIL import Image

from vitreous.training.trackers.base import MetricsLine, RunInfo, Status, extract_numbers, flatten_config

STATUSES = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
MAX_PARAMETER_CHARACTERS, MAX_BATCH_PARAMETERS = (
    6_000,
    100,
)  # characters of a parameter, and parameters of a request, that MLflow takes


class MLflow:
    """Metrics by optimiser step, parameters of config.yaml by their paths, pictures, summary.json, the bundle."""

    rewinds: ClassVar[bool] = False

    def start(self, info: RunInfo) -> str:
        """Make the run in its experiment, or open it again."""
        from mlflow import MlflowClient

        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # stdout stays the run's own
        self.client, self.id = MlflowClient(), info.identity
        if self.id:
            self.client.update_run(self.id, "RUNNING")
            return self.id
        self.id = self.client.create_run(find_or_create_experiment(self.client), run_name=info.name).info.run_id
        for part in batch_parameters(info.config):
            self.client.log_batch(self.id, params=part)
        return self.id

    def log_line(self, line: MetricsLine) -> None:
        """Add the figures of a line."""
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self.client.log_batch(
            self.id, [Metric(name, x, now, line["step"]) for name, x in extract_numbers(line).items()]
        )

    def log_pictures(self, pictures: Mapping[str, Image.Image], step: int) -> None:
        """Add pictures as artefacts."""
        for name, picture in pictures.items():
            self.client.log_image(self.id, picture, f"pictures/{name}.png")

    def log_bundle(self, bundle: Path) -> None:
        """Add the bundle as artefacts."""
        self.client.log_artifacts(self.id, str(bundle), "model")

    def finish(self, status: Status, summary: Mapping[str, Any]) -> None:
        """Add the summary, and end the run."""
        if summary:
            self.client.log_dict(self.id, dict(summary), "summary.json")
        self.client.set_terminated(self.id, STATUSES[status])


def find_or_create_experiment(client: Any) -> str:
    """The experiment that MLFLOW_EXPERIMENT_NAME names (default: vitreous), made where there is none."""
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "vitreous")
    known = client.get_experiment_by_name(name)
    return known.experiment_id if known else client.create_experiment(name)


def batch_parameters(config: Mapping[str, Any]) -> list[list[Any]]:
    """The values of a config by their paths, as parameters, in batches that MLflow takes."""
    from mlflow.entities import Param

    pairs = [Param(name, str(value)[:MAX_PARAMETER_CHARACTERS]) for name, value in flatten_config(config).items()]
    return [pairs[start : start + MAX_BATCH_PARAMETERS] for start in range(0, len(pairs), MAX_BATCH_PARAMETERS)]
