"""MLflow; MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME set the destination, as for its other clients."""

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
)  # MLflow's limits: characters of a parameter, and parameters of a request


class MLflow:
    """Metrics by optimiser step, parameters of config.yaml by path, images, summary.json, the bundle."""

    rewinds: ClassVar[bool] = False

    def start(self, info: RunInfo) -> str:
        """Create the run in its experiment, or open it again."""
        from mlflow import MlflowClient

        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # keep stdout clean
        self.client, self.id = MlflowClient(), info.tracker_run_id
        if self.id:
            self.client.update_run(self.id, "RUNNING")
            return self.id
        self.id = self.client.create_run(find_or_create_experiment(self.client), run_name=info.name).info.run_id
        for batch in batch_parameters(info.config):
            self.client.log_batch(self.id, params=batch)
        return self.id

    def log_line(self, line: MetricsLine) -> None:
        """Add the metrics of a line."""
        from mlflow.entities import Metric

        timestamp = int(1000 * time.time())
        self.client.log_batch(
            self.id, [Metric(name, x, timestamp, line["step"]) for name, x in extract_numbers(line).items()]
        )

    def log_images(self, images: Mapping[str, Image.Image], step: int) -> None:
        """Add images as artefacts."""
        for name, image in images.items():
            self.client.log_image(self.id, image, f"images/{name}.png")

    def log_bundle(self, bundle: Path) -> None:
        """Add the bundle as artefacts."""
        self.client.log_artifacts(self.id, str(bundle), "model")

    def finish(self, status: Status, summary: Mapping[str, Any]) -> None:
        """Add the summary, and end the run."""
        if summary:
            self.client.log_dict(self.id, dict(summary), "summary.json")
        self.client.set_terminated(self.id, STATUSES[status])


def find_or_create_experiment(client: Any) -> str:
    """Return the experiment of MLFLOW_EXPERIMENT_NAME (default: vitreous), and create it if it is missing."""
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "vitreous")
    experiment = client.get_experiment_by_name(name)
    return experiment.experiment_id if experiment else client.create_experiment(name)


def batch_parameters(config: Mapping[str, Any]) -> list[list[Any]]:
    """Return the values of a config by path, as parameters, in batches within MLflow's limits."""
    from mlflow.entities import Param

    pairs = [Param(name, str(value)[:MAX_PARAMETER_CHARACTERS]) for name, value in flatten_config(config).items()]
    return [pairs[start : start + MAX_BATCH_PARAMETERS] for start in range(0, len(pairs), MAX_BATCH_PARAMETERS)]
