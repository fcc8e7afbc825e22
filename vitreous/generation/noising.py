"""The arithmetic of noise: Gaussian diffusion (arXiv:2006.11239, arXiv:2102.09672) and rectified flow
(arXiv:2209.03003).

B batch; x an image with noise, (B, C, *image); a_t the product of 1 - beta over the steps up to t.
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
    """Images with noise, (B, C, *image), the time of each as a model is told it, (B,) float32, and what the model is
    asked for, (B, C, *image)."""

    images: Tensor
    time: Tensor
    target: Tensor


class DenoisingEstimate(NamedTuple):
    """What a model's answer says of an image with noise: the image and the noise in it, (B, C, *image) each, and the
    logarithm of the variance of a step back, which goes over it."""

    image: Tensor
    noise: Tensor
    log_variance: Tensor


class GaussianDiffusion:
    """A diffusion as tables of its steps, all (T,) float64; those of some `steps` alone (rising numbers) where a
    sampler leaves out others, with betas by which a_t is the same at these (arXiv:2102.09672, Eq. 19).

    `times` (T,) int64 is what the model is told of each step.
    """

    def __init__(self, process: Diffusion, steps: Sequence[int] | None = None) -> None:
        self.process = process
        whole = torch.cumprod(1 - compute_beta_schedule(process), 0)
        self.times = torch.arange(process.steps) if steps is None else torch.tensor(list(steps), dtype=torch.int64)
        self.alphas = whole[self.times]
        before = torch.cat([torch.ones(1, dtype=torch.float64), self.alphas[:-1]])
        self.before = before
        self.betas = 1 - self.alphas / before
        self.variance = self.betas * (1 - before) / (1 - self.alphas)  # of q(x_{t-1} | x_t, x), Eq. 7
        # the first step's is 0 and has no logarithm: as in DiT's code, the second's replaces it; of a single step, beta
        second = self.variance[1:2] if len(self.times) > 1 else self.betas
        self.log_variance = torch.cat([second, self.variance[1:]]).log()
        self.of_image = self.betas * before.sqrt() / (1 - self.alphas)
        self.of_noisy = (1 - before) * (1 - self.betas).sqrt() / (1 - self.alphas)
        self.log_betas = self.betas.log()
        self.copies: dict[tuple[int, torch.device], Tensor] = {}  # of tables, on devices that steps lie on

    def read(self, table: Tensor, step: Tensor, like: Tensor) -> Tensor:
        """(T,), (B,) int64 -> (B, 1, ..., 1) float32: the rows of a table, to go over (B, C, *image)."""
        if step.device.type != "cpu":
            place = (id(table), step.device)
            if place not in self.copies:
                self.copies[place] = table.float().to(step.device)
            return self.copies[place][step].view(-1, *[1] * (like.dim() - 1))
        return copy_to_device(table[step].float(), like.device).view(-1, *[1] * (like.dim() - 1))

    def add_noise(self, images: Tensor, noise: Tensor, step: Tensor) -> Tensor:
        """(B, C, *image), the same of noise, (B,) int64 -> (B, C, *image): Eq. 4."""
        alphas = self.read(self.alphas, step, images)
        return alphas.sqrt() * images + (1 - alphas).sqrt() * noise

    def target(self, images: Tensor, noise: Tensor, step: Tensor) -> Tensor:
        """(B, C, *image), the same of noise, (B,) int64 -> (B, C, *image): what the model is asked for."""
        if self.process.predicts == "noise":
            return noise
        alphas = self.read(self.alphas, step, images)
        return alphas.sqrt() * noise - (1 - alphas).sqrt() * images

    def moment(self, done: float, count: int) -> Tensor:
        """(B,) int64 steps of `count` images, so much of the way from noise (0) to the image (1)."""
        return torch.full((count,), int((1 - done) * self.process.steps))

    def make_noisy_batch(self, images: Tensor, noise: Tensor, step: Tensor) -> NoisyBatch:
        """(B, C, *image), the same of noise, (B,) int64 -> the images with noise, and what a model is to say of
        them."""
        time = copy_to_device(self.times[step].float(), images.device)
        return NoisyBatch(self.add_noise(images, noise, step), time, self.target(images, noise, step))

    def estimate(self, answer: Tensor, noisy: Tensor, step: Tensor) -> DenoisingEstimate:
        """(B, C or 2 C, *image), (B, C, *image), (B,) int64 -> what the answer says.

        Of an answer with twice the channels the second half v says where between its bounds the variance lies
        (arXiv:2102.09672, Eq. 15): exp(f log beta + (1 - f) log beta~), f = (v + 1) / 2. Else it is beta~.
        """
        channels = noisy.shape[1]
        predicted, noisy = answer[:, :channels].float(), noisy.float()
        alphas = self.read(self.alphas, step, noisy)
        a, b = alphas.sqrt(), (1 - alphas).sqrt()
        if self.process.predicts == "noise":
            image, noise = (noisy - b * predicted) / a, predicted
        else:
            image, noise = a * noisy - b * predicted, a * predicted + b * noisy
        least = self.read(self.log_variance, step, noisy)
        if answer.shape[1] == channels:
            return DenoisingEstimate(image, noise, least)
        most = self.read(self.log_betas, step, noisy)
        share = (answer[:, channels:].float() + 1) / 2
        return DenoisingEstimate(image, noise, share * most + (1 - share) * least)

    def mean(self, image: Tensor, noisy: Tensor, step: Tensor) -> Tensor:
        """(B, C, *image) of an image and of it with noise, (B,) int64 -> (B, C, *image): the mean of one step back,
        Eq. 7."""
        return self.read(self.of_image, step, image) * image + self.read(self.of_noisy, step, image) * noisy

    def variational_bound(self, answer: Tensor, images: Tensor, noisy: Tensor, step: Tensor) -> Tensor:
        """(B, 2 C, *image), (B, C, *image) twice, (B,) int64 -> (B,): a term of the variational bound, in bits for each
        number of the image; its gradient goes to the variance alone (arXiv:2102.09672, section 3.1).

            step 0:      -log2 p(x | x_0), of a Gaussian cut at the borders of 256 grey values, by DiT's approximation
            other steps: KL(q(x_{t-1} | x_t, x) || p(x_{t-1} | x_t)) / ln 2
        """
        channels = images.shape[1]
        answer = torch.cat([answer[:, :channels].detach(), answer[:, channels:]], 1)
        estimate = self.estimate(answer, noisy, step)
        mean = self.mean(estimate.image, noisy.float(), step)
        true_mean = self.mean(images.float(), noisy.float(), step)
        true_log = self.read(self.log_variance, step, images)
        kl = gaussian_kl(true_mean, true_log, mean, estimate.log_variance)
        first = -discretised_log_likelihood(images.float(), mean, estimate.log_variance / 2)
        at_first = copy_to_device(step == 0, images.device).view(-1, *[1] * (images.dim() - 1))
        return torch.where(at_first, first, kl).flatten(1).mean(1) / math.log(2)


def compute_beta_schedule(process: Diffusion) -> Tensor:
    """(T,) float64: the variance that each step adds."""
    steps = process.steps
    if process.betas == "linear":
        return torch.linspace(0.1 / steps, 20 / steps, steps, dtype=torch.float64)
    ends = torch.arange(steps + 1, dtype=torch.float64) / steps
    left = ((ends + 0.008) / 1.008 * math.pi / 2).cos().square()
    return (1 - left[1:] / left[:-1]).clamp(max=0.999)


def gaussian_kl(mean: Tensor, log_variance: Tensor, other: Tensor, other_log: Tensor) -> Tensor:
    """(B, C, *image) four times -> (B, C, *image): KL(N(mean, exp(log_variance)) || N(other, exp(other_log))), nats."""
    return 0.5 * (
        other_log - log_variance - 1 + (log_variance - other_log).exp() + (mean - other).square() * (-other_log).exp()
    )


def discretised_log_likelihood(images: Tensor, mean: Tensor, log_deviation: Tensor) -> Tensor:
    """(B, C, *image) three times -> (B, C, *image): log of what a Gaussian leaves between the borders of a grey value
    in [-1, 1]; the outermost values reach to infinity (arXiv:2006.11239, Eq. 13)."""
    scale = (-log_deviation).exp()
    above = approximate_normal_cdf(scale * (images - mean + 1 / 255))
    below = approximate_normal_cdf(scale * (images - mean - 1 / 255))
    inside = torch.where(images > 0.999, 1 - below, above - below)
    return torch.where(images < -0.999, above, inside).clamp(min=1e-12).log()


def approximate_normal_cdf(x: Tensor) -> Tensor:
    """(B, C, *image) -> (B, C, *image): approximate the standard normal distribution function by a hyperbolic tangent,
    to within 3e-4, as DiT's code does."""
    return 0.5 * (1 + torch.tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * x**3)))


class RectifiedFlow:
    """A flow: x_t = t x + (1 - t) e, for times t of 0 to 1."""

    def __init__(self, process: Flow) -> None:
        self.process = process

    def moment(self, done: float, count: int) -> Tensor:
        """(B,) float32 times of `count` images, so much of the way from noise (0) to the image (1)."""
        return torch.full((count,), done)

    def make_noisy_batch(self, images: Tensor, noise: Tensor, time: Tensor) -> NoisyBatch:
        """(B, C, *image), the same of noise, (B,) float -> the images with noise, and what a model is to say of them:
        the velocity x - e."""
        time = copy_to_device(time.float(), images.device)
        share = time.view(-1, *[1] * (images.dim() - 1))
        return NoisyBatch(share * images + (1 - share) * noise, time * self.process.scale, images - noise)
