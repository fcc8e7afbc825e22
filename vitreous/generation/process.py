"""Noise processes as frozen settings: the forward process that a generative model reverses. Does not import PyTorch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from vitreous.errors import UsageError, WeightsError

Betas = Literal["linear", "cosine"]
Predicts = Literal["noise", "velocity"]


@dataclass(frozen=True)
class Diffusion:
    """Gaussian noise in `steps` steps (arXiv:2006.11239): x_t = sqrt(a_t) x + sqrt(1 - a_t) e, t = 0 .. steps - 1.

    `betas`: the variance added at each step is `linear`, from 1e-4 to 0.02 for 1000 steps, or `cosine`
    (arXiv:2102.09672, Eq. 17). `predicts`: the model's target, the noise e, or the velocity sqrt(a_t) e - sqrt(1 - a_t)
    x (arXiv:2202.00512). Raises UsageError for fewer than two steps.
    """

    name: ClassVar[str] = "diffusion"
    steps: int = 1000
    betas: Betas = "linear"
    predicts: Predicts = "noise"

    def __post_init__(self) -> None:
        if self.steps < 2:
            raise UsageError(f"a diffusion needs at least 2 steps, not {self.steps}", "use 1000")
        if self.betas == "linear" and self.steps <= 20:
            raise UsageError(
                f"linear betas of {self.steps} steps would be above 1", "use more than 20 steps, or betas cosine"
            )


@dataclass(frozen=True)
class Flow:
    """A straight path from noise at time 0 to an image at time 1 (rectified flow, arXiv:2209.03003; SiT,
    arXiv:2401.08740): x_t = t x + (1 - t) e. The model's target is the velocity x - e.

    `scale`: the model's time input is t times this (1 in SiT's published weights).
    """

    name: ClassVar[str] = "flow"
    scale: float = 1000.0


Process = Diffusion | Flow
PROCESS_TYPES: dict[str, type[Process]] = {kind.name: kind for kind in (Diffusion, Flow)}


def process_to_json(process: Process) -> dict[str, Any]:
    """Return the process as JSON: its name and its settings."""
    return {"name": process.name, **vars(process)}


def process_from_json(process_json: Any, origin: str) -> Process:
    """Create a process from its JSON form. Raises WeightsError, which names `origin`, for an unknown process."""
    settings = dict(process_json) if isinstance(process_json, dict) else {}
    process_type = PROCESS_TYPES.get(str(settings.pop("name", None)))
    try:
        if process_type is None:
            raise ValueError("its name is not one of " + ", ".join(PROCESS_TYPES))
        return process_type(**settings)
    except (TypeError, ValueError, UsageError) as error:
        raise WeightsError(f"{origin}: process {process_json} ({error})", "install a newer vitreous") from None


def process_from_objective(objective: dict[str, Any], origin: str) -> Process:
    """Create a process from the config of an objective; other keys are ignored. Raises WeightsError, as
    `process_from_json` does."""
    process_type = PROCESS_TYPES.get(str(objective.get("name")))
    names = {"name", *(field.name for field in fields(process_type))} if process_type else {"name"}
    return process_from_json({name: value for name, value in objective.items() if name in names}, origin)
