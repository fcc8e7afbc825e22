"""Sample images of a generative model from seeds and classes, as fast as the hardware allows.

On a CPU each thread samples separate images, from the first step to the last. n images of C channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from vitreous.data.keys import derive_keys, draw_normal
from vitreous.data.modalities.base import Preprocess
from vitreous.errors import UsageError
from vitreous.generation.process import Process
from vitreous.generation.samplers import SAMPLERS, SamplerState, guide_prediction, skip_inpainting
from vitreous.generation.settings import SamplingOptions
from vitreous.inference.engine import CHUNK_TOKENS, split_batch
from vitreous.nn.frozen import freeze_for_inference
from vitreous.nn.sizes import patch_grid
from vitreous.system.machine import (
    DTYPES,
    configure_process,
    get_thread_pool,
    has_fast_packed_matmul,
    pick_device,
    pick_precision,
)
from vitreous.system.torch_types import from_numpy
from vitreous.tasks.generation import Generation
from vitreous.weights.autoencoder import Autoencoder
from vitreous.weights.bundle import Bundle

START_NOISE_SALT = 0x7374617274  # separates the seed of the initial noise from that of the steps


@dataclass(frozen=True, eq=False)
class InpaintingCanvas:
    """Images for inpainting, with the pixels that are kept: `images` (n, C, *image) float32 normalised, and `keep_mask`
    (n, 1, *image) bool, true for kept pixels."""

    images: Tensor
    keep_mask: Tensor


class ImageSampler:
    """Samples images from a generative model of `classes` classes (0: unconditional) by reversing its noise process. An
    image depends only on the seed, its class and its sample index, not on the rest of the batch, except for the last
    bits. Raises UsageError for an unavailable device or precision."""

    def __init__(
        self,
        model: Any,
        process: Process,
        classes: int,
        preprocess: Preprocess,
        *,
        device: str = "auto",
        precision: str = "auto",
    ) -> None:
        self.config: Any = model.config
        self.process, self.classes, self.preprocess = process, classes, preprocess
        self.device = pick_device(device)
        self.precision = pick_precision(precision, self.device)
        self.dtype = DTYPES[self.precision]
        self.model: Any = freeze_for_inference(model.to(self.device), self.dtype, has_fast_packed_matmul(self.device))
        self.decode: Callable[[Tensor], Tensor] | None = None  # decodes scaled and shifted latents to pixels
        self.stride = 1  # image pixels per latent position; 1 for models of pixels
        self.image = tuple(model.config.image)  # size of the samples, which callers may change
        configure_process()

    def draw_noise(self, labels: Tensor, sample_indices: Tensor, seed: int) -> Tensor:
        """Draw the initial noise, (n, C, *image) float32, of images with these classes and sample indices, (n,) int64
        each."""
        keys = derive_keys(seed, START_NOISE_SALT, labels.numpy(), sample_indices.numpy())
        return from_numpy(draw_normal(keys, (self.config.channels, *self.image)))

    def sample(
        self,
        labels: Tensor,
        sample_indices: Tensor,
        options: SamplingOptions = SamplingOptions(),  # noqa: B008
        on_images: Callable[[float], None] = lambda images: None,
        noise: Tensor | None = None,
        canvas: InpaintingCanvas | None = None,
        on_step: Callable[[slice, SamplerState], None] = lambda rows, state: None,
    ) -> Tensor:
        """Sample images from classes (0 if unconditional) and sample indices, (n,) int64 each: (n, C, *image) uint8
        pixels, or (n, C', H, W) decoded latents.

        `noise` (n, C, *image) replaces the initial noise of the seed. The batch is split into chunks: after each step
        of a chunk, `on_images` is called with the fraction of the work that was done, in images, and `on_step` with the
        slice of the batch and the state. `on_step` runs in the thread that computes the chunk; an exception in it ends
        the sampling. Raises UsageError for a sampler or steps that the model does not support.
        """
        _, steps = options.resolve_sampler(self.process)
        initial_noise = self.draw_noise(labels, sample_indices, options.seed) if noise is None else noise
        keys = from_numpy(derive_keys(options.seed, labels.numpy(), sample_indices.numpy()).view(np.int64))
        tokens = math.prod(patch_grid(self.image, self.config.patch)) * (
            2 if self.classes and options.guidance != 1 else 1
        )
        threads = torch.get_num_threads() if self.device == "cpu" else 1
        max_chunk = max(1, round(CHUNK_TOKENS / tokens)) if self.device == "cpu" else 64
        size, is_shared = split_batch(len(initial_noise), max_chunk, threads) if threads > 1 else (max_chunk, True)
        chunk_slices = [
            slice(offset, min(offset + size, len(initial_noise))) for offset in range(0, len(initial_noise), size)
        ]

        def sample_slice(chunk: slice) -> Tensor:
            """Sample the images of one chunk, a slice of the batch."""
            chunk_canvas = None if canvas is None else InpaintingCanvas(canvas.images[chunk], canvas.keep_mask[chunk])

            def report_step(state: SamplerState) -> None:
                """Call the callbacks after a step of the chunk."""
                on_images((chunk.stop - chunk.start) / steps)
                on_step(chunk, state)

            return self.sample_chunk(
                initial_noise[chunk], labels[chunk], keys[chunk], options, canvas=chunk_canvas, on_state=report_step
            )

        return torch.cat(
            list(
                map(sample_slice, chunk_slices)
                if is_shared
                else get_thread_pool(threads).map(sample_slice, chunk_slices)
            )
        )

    @torch.inference_mode()
    def sample_chunk(
        self,
        noise: Tensor,
        labels: Tensor,
        keys: Tensor,
        options: SamplingOptions,
        canvas: InpaintingCanvas | None,
        on_state: Callable[[SamplerState], None],
    ) -> Tensor:
        """Sample one chunk from the first step to the last: (b, C, *image) noise, (b,) int64 classes and keys -> (b, C,
        *image) uint8. `on_state` is called with the state after each step."""
        name, steps = options.resolve_sampler(self.process)
        condition = labels.to(self.device) if self.classes else None
        predict = guide_prediction(self.predict, condition, self.classes, options)

        def restore_kept_pixels(noisy: Tensor, a: float, b: float) -> Tensor:
            """Replace the pixels that inpainting keeps by the noised originals; without inpainting, return the images
            unchanged."""
            return skip_inpainting(noisy, a, b) if canvas is None else restore_known_pixels(canvas, noisy, noise, a, b)

        def draw_step_noise(step: int) -> Tensor:
            """Draw the noise (b, C, *image) of one step."""
            step_keys = derive_keys(keys.numpy().view(np.uint64), step + 1)
            return from_numpy(draw_normal(step_keys, tuple(noise.shape[1:]))).to(self.device)

        image = noise
        for state in SAMPLERS[name](
            self.process, predict, noise.to(self.device), steps, draw_step_noise, restore_kept_pixels
        ):
            image = state.noisy
            on_state(state)
        return self.finish(image.float().cpu())

    def predict(self, noisy: Tensor, time: Tensor, labels: Tensor | None) -> Tensor:
        """Compute one forward pass of the model: noisy images (b, C, *image), times (b,) and labels (b,) -> (b, C',
        *image) float32."""
        return self.model(noisy.to(self.dtype), time, labels).float()

    def finish(self, images: Tensor) -> Tensor:
        """Convert denoised samples (b, C, *image) float32 to uint8: pixels of the same shape, or decoded latents (b,
        C', H, W)."""
        return self.to_uint8_pixels(images) if self.decode is None else self.decode(images)

    def preview_images(self, images: Tensor) -> Tensor:
        """Convert partly denoised samples (b, C, *image) float32 to uint8 for a preview, (b, C', *image): the pixels,
        or the first three channels of latents, which show rough shapes."""
        if self.decode is None:
            return self.to_uint8_pixels(images)
        return (images[:, :3] * 64 + 128).round_().clamp_(0, 255).to(torch.uint8)

    def to_uint8_pixels(self, images: Tensor) -> Tensor:
        """Convert normalised pixels (b, C, *image) float32 to uint8."""
        values = self.preprocess.denormalise(images) * (255 / self.preprocess.peak)
        return values.round_().clamp_(0, 255).to(torch.uint8)


def restore_known_pixels(canvas: InpaintingCanvas, noisy: Tensor, noise: Tensor, a: float, b: float) -> Tensor:
    """Replace the kept pixels of samples (b, C, *image) after a step by a image + b noise (arXiv:2011.13456, appendix
    I.2)."""
    kept_pixels = a * canvas.images.to(noisy) + b * noise.to(noisy)
    return torch.where(canvas.keep_mask.to(noisy.device), kept_pixels, noisy)


def build_sampler(
    bundle: Bundle, device: str = "auto", precision: str = "auto", autoencoder: str | None = None, decoded: bool = True
) -> ImageSampler:
    """Build the sampler of a generative model. If `decoded`, latents are decoded by `autoencoder`, a folder or name, or
    by the autoencoder of the run. Raises UsageError for an unavailable device or precision, and for latents without an
    autoencoder; UsageError and WeightsError as `Autoencoder` does."""
    task, channels = cast(Generation, bundle.task), bundle.model.config.channels  # `open_generator` rejects others
    sampler = ImageSampler(
        bundle.model,
        task.process,
        classes=len(task.classes),
        preprocess=bundle.preprocess,
        device=device,
        precision=precision,
    )
    autoencoder_source = (autoencoder or task.autoencoder) if decoded else ""
    if autoencoder_source:
        if not autoencoder and not autoencoder_source.startswith("hf:") and not Path(autoencoder_source).is_dir():
            problem = f"the autoencoder that the model was trained with is no longer at {autoencoder_source}"
            raise UsageError(problem, "set its new path: --vae FOLDER")
        decoder = Autoencoder(autoencoder_source, sampler.device)
        decoder.require_channels(channels)
        sampler.decode, sampler.stride = decoder.decode, decoder.latents.stride
    elif channels not in (1, 3) and decoded:
        raise UsageError(
            f"the model generates latents of {channels} channels, not pixels",
            "set the folder of their autoencoder: --vae FOLDER, or hf:stabilityai/sd-vae-ft-ema",
        )
    return sampler
