"""Samplers, which generate images from noise step by step.

B batch, C channels, C' output channels of the model, S steps. All samplers have these arguments:

- `process`: the noise process; `noisy`: noise (B, C, *image); `steps`: the number of steps.
- `predict` returns the model's output (B, C', *image) for noisy images (B, C, *image), times (B,) float32 and the
  finished fraction of the steps, 0 to 1.
- `draw_noise` returns new noise (B, C, *image) for a step.
- `inpaint` receives the images after a step, and the coefficients a and b in x = a image + b noise. It returns the
  images for the next step, in which known regions can be replaced.

They yield the `SamplerState` after each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitreous.errors import UsageError, install_hint
from vitreous.generation.noising import GaussianDiffusion
from vitreous.generation.process import Diffusion, Flow
from vitreous.generation.settings import SamplingOptions, space_timesteps_by_stride

#: images (B, C, *image), times (B,), labels (B,) int64 -> (B, C', *image)
ModelFunction = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def guide_prediction(
    model_function: ModelFunction, labels: Tensor | None, null_label: int, options: SamplingOptions
) -> Callable[[Tensor, Tensor, float], Tensor]:
    """Return a function `predict` for samplers that applies classifier-free guidance: images (B, C, *image), times
    (B,), finished fraction of the steps -> (B, C', *image).

    The result is u + scale (c - u), of the outputs c for `labels` (B,) int64 and u for label `null_label`, computed in
    one batch; a scale of 1 is c. Guidance applies only to the image channels, or to the first `guided_channels` of
    them; variances are those for the class. Outside of `SamplingOptions.interval` (arXiv:2404.07724), u is not
    computed.
    """

    def predict_with_guidance(noisy: Tensor, time: Tensor, progress: float) -> Tensor:
        if labels is None or not options.is_guided(progress):
            return model_function(noisy, time, labels)
        batch_labels = torch.cat([labels, torch.full_like(labels, null_label)])
        conditional, unconditional = (
            model_function(noisy.repeat(2, *[1] * (noisy.dim() - 1)), time.repeat(2), batch_labels).float().chunk(2)
        )
        guided = slice(min(options.guided_channels or noisy.shape[1], noisy.shape[1]))
        conditional = conditional.clone()
        conditional[:, guided] = unconditional[:, guided] + options.guidance * (
            conditional[:, guided] - unconditional[:, guided]
        )
        return conditional

    return predict_with_guidance


GuidedModelFunction = Callable[[Tensor, Tensor, float], Tensor]
NoiseFunction = Callable[[int], Tensor]
InpaintFunction = Callable[[Tensor, float, float], Tensor]


class SamplerState(NamedTuple):
    """State after a step: the noisy images, and the current estimates of the clean images, (B, C, *image) each."""

    noisy: Tensor
    image: Tensor


def skip_inpainting(noisy: Tensor, a: float, b: float) -> Tensor:
    """Return the images (B, C, *image) unchanged; the default `inpaint`."""
    return noisy


def sample_ddpm(
    process: Diffusion,
    predict: GuidedModelFunction,
    noisy: Tensor,
    steps: int,
    draw_noise: NoiseFunction,
    inpaint: InpaintFunction = skip_inpainting,
) -> Iterator[SamplerState]:
    """Sample by ancestral sampling (arXiv:2006.11239, Algorithm 2) on evenly spaced time steps
    (`space_timesteps_evenly`), with the model's variance if it predicts one (arXiv:2102.09672). Yields states of
    (B, C, *image)."""
    return run_reverse_diffusion(
        GaussianDiffusion(process, space_timesteps_evenly(process.steps, steps)),
        predict,
        noisy=noisy,
        draw_noise=draw_noise,
        eta=None,
        inpaint=inpaint,
    )


def sample_ddim(
    process: Diffusion,
    predict: GuidedModelFunction,
    noisy: Tensor,
    steps: int,
    draw_noise: NoiseFunction,
    inpaint: InpaintFunction = skip_inpainting,
) -> Iterator[SamplerState]:
    """Sample by deterministic DDIM (arXiv:2010.02502, Eq. 12 with sigma 0) at a fixed stride, such as time steps 980,
    ..., 20, 0 for 50 steps of 1000.

    Yields states of (B, C, *image). Raises UsageError if no stride results in this number of steps.
    """
    return run_reverse_diffusion(
        GaussianDiffusion(process, space_timesteps_by_stride(process.steps, steps)),
        predict,
        noisy=noisy,
        draw_noise=draw_noise,
        eta=0.0,
        inpaint=inpaint,
    )


def run_reverse_diffusion(
    gaussian: GaussianDiffusion,
    predict: GuidedModelFunction,
    noisy: Tensor,
    draw_noise: NoiseFunction,
    eta: float | None,
    inpaint: InpaintFunction = skip_inpainting,
) -> Iterator[SamplerState]:
    """Run the reverse diffusion over the steps of `gaussian`, from the last to the first, and yield the state of
    (B, C, *image) after each.

    `eta` None is ancestral sampling: x = mean + std * noise of the posterior. Otherwise it is DDIM with, for a' the a_t
    of the previous time step:

        sigma = eta sqrt((1 - a') / (1 - a)) sqrt(1 - a / a')
        x = sqrt(a') image + sqrt(1 - a' - sigma^2) e + sigma noise
    """
    count = len(gaussian.times)
    for step_index, step in enumerate(range(count - 1, -1, -1)):
        batch_steps = torch.full((len(noisy),), step)
        time = gaussian.times[batch_steps].to(noisy.device, torch.float32)
        estimate = gaussian.estimate(predict(noisy, time, step_index / count), noisy, batch_steps)
        alpha, previous_alpha = float(gaussian.alphas_cumprod[step]), float(gaussian.previous_alphas_cumprod[step])
        if eta is None:
            noisy = gaussian.compute_posterior_mean(estimate.image, noisy, batch_steps)
            if step:
                noisy = noisy + (estimate.log_variance / 2).exp() * draw_noise(step_index)
        else:
            sigma = eta * ((1 - previous_alpha) / (1 - alpha)) ** 0.5 * (1 - alpha / previous_alpha) ** 0.5
            noisy = previous_alpha**0.5 * estimate.image + (1 - previous_alpha - sigma**2) ** 0.5 * estimate.noise
            if sigma:
                noisy = noisy + sigma * draw_noise(step_index)
        noisy = inpaint(noisy, previous_alpha**0.5, (1 - previous_alpha) ** 0.5)
        yield SamplerState(noisy, estimate.image)


def sample_dpm_solver(
    process: Diffusion,
    predict: GuidedModelFunction,
    noisy: Tensor,
    steps: int,
    draw_noise: NoiseFunction,
    inpaint: InpaintFunction = skip_inpainting,
) -> Iterator[SamplerState]:
    """Sample by DPM-Solver++(2M) of diffusers (arXiv:2211.01095), and yield the state of (B, C, *image) after each
    step.

    Raises UsageError if diffusers is not installed, and for inpainting, which the sampler does not support.
    """
    if inpaint is not skip_inpainting:
        raise UsageError("the sampler dpm-solver does not support inpainting", "use --sampler ddim")
    try:
        from diffusers.schedulers.scheduling_dpmsolver_multistep import DPMSolverMultistepScheduler
    except ImportError:
        raise UsageError(
            "the sampler dpm-solver requires diffusers, which is not installed",
            f"{install_hint('gen')}, or use --sampler ddim",
        ) from None
    gaussian = GaussianDiffusion(process)
    scheduler: Any = DPMSolverMultistepScheduler(
        num_train_timesteps=process.steps, trained_betas=gaussian.betas.numpy(), algorithm_type="dpmsolver++"
    )
    scheduler.set_timesteps(steps)
    for step_index, time in enumerate(scheduler.timesteps):
        batch_steps = torch.full((len(noisy),), int(time))
        estimate = gaussian.estimate(
            predict(noisy, batch_steps.to(noisy.device, torch.float32), step_index / steps), noisy, batch_steps
        )
        noisy = scheduler.step(estimate.noise, time, noisy).prev_sample
        yield SamplerState(noisy, estimate.image)


def sample_euler(
    process: Flow,
    predict: GuidedModelFunction,
    noisy: Tensor,
    steps: int,
    draw_noise: NoiseFunction,
    inpaint: InpaintFunction = skip_inpainting,
) -> Iterator[SamplerState]:
    """Sample a flow by Euler steps, x += v(x, t) / S from t = 0 to 1, and yield the state of (B, C, *image) after
    each."""
    for step_index in range(steps):
        progress, next_time = step_index / steps, (step_index + 1) / steps
        velocity = predict_velocity(process, predict, noisy, progress)
        noisy = inpaint(noisy + velocity / steps, next_time, 1 - next_time)
        yield SamplerState(noisy, noisy + (1 - next_time) * velocity)


def sample_heun(
    process: Flow,
    predict: GuidedModelFunction,
    noisy: Tensor,
    steps: int,
    draw_noise: NoiseFunction,
    inpaint: InpaintFunction = skip_inpainting,
) -> Iterator[SamplerState]:
    """Sample a flow by Heun's method, whose velocity is the mean of those before and after an Euler step, and yield the
    state of (B, C, *image) after each step.

    Each step has two forward passes, except for the last, which is an Euler step: at t = 1 there is no noise from which
    to predict a velocity (arXiv:2206.00364, Algorithm 1).
    """
    for step_index in range(steps):
        progress, next_time = step_index / steps, (step_index + 1) / steps
        velocity = predict_velocity(process, predict, noisy, progress)
        if step_index < steps - 1:
            velocity = (velocity + predict_velocity(process, predict, noisy + velocity / steps, next_time)) / 2
        noisy = inpaint(noisy + velocity / steps, next_time, 1 - next_time)
        yield SamplerState(noisy, noisy + (1 - next_time) * velocity)


def predict_velocity(process: Flow, predict: GuidedModelFunction, noisy: Tensor, time: float) -> Tensor:
    """Predict the velocity (B, C, *image) float32 of noisy images (B, C, *image) at a time from 0 to 1; variance
    channels of the output are dropped."""
    time_input = torch.full((len(noisy),), time * process.scale, device=noisy.device)
    return predict(noisy, time_input, time)[:, : noisy.shape[1]].float()


def space_timesteps_evenly(steps: int, count: int) -> list[int]:
    """Select `count` of `steps` time steps, evenly spaced from the first to the last: 0, 4, 8, ..., 995, 999.

    Fractional strides are accumulated and rounded, as in `space_timesteps` of DiT's code, whose rounding errors decide
    ties.
    """
    stride = (steps - 1) / max(count - 1, 1)
    return [round(position) for position in accumulate([stride] * (count - 1), initial=0.0)]


#: samplers by name; `DEFAULT_SAMPLER_STEPS` has the process and the default number of steps of each
SAMPLERS: dict[str, Callable[..., Iterator[SamplerState]]] = {
    "ddpm": sample_ddpm,
    "ddim": sample_ddim,
    "dpm-solver": sample_dpm_solver,
    "euler": sample_euler,
    "heun": sample_heun,
}
