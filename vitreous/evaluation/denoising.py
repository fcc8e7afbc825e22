"""Denoising error of a generative model on held-out images.

n images; time runs from 0 (noise) to 1 (image).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitreous.data.keys import derive_keys, draw_normal
from vitreous.data.loader import EvalLoader
from vitreous.errors import DataError
from vitreous.evaluation.evaluator import Evaluator, SplitOutputs
from vitreous.generation.noising import GaussianDiffusion, RectifiedFlow
from vitreous.generation.process import Diffusion, Process
from vitreous.inference.engine import ENGINE_CHUNK, ModelEngine, regroup_batches
from vitreous.tasks.report import Report

NUM_TIMES = 8  # times at which images are evaluated
MAX_MODEL_INPUTS = 4096  # model inputs per evaluation: if there are more images, each is evaluated at fewer times
_NOISE_SEED = 0x64656E6F  # separates the random draws of this evaluation from others


class DenoisingEvaluator(Evaluator):
    """Evaluates the mean squared error of a generative model's prediction of its training target, at `NUM_TIMES` times
    from noise to image.

    The noise depends only on the image: it is the same for every model with the same noise process, and for any number
    of processes of a run. If there are many images, each is evaluated at some of the times, chosen by its index, so
    that a large split costs little more than one forward pass per image. `labelled`: the model is conditioned on the
    class of each image.
    """

    name = "denoising_error"
    better = "lower"

    def __init__(self, process: Process, labelled: bool) -> None:
        self.noising = GaussianDiffusion(process) if isinstance(process, Diffusion) else RectifiedFlow(process)
        self.is_conditional = labelled

    def without_labels(self) -> DenoisingEvaluator | None:
        """Return this evaluator if the model is unconditional; None if it needs classes."""
        return None if self.is_conditional else self

    def outputs(
        self, engine: ModelEngine, reader: EvalLoader, on_images: Callable[[int], None] = lambda images: None
    ) -> tuple[Any, dict[int, DataError]]:
        """Compute squared errors (n, TIMES) float32, NaN at times that are not evaluated, and read errors by image
        index."""
        blank = torch.zeros(engine.preprocess.channels, *engine.preprocess.image, dtype=engine.preprocess.dtype)
        error_chunks, read_errors = [np.zeros((0, NUM_TIMES), np.float32)], {}
        for samples, images in regroup_batches(reader.iterate_batches(ENGINE_CHUNK), ENGINE_CHUNK):
            read_errors |= {s: image for s, image in zip(samples, images, strict=True) if isinstance(image, DataError)}
            pixels = torch.stack([blank if isinstance(image, DataError) else image for image in images])
            labels = torch.from_numpy(reader.split.labels[np.asarray(samples)]) if self.is_conditional else None
            error_chunks.append(
                self.compute_errors(engine, pixels, labels, assign_times(np.asarray(samples), len(reader.split)))
            )
            on_images(len(images))
        return np.concatenate(error_chunks), read_errors

    @torch.inference_mode()
    def compute_errors(
        self, engine: Any, pixels: Tensor, labels: Tensor | None, is_evaluated: np.ndarray
    ) -> np.ndarray:
        """Compute squared errors (B, TIMES) float32 of images (B, C, *image) uint8 with labels (B,) int64, at the times
        that are true in `is_evaluated` (B, TIMES)."""
        images = engine.preprocess.normalise(pixels).to(engine.device)
        labels = None if labels is None else labels.to(engine.device)
        sums = pixels.flatten(1).double().sum(1).long().numpy()
        errors = np.full(is_evaluated.shape, np.nan, np.float32)
        for time_index in range(NUM_TIMES):
            indices = np.flatnonzero(is_evaluated[:, time_index])
            if not len(indices):
                continue
            selected_images, selected_labels = images[indices], None if labels is None else labels[indices]
            noise = torch.from_numpy(
                draw_normal(derive_keys(_NOISE_SEED, sums[indices], time_index), tuple(selected_images.shape[1:]))
            ).to(selected_images)
            noised = self.noising.make_noisy_batch(
                selected_images,
                noise,
                self.noising.time_at_progress((time_index + 0.5) / NUM_TIMES, len(selected_images)),
            )
            output = engine.model(noised.images.to(engine.input_dtype), noised.time, selected_labels)
            squares = (output[:, : selected_images.shape[1]].float() - noised.target).square().flatten(1).mean(1)
            errors[indices, time_index] = squares.cpu().numpy()
        return errors

    def report(self, outputs: SplitOutputs, *extra_outputs: SplitOutputs) -> Report:
        """Compute the mean error at each time, and the mean over times, from the readable images."""
        errors = outputs.outputs[outputs.readable]
        counts, sums = (~np.isnan(errors)).sum(0), np.nansum(errors, 0, dtype=np.float64)
        mean = np.divide(sums, counts, out=np.full(NUM_TIMES, np.nan), where=counts > 0)
        names = [f"denoising_error_{(time_index + 0.5) / NUM_TIMES:.2f}" for time_index in range(NUM_TIMES)]
        metrics = {self.name: float(mean.mean()), **dict(zip(names, mean.tolist(), strict=True))}
        finite_metrics = {name: value if np.isfinite(value) else None for name, value in metrics.items()}
        unreadable = len(outputs.outputs) - len(errors)
        return Report(
            len(outputs.outputs),
            unreadable,
            metrics=finite_metrics,
            intervals={},
            per_class=[],
            confusion_cells=None,
            primary=self.name,
            better="lower",
        )


def assign_times(samples: np.ndarray, count: int) -> np.ndarray:
    """Choose the diffusion times at which each image is evaluated: a mask (n, TIMES) bool for the indices (n,) of
    images in a split of `count` images."""
    period = min(NUM_TIMES, max(1, -(-count * NUM_TIMES // MAX_MODEL_INPUTS)))
    return (samples[:, None] + np.arange(NUM_TIMES)) % period == 0
