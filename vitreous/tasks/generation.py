"""The task of image generation: sampling images from noise."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from vitreous.errors import WeightsError
from vitreous.generation.process import Diffusion, Process, process_from_json, process_from_objective, process_to_json
from vitreous.tasks.base import Task


@dataclass(frozen=True)
class Generation(Task):
    """The task of a generative model.

    `classes` are in the order of their indices, and empty for an unconditional model. `process` is the noise process of
    the training. `autoencoder` is the folder or `hf:` name of the autoencoder of the latents; "" for a pixel-space
    model, or if it is not known.
    """

    name: ClassVar[str] = "generation"
    verb_phrase: ClassVar[str] = "generates images"
    hub_task: ClassVar[str] = "unconditional-image-generation"
    verb: ClassVar[str] = "sample"
    endpoint: ClassVar[str] = "sample"
    reads_images: ClassVar[bool] = False
    inspectable: ClassVar[bool] = False
    primary: ClassVar[str] = "frechet_distance"
    protocol: ClassVar[str] = "samples"

    classes: tuple[str, ...] = ()
    process: Process = field(default_factory=Diffusion)
    autoencoder: str = ""

    @classmethod
    def example_command(cls, run: str, clips: bool) -> str:
        """Return a command that samples eight images to a file."""
        return f"vitreous sample {run} --count 8 --out samples.{'gif' if clips else 'png'}"

    def settings(self) -> dict[str, Any]:
        """Return the class names, the noise process, and the autoencoder if there is one, by their keys in files."""
        latents = {"autoencoder": self.autoencoder} if self.autoencoder else {}
        return {"classes": list(self.classes), "process": process_to_json(self.process), **latents}

    @classmethod
    def from_settings(cls, settings: dict[str, Any], classes: tuple[str, ...], origin: str) -> Self:
        """Create a generation task from stored settings. Raises WeightsError for an invalid noise process or
        autoencoder."""
        autoencoder = settings.get("autoencoder", "")
        if not isinstance(autoencoder, str):
            raise WeightsError(
                f"{origin}: invalid autoencoder {autoencoder}", "autoencoder must be a folder or an hf: name"
            )
        return cls(classes, process_from_json(settings.get("process"), origin), autoencoder)

    @classmethod
    def from_run(cls, settings: dict[str, Any], classes: tuple[str, ...], origin: str) -> Self:
        """Create the generation task of an unfinished run, whose objective has the fields of the noise process. Raises
        WeightsError if they are invalid."""
        return cls(classes, process_from_objective(settings, origin), settings.get("autoencoder", ""))

    def get_version_fields(self) -> list[Any]:
        """Return the values that samples depend on: the settings. The first value, the classes of predictions, is
        empty."""
        return [(), *super().get_version_fields()[1:], self.settings()]
