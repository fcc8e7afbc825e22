"""The MLflow tracker. MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME set the server and the experiment, as for all
MLflow clients."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from PIL import Image

from vitreous.training.trackers.base import MetricsLine, RunInfo, Status, extract_numbers, flatten_config

STATUSES = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
MAX_PARAMETER_CHARACTERS = 6_000  # MLflow's limit of characters of a parameter
MAX_BATCH_PARAMETERS = 100  # MLflow's limit of parameters of a request


class MLflow:
    """Logs to MLflow: metrics by optimiser step, the values of config.yaml as parameters, images, summary.json and the
    bundle."""

    rewinds: ClassVar[bool] = False

    def start(self, info: RunInfo) -> str:
        """Create the run in its experiment, or reopen it. Returns its ID."""
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
        """Add images by name as artefacts."""
        for name, image in images.items():
            self.client.log_image(self.id, image, f"images/{name}.png")

    def log_bundle(self, bundle: Path) -> None:
        """Add the files of the bundle as artefacts."""
        self.client.log_artifacts(self.id, str(bundle), "model")

    def finish(self, status: Status, summary: Mapping[str, Any]) -> None:
        """Add the summary, and end the run."""
        if summary:
            self.client.log_dict(self.id, dict(summary), "summary.json")
        self.client.set_terminated(self.id, STATUSES[status])


def find_or_create_experiment(client: Any) -> str:
    """Return the ID of the experiment MLFLOW_EXPERIMENT_NAME (default: vitreous), which is created if it does not
    exist."""
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "vitreous")
    experiment = client.get_experiment_by_name(name)
    return experiment.experiment_id if experiment else client.create_experiment(name)


def batch_parameters(config: Mapping[str, Any]) -> list[list[Any]]:
    """Convert a config to MLflow parameters, named by their path in the config, in batches within MLflow's limits."""
    from mlflow.entities import Param

    parameters = [Param(name, str(value)[:MAX_PARAMETER_CHARACTERS]) for name, value in flatten_config(config).items()]
    starts = range(0, len(parameters), MAX_BATCH_PARAMETERS)
    return [parameters[start : start + MAX_BATCH_PARAMETERS] for start in starts]
