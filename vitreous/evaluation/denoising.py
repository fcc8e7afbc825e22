"""How well a model of images takes noise away from images that it did not learn from.

n images; times are shares of the way from noise (0) to the image (1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitreous.data.keys import key, normal
from vitreous.data.loader import EvalLoader
from vitreous.errors import DataError
from vitreous.evaluation.engine import CHUNK, Engine, chunks
from vitreous.evaluation.evaluator import Evaluator, Outputs
from vitreous.evaluation.report import Report
from vitreous.generation.gaussian import Gaussian
from vitreous.generation.line import Line
from vitreous.generation.process import Diffusion, Process

TIMES = 8  # at which each image is judged
_NOISE = 0x64656E6F  # sets its draws apart


class DenoisingEvaluator(Evaluator):
    """The mean squared error of what a model is asked for, at `TIMES` times from noise to image, with noise that is a
    function of the image: the same for every model of one process, and for any number of processes.

    `labelled`: the model is told the class of each image.
    """

    name = "denoising_error"
    better = "lower"

    def __init__(self, process: Process, labelled: bool) -> None:
        self.noising = Gaussian(process) if isinstance(process, Diffusion) else Line(process)
        self.labelled = labelled

    def without_labels(self) -> DenoisingEvaluator | None:
        """The same, where no class is told."""
        return None if self.labelled else self

    def outputs(
        self, engine: Engine, reader: EvalLoader, on_images: Callable[[int], None] = lambda images: None
    ) -> tuple[Any, dict[int, DataError]]:
        """(n, TIMES) float32 squared errors, and the unreadable images by position."""
        blank = torch.zeros(engine.preprocess.channels, *engine.preprocess.image, dtype=engine.preprocess.dtype)
        rows, bad = [np.zeros((0, TIMES), np.float32)], {}
        for samples, images in chunks(reader.batches(CHUNK), CHUNK):
            bad |= {s: image for s, image in zip(samples, images, strict=True) if isinstance(image, DataError)}
            pixels = torch.stack([blank if isinstance(image, DataError) else image for image in images])
            labels = torch.from_numpy(reader.split.labels[np.asarray(samples)]) if self.labelled else None
            rows.append(self.errors(engine, pixels, labels))
            on_images(len(images))
        return np.concatenate(rows), bad

    @torch.inference_mode()
    def errors(self, engine: Any, pixels: Tensor, labels: Tensor | None) -> np.ndarray:
        """(B, C, *image) uint8, (B,) int64 -> (B, TIMES) float32."""
        images = engine.preprocess.normalise(pixels).to(engine.device)
        labels = None if labels is None else labels.to(engine.device)
        sums = pixels.flatten(1).double().sum(1).long().numpy()
        errors = []
        for number in range(TIMES):
            noise = torch.from_numpy(normal(key(_NOISE, sums, number), tuple(images.shape[1:]))).to(images)
            noised = self.noising.noised(images, noise, self.noising.moment((number + 0.5) / TIMES, len(images)))
            answer = engine.model(noised.images.to(engine.images), noised.time, labels)
            errors.append((answer[:, : images.shape[1]].float() - noised.target).square().flatten(1).mean(1))
        return torch.stack(errors, 1).cpu().numpy()

    def report(self, outputs: Outputs, *others: Outputs) -> Report:
        """The mean error, and that at each time, of the readable images."""
        rows = outputs.rows[outputs.readable]
        mean = rows.mean(0, dtype=np.float64) if len(rows) else np.full(TIMES, np.nan)
        names = [f"denoising_error_{(number + 0.5) / TIMES:.2f}" for number in range(TIMES)]
        figures = {self.name: float(mean.mean()), **dict(zip(names, mean.tolist(), strict=True))}
        shown = {name: value if np.isfinite(value) else None for name, value in figures.items()}
        unreadable = len(outputs.rows) - len(rows)
        return Report(len(outputs.rows), unreadable, shown, {}, [], None, figure=self.name, better="lower")
