"""The TensorBoard tracker, which writes event files to RUN/tensorboard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from vitreous.config import to_yaml
from vitreous.training.trackers.base import MetricsLine, RunInfo, Status, extract_numbers


class TensorBoard:
    """Writes scalars (float32), images, and config.yaml as text. TensorBoard has no artefacts, so the bundle is not
    copied."""

    rewinds: ClassVar[bool] = True  # `purge_step` makes TensorBoard hide earlier values of later steps

    def start(self, info: RunInfo) -> str:
        """Open a new event file, and write the config as text."""
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(info.folder / "tensorboard"), purge_step=info.step + 1 if info.step else None)
        self.writer.add_text("config", f"```yaml\n{to_yaml(info.config)}```", info.step)
        return "tensorboard"

    def log_line(self, line: MetricsLine) -> None:
        """Add a scalar for each metric."""
        for name, value in extract_numbers(line).items():
            self.writer.add_scalar(name, value, line["step"])
        self.writer.flush()

    def log_images(self, images: Mapping[str, Image.Image], step: int) -> None:
        """Log images by name at an optimiser step."""
        for name, image in images.items():
            self.writer.add_image(name, np.asarray(image.convert("RGB")), step, dataformats="HWC")

    def log_bundle(self, bundle: Path) -> None:
        """Do nothing, because TensorBoard has no artefacts."""

    def finish(self, status: Status, summary: Mapping[str, Any]) -> None:
        """Close the event file. The summary is not written."""
        self.writer.close()
