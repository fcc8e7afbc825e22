"""Sampling options of generative models. Does not import PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

from vitreous.errors import UsageError
from vitreous.generation.process import Diffusion, Flow, Process

MAX_GUIDANCE = 1000.0  # largest supported guidance scale
#: process -> sampler -> default number of steps; the first sampler is the default
DEFAULT_SAMPLER_STEPS: dict[type[Process], dict[str, int]] = {
    Diffusion: {"ddim": 50, "ddpm": 250, "dpm-solver": 20},
    Flow: {"heun": 25, "euler": 50},
}


@dataclass(frozen=True)
class SamplingOptions:
    """Sampling options.

    - `guidance`: the scale of classifier-free guidance; 1 for none.
    - `interval`: the range of the way from noise (0) to image (1) in which guidance applies.
    - `guided_channels`: number of first channels to which guidance applies (DiT's published code guides 3 of 4
      latents); None for all.
    - `sampler`, `steps`: None for the defaults of the process.
    - `seed`: the seed of the noise.

    Raises UsageError for values out of range.
    """

    guidance: float = 1.0
    interval: tuple[float, float] = (0.0, 1.0)
    guided_channels: int | None = None
    sampler: str | None = None
    steps: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        low, high = self.interval
        if not 0 <= low <= high <= 1:
            raise UsageError(
                f"--interval {low:g} {high:g} is not a range in 0 to 1", "use two numbers, 0 <= low <= high <= 1"
            )
        if not 0 <= self.guidance <= MAX_GUIDANCE:
            raise UsageError(
                f"--guidance must be from 0 to {MAX_GUIDANCE:g}, got {self.guidance:g}", "use 1 for no guidance"
            )
        if self.guided_channels is not None and self.guided_channels < 1:
            problem = f"the number of guided channels must be at least 1, got {self.guided_channels}"
            raise UsageError(problem, "use --guidance 1 for no guidance")
        if self.seed < 0:
            raise UsageError(f"--seed must be at least 0, got {self.seed}")

    def is_guided(self, progress: float) -> bool:
        """Return whether guidance applies when the fraction `progress` of the steps is finished, 0 to 1."""
        return self.guidance != 1 and self.interval[0] <= progress <= self.interval[1]

    def resolve_sampler(self, process: Process) -> tuple[str, int]:
        """Return sampler name and number of steps, with the defaults of the process for unset options.

        Raises UsageError for a sampler of another process, and for an unsupported number of steps.
        """
        samplers = DEFAULT_SAMPLER_STEPS[type(process)]
        name = self.sampler or next(iter(samplers))
        if name not in samplers:
            problem = f"--sampler {name} does not support models with a {process.name} process"
            raise UsageError(problem, f"use {' or '.join(samplers)}")
        if self.steps is None:
            return name, get_default_steps(process, name)
        max_steps = max_sampler_steps(process)
        if not 1 <= self.steps <= max_steps:
            problem = (
                f"--steps must be from 1 to {max_steps}, the steps of the model's {process.name}, got {self.steps}"
            )
            raise UsageError(problem, f"use 1 to {max_steps}")
        if name == "ddim":
            space_timesteps_by_stride(max_steps, self.steps)
        return name, self.steps


def cycle_classes(count: int, classes: int) -> list[tuple[int, int]]:
    """Return class and index within the class of each of `count` images, cycling through the classes: (0, 0), (1, 0),
    ..., (0, 1); class 0 for unconditional models."""
    return [(index % max(1, classes), index // max(1, classes)) for index in range(count)]


def max_sampler_steps(process: Process) -> int:
    """Return the largest number of sampler steps that the process supports."""
    return process.steps if isinstance(process, Diffusion) else 1000


def get_default_steps(process: Process, sampler: str) -> int:
    """Return the default number of steps of a sampler, or the largest supported number below it."""
    max_steps = max_sampler_steps(process)
    preferred = min(DEFAULT_SAMPLER_STEPS[type(process)][sampler], max_steps)
    # ddim requires a fixed stride (`space_timesteps_by_stride`): divide twice, rounding up
    return -(-max_steps // -(-max_steps // preferred)) if sampler == "ddim" else preferred


def space_timesteps_by_stride(steps: int, count: int) -> list[int]:
    """Select `count` of `steps` time steps from 0 on at a fixed stride: 0, 20, ..., 980 for 50 of 1000.

    The stride is the smallest that results in this count, as in `space_timesteps` of DiT's code. Raises UsageError if
    there is none, because sampling would start at a time step with less noise than its input.
    """
    stride = -(-steps // count)
    time_steps = list(range(0, steps, stride))
    if len(time_steps) != count or stride >= steps:
        strides = (max(1, min(steps - 1, stride)), max(1, stride - 1))
        supported_counts = sorted({-(-steps // candidate) for candidate in strides})
        raise UsageError(
            f"ddim cannot sample in {count} steps: no fixed stride divides {steps} time steps into {count}",
            f"use --steps {' or '.join(map(str, supported_counts))}, or --sampler ddpm",
        )
    return time_steps


def count_forward_passes(sampler: str, steps: int) -> int:
    """Count the forward passes per image: heun has two per step, except for the last step."""
    return 2 * steps - 1 if sampler == "heun" else steps
