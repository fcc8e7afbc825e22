"""The Weights & Biases tracker. WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE and WANDB_DIR set the destination, as for all
its clients."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from PIL import Image

from vitreous.training.trackers.base import MetricsLine, RunInfo, Status


class WeightsAndBiases:
    """Logs metrics by optimiser step, the config, images, the summary, and the bundle as an artefact of type model."""

    rewinds: ClassVar[bool] = False

    def start(self, info: RunInfo) -> str:
        """Create the run or reopen it, online or offline as WANDB_MODE specifies. Returns its ID."""
        import wandb

        self.wandb, run_id = wandb, info.tracker_run_id or uuid.uuid4().hex
        destination = {
            "project": os.environ.get("WANDB_PROJECT", "vitreous"),
            "dir": os.environ.get("WANDB_DIR", info.folder),
        }
        settings = wandb.Settings(console="off", silent=True)  # keep stdout and stderr clean
        self.run = wandb.init(
            **destination, id=run_id, name=info.name, config=info.config, resume="allow", settings=settings
        )
        self.run.define_metric("*", step_metric="step")
        return run_id

    def log_line(self, line: MetricsLine) -> None:
        """Add a line of metrics, with its step as the horizontal axis."""
        self.run.log({name: value for name, value in line.items() if value is not None})

    def log_images(self, images: Mapping[str, Image.Image], step: int) -> None:
        """Add images by name."""
        self.run.log({"step": step} | {name: self.wandb.Image(image) for name, image in images.items()})

    def log_bundle(self, bundle: Path) -> None:
        """Add the files of the bundle as an artefact."""
        artifact = self.wandb.Artifact(f"model-{self.run.id}", type="model")
        for file in sorted(bundle.iterdir()):
            artifact.add_file(str(file), file.name)
        self.run.log_artifact(artifact)

    def finish(self, status: Status, summary: Mapping[str, Any]) -> None:
        """Write the summary, and wait until all data is sent."""
        self.run.summary.update(dict(summary))
        self.run.finish(exit_code=0 if status == "finished" else 1)
