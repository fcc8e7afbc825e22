"""Noise processes: Gaussian diffusion (arXiv:2006.11239, arXiv:2102.09672) and rectified flow (arXiv:2209.03003).

B batch, C channels, T time steps. x is a clean image, x_t a noisy image, e noise, each (B, C, *image); a_t is the
product of 1 - beta over the steps up to t.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vitreous.generation.process import Diffusion, Flow
from vitreous.system.machine import copy_to_device


class NoisyBatch(NamedTuple):
    """Input and target of a generative model: noisy images (B, C, *image), the model's time input (B,) float32, and the
    model's target (B, C, *image)."""

    images: Tensor
    time: Tensor
    target: Tensor


class DenoisingEstimate(NamedTuple):
    """A model's estimate for a noisy image: the clean image and its noise, (B, C, *image) each, and the log variance of
    the reverse step, broadcastable to the image."""

    image: Tensor
    noise: Tensor
    log_variance: Tensor


class GaussianDiffusion:
    """Diffusion process with precomputed tables, all (T,) float64.

    `steps` is an ascending subset of the time steps, for samplers with fewer steps: betas are adapted so that a_t does
    not change at these steps (arXiv:2102.09672, Eq. 19). `times` (T,) int64 is the model's time input for each step.
    """

    def __init__(self, process: Diffusion, steps: Sequence[int] | None = None) -> None:
        self.process = process
        all_alphas_cumprod = torch.cumprod(1 - compute_beta_schedule(process), 0)
        self.times = torch.arange(process.steps) if steps is None else torch.tensor(list(steps), dtype=torch.int64)
        self.alphas_cumprod = all_alphas_cumprod[self.times]
        previous_alphas_cumprod = torch.cat([torch.ones(1, dtype=torch.float64), self.alphas_cumprod[:-1]])
        self.previous_alphas_cumprod = previous_alphas_cumprod
        self.betas = 1 - self.alphas_cumprod / previous_alphas_cumprod
        self.variance = (
            self.betas * (1 - previous_alphas_cumprod) / (1 - self.alphas_cumprod)
        )  # of the posterior, Eq. 7
        # the variance of the first step is 0 and has no logarithm: it is replaced by that of the second step, as in
        # DiT's code, or by beta for a single step
        first_variance = self.variance[1:2] if len(self.times) > 1 else self.betas
        self.log_variance = torch.cat([first_variance, self.variance[1:]]).log()
        self.of_image = self.betas * previous_alphas_cumprod.sqrt() / (1 - self.alphas_cumprod)
        self.of_noisy = (1 - previous_alphas_cumprod) * (1 - self.betas).sqrt() / (1 - self.alphas_cumprod)
        self.log_betas = self.betas.log()
        self.copies: dict[tuple[int, torch.device], Tensor] = {}  # (id of a table, device) -> its float32 copy there

    def gather_steps(self, table: Tensor, step: Tensor, reference: Tensor) -> Tensor:
        """Select the entries of a table (T,) at steps (B,) int64, for broadcasting: (B, 1, ..., 1) float32, on the
        device and with the number of axes of `reference` (B, C, *image)."""
        if step.device.type != "cpu":
            key = (id(table), step.device)
            if key not in self.copies:
                self.copies[key] = table.float().to(step.device)
            return self.copies[key][step].view(-1, *[1] * (reference.dim() - 1))
        return copy_to_device(table[step].float(), reference.device).view(-1, *[1] * (reference.dim() - 1))

    def add_noise(self, images: Tensor, noise: Tensor, step: Tensor) -> Tensor:
        """Add noise (B, C, *image) to images (B, C, *image) at steps (B,) int64 (arXiv:2006.11239, Eq. 4)."""
        alphas = self.gather_steps(self.alphas_cumprod, step, images)
        return alphas.sqrt() * images + (1 - alphas).sqrt() * noise

    def make_target(self, images: Tensor, noise: Tensor, step: Tensor) -> Tensor:
        """Compute the model's target (B, C, *image), noise or velocity, for images and noise (B, C, *image) at steps
        (B,) int64."""
        if self.process.predicts == "noise":
            return noise
        alphas = self.gather_steps(self.alphas_cumprod, step, images)
        return alphas.sqrt() * noise - (1 - alphas).sqrt() * images

    def time_at_progress(self, progress: float, count: int) -> Tensor:
        """Return the time step (count,) int64, equal for all images, at `progress` from noise (0) to image (1)."""
        return torch.full((count,), int((1 - progress) * self.process.steps))

    def make_noisy_batch(self, images: Tensor, noise: Tensor, step: Tensor) -> NoisyBatch:
        """Create noisy images and the model's targets from images and noise (B, C, *image) and steps (B,) int64."""
        time = copy_to_device(self.times[step].float(), images.device)
        return NoisyBatch(self.add_noise(images, noise, step), time, self.make_target(images, noise, step))

    def estimate(self, output: Tensor, noisy: Tensor, step: Tensor) -> DenoisingEstimate:
        """Estimate the clean image and the noise from a model's output (B, C or 2 C, *image) for noisy images
        (B, C, *image) at steps (B,) int64.

        If the output has 2 C channels, its second half v interpolates the log variance between its bounds
        (arXiv:2102.09672, Eq. 15): exp(f log beta + (1 - f) log beta~), f = (v + 1) / 2. Otherwise the variance is
        beta~, that of the posterior.
        """
        channels = noisy.shape[1]
        predicted, noisy = output[:, :channels].float(), noisy.float()
        alphas = self.gather_steps(self.alphas_cumprod, step, noisy)
        image_scale, noise_scale = alphas.sqrt(), (1 - alphas).sqrt()
        if self.process.predicts == "noise":
            image, noise = (noisy - noise_scale * predicted) / image_scale, predicted
        else:
            image = image_scale * noisy - noise_scale * predicted
            noise = image_scale * predicted + noise_scale * noisy
        min_log_variance = self.gather_steps(self.log_variance, step, noisy)
        if output.shape[1] == channels:
            return DenoisingEstimate(image, noise, min_log_variance)
        max_log_variance = self.gather_steps(self.log_betas, step, noisy)
        fraction = (output[:, channels:].float() + 1) / 2
        return DenoisingEstimate(image, noise, fraction * max_log_variance + (1 - fraction) * min_log_variance)

    def compute_posterior_mean(self, image: Tensor, noisy: Tensor, step: Tensor) -> Tensor:
        """Compute the mean (B, C, *image) of the posterior q(x_{t-1} | x_t, x) from clean and noisy images
        (B, C, *image) at steps (B,) int64 (arXiv:2006.11239, Eq. 7)."""
        return (
            self.gather_steps(self.of_image, step, image) * image
            + self.gather_steps(self.of_noisy, step, image) * noisy
        )

    def variational_bound(self, output: Tensor, images: Tensor, noisy: Tensor, step: Tensor) -> Tensor:
        """Compute a term of the variational bound (B,), in bits per image value, of which only the variance gets
        gradients (arXiv:2102.09672, section 3.1).

        Inputs are an output (B, 2 C, *image), clean and noisy images (B, C, *image), and steps (B,) int64.

            step 0:      -log2 p(x | x_0), of a Gaussian discretised to the 256 grey values, by DiT's approximation
            other steps: KL(q(x_{t-1} | x_t, x) || p(x_{t-1} | x_t)) / ln 2
        """
        channels = images.shape[1]
        output = torch.cat([output[:, :channels].detach(), output[:, channels:]], 1)
        estimate = self.estimate(output, noisy, step)
        mean = self.compute_posterior_mean(estimate.image, noisy.float(), step)
        true_mean = self.compute_posterior_mean(images.float(), noisy.float(), step)
        true_log_variance = self.gather_steps(self.log_variance, step, images)
        kl = gaussian_kl(true_mean, true_log_variance, mean, estimate.log_variance)
        first_step_nll = -discretised_log_likelihood(images.float(), mean, estimate.log_variance / 2)
        is_first_step = copy_to_device(step == 0, images.device).view(-1, *[1] * (images.dim() - 1))
        return torch.where(is_first_step, first_step_nll, kl).flatten(1).mean(1) / math.log(2)


def compute_beta_schedule(process: Diffusion) -> Tensor:
    """Compute beta, the variance added at each step: (T,) float64."""
    steps = process.steps
    if process.betas == "linear":
        return torch.linspace(0.1 / steps, 20 / steps, steps, dtype=torch.float64)
    fractions = torch.arange(steps + 1, dtype=torch.float64) / steps
    alphas_cumprod = ((fractions + 0.008) / 1.008 * math.pi / 2).cos().square()
    return (1 - alphas_cumprod[1:] / alphas_cumprod[:-1]).clamp(max=0.999)


def gaussian_kl(mean: Tensor, log_variance: Tensor, other_mean: Tensor, other_log_variance: Tensor) -> Tensor:
    """Compute KL(N(mean, exp(log_variance)) || N(other_mean, exp(other_log_variance))) in nats, elementwise over
    (B, C, *image)."""
    return 0.5 * (
        other_log_variance
        - log_variance
        - 1
        + (log_variance - other_log_variance).exp()
        + (mean - other_mean).square() * (-other_log_variance).exp()
    )


def discretised_log_likelihood(images: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Compute the log probability of grey values in [-1, 1] under a Gaussian, elementwise over (B, C, *image).

    The intervals of the smallest and the largest value extend to infinity (arXiv:2006.11239, Eq. 13).
    """
    scale = (-log_std).exp()
    cdf_above = approximate_normal_cdf(scale * (images - mean + 1 / 255))
    cdf_below = approximate_normal_cdf(scale * (images - mean - 1 / 255))
    probability = torch.where(images > 0.999, 1 - cdf_below, cdf_above - cdf_below)
    return torch.where(images < -0.999, cdf_above, probability).clamp(min=1e-12).log()


def approximate_normal_cdf(x: Tensor) -> Tensor:
    """Approximate the standard normal distribution function, elementwise over (B, C, *image), by a hyperbolic tangent
    with an error below 3e-4, as in DiT's code."""
    return 0.5 * (1 + torch.tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * x**3)))


class RectifiedFlow:
    """Rectified flow process: x_t = t x + (1 - t) e, for times t from 0 (noise) to 1 (image)."""

    def __init__(self, process: Flow) -> None:
        self.process = process

    def time_at_progress(self, progress: float, count: int) -> Tensor:
        """Return the time (count,) float32, equal for all images, at `progress` from noise (0) to image (1)."""
        return torch.full((count,), progress)

    def make_noisy_batch(self, images: Tensor, noise: Tensor, time: Tensor) -> NoisyBatch:
        """Create noisy images and the model's targets, the velocity x - e, from images and noise (B, C, *image) and
        times (B,) float."""
        time = copy_to_device(time.float(), images.device)
        image_fraction = time.view(-1, *[1] * (images.dim() - 1))
        return NoisyBatch(
            image_fraction * images + (1 - image_fraction) * noise, time * self.process.scale, images - noise
        )
