"""Generation: images made from noise."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from vitreous.errors import WeightsError
from vitreous.generation.process import Diffusion, Process, process_from_json, process_from_objective, process_to_json
from vitreous.tasks.base import Task


@dataclass(frozen=True)
class Generation(Task):
    """Images of named classes: `classes` in the order of their numbers, none where images are of one kind; `process`:
    how noise was added to the images that the model learned from; `autoencoder`: of what folder or `hf:` name these
    were latents, "" where they were not, or it is not known."""

    name: ClassVar[str] = "generation"
    does: ClassVar[str] = "makes images"
    hub_task: ClassVar[str] = "unconditional-image-generation"
    verb: ClassVar[str] = "sample"
    endpoint: ClassVar[str] = "sample"
    reads_images: ClassVar[bool] = False
    inspectable: ClassVar[bool] = False
    leading: ClassVar[str] = "frechet_distance"
    protocol: ClassVar[str] = "samples"

    classes: tuple[str, ...] = ()
    process: Process = field(default_factory=Diffusion)
    autoencoder: str = ""

    @classmethod
    def example_command(cls, run: str, clips: bool) -> str:
        """Eight samples in a file."""
        return f"vitreous sample {run} --count 8 --out samples.{'gif' if clips else 'png'}"

    def settings(self) -> dict[str, Any]:
        """The names of the classes, the process, and the autoencoder, if any."""
        latents = {"autoencoder": self.autoencoder} if self.autoencoder else {}
        return {"classes": list(self.classes), "process": process_to_json(self.process), **latents}

    @classmethod
    def from_settings(cls, description: dict[str, Any], classes: tuple[str, ...], origin: str) -> Self:
        """The generation of a description. Raises WeightsError for another process or autoencoder."""
        autoencoder = description.get("autoencoder", "")
        if not isinstance(autoencoder, str):
            raise WeightsError(f"{origin}: autoencoder {autoencoder}", "it is a folder or an hf: name")
        return cls(classes, process_from_json(description.get("process"), origin), autoencoder)

    @classmethod
    def from_run(cls, settings: dict[str, Any], classes: tuple[str, ...], origin: str) -> Self:
        """The generation of a run, whose objective has the fields of the process."""
        return cls(classes, process_from_objective(settings, origin), settings.get("autoencoder", ""))

    def get_version_fields(self) -> list[Any]:
        """No classes of images that are read, and the settings."""
        return [(), *super().get_version_fields()[1:], self.settings()]
