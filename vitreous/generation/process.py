"""Settings of noise processes, the forward processes that generative models reverse. Does not import PyTorch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from vitreous.errors import UsageError, WeightsError

Betas = Literal["linear", "cosine"]
Predicts = Literal["noise", "velocity"]


@dataclass(frozen=True)
class Diffusion:
    """Gaussian diffusion with `steps` time steps (arXiv:2006.11239): x_t = sqrt(a_t) x + sqrt(1 - a_t) e, t = 0 ..
    steps - 1.

    - `betas`: the variance added at each step is `linear`, from 1e-4 to 0.02 for 1000 steps, or `cosine`
      (arXiv:2102.09672, Eq. 17).
    - `predicts`: the model's target, the noise e, or the velocity sqrt(a_t) e - sqrt(1 - a_t) x (arXiv:2202.00512).

    Raises UsageError for fewer than two steps, and for betas above 1.
    """

    name: ClassVar[str] = "diffusion"
    steps: int = 1000
    betas: Betas = "linear"
    predicts: Predicts = "noise"

    def __post_init__(self) -> None:
        if self.steps < 2:
            raise UsageError(f"a diffusion requires at least 2 steps, got {self.steps}", "use 1000")
        if self.betas == "linear" and self.steps <= 20:
            raise UsageError(
                f"linear betas require more than 20 steps, got {self.steps}", "use more steps, or cosine betas"
            )


@dataclass(frozen=True)
class Flow:
    """Straight path from noise at time 0 to an image at time 1 (rectified flow, arXiv:2209.03003; SiT,
    arXiv:2401.08740): x_t = t x + (1 - t) e. The model's target is the velocity x - e.

    The model's time input is t times `scale` (1 in SiT's published weights).
    """

    name: ClassVar[str] = "flow"
    scale: float = 1000.0


Process = Diffusion | Flow
PROCESS_TYPES: dict[str, type[Process]] = {process_type.name: process_type for process_type in (Diffusion, Flow)}


def process_to_json(process: Process) -> dict[str, Any]:
    """Convert a process to a JSON object with its name and its settings."""
    return {"name": process.name, **vars(process)}


def process_from_json(process_json: Any, origin: str) -> Process:
    """Create a process from its JSON object. Raises WeightsError, with `origin` in its message, for an unknown process
    or invalid settings."""
    settings = dict(process_json) if isinstance(process_json, dict) else {}
    process_type = PROCESS_TYPES.get(str(settings.pop("name", None)))
    try:
        if process_type is None:
            raise ValueError("its name is not one of " + ", ".join(PROCESS_TYPES))
        return process_type(**settings)
    except (TypeError, ValueError, UsageError) as error:
        problem = f"{origin}: the noise process {process_json} is not supported ({error})"
        raise WeightsError(problem, "install a newer vitreous") from None


def process_from_objective(objective: dict[str, Any], origin: str) -> Process:
    """Create a process from an objective's config, ignoring keys of other settings. Raises the errors of
    `process_from_json`."""
    process_type = PROCESS_TYPES.get(str(objective.get("name")))
    names = {"name", *(field.name for field in fields(process_type))} if process_type else {"name"}
    return process_from_json({name: value for name, value in objective.items() if name in names}, origin)
