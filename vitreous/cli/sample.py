"""vitreous sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from vitreous.cli.console import Console
from vitreous.weights.options import WeightsOptions


@dataclass(frozen=True, kw_only=True)
class Options(WeightsOptions):
    """Images, or clips, of a model that makes them.

    Example: vitreous sample runs/pets --class cat --count 16 --guidance 2 --out cats.png
    """

    run: Annotated[Positional[str], arg(metavar="RUN")]
    """A run folder, a bundle, or weights in another library's format."""
    out: Annotated[str, arg(metavar="PLACE")]
    """A .png file for a grid, with the class below each image; of clips a .gif or .mp4 file, or a .png with the frames
    of each in a row. Or a folder for CLASS-00000.png, or .gif, and so on, where what is there is not made again."""
    classes: Annotated[tuple[str, ...], arg(name="class", metavar="NAME...")] = ()
    """What to make images of (default: each class of the model)."""
    count: int | None = None
    """Images in total, of the classes in turn (default: one of each class)."""
    guidance: float = 1.0
    """How far answers are moved away from those for no class: above 1 images are more typical and less varied."""
    interval: tuple[float, float] = (0.0, 1.0)
    """The part of the way from noise (0) to image (1) on which guidance is used."""
    guided_channels: int | None = None
    """Guide only so many of the first channels; DiT's published code guides 3 of 4 latents (default: all)."""
    sampler: Literal["ddim", "ddpm", "dpm-solver", "heun", "euler"] | None = None
    """How noise is taken away (default: ddim for a diffusion, heun for a flow; dpm-solver needs the extra `gen`)."""
    steps: int | None = None
    """In how many steps (default: 50 of ddim, 250 of ddpm, 25 of heun)."""
    size: Annotated[str | None, arg(metavar="HEIGHTxWIDTH")] = None
    """In pixels, as in 64x48 (default: that which the model learned from, or most of it)."""
    frames: int | None = None
    """Of each clip (default: as many as the model learned from)."""
    seed: int = 0
    """What noise is drawn from: an image is a function of it, of its class and of its number."""
    to_seed: int | None = None
    """Go from the image of --seed to that of another seed, in as many images as --count gives each class."""
    inpaint: str | None = None
    """An image file that stays as it is but where --mask is white."""
    mask: str | None = None
    """A picture of the same size as --inpaint."""
    vae: str | None = None
    """Of a model of latents: the folder, or hf: name, of the autoencoder that decodes them. Needs the extra `gen`."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1 or mps."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Numbers to compute with; auto is bf16 where the device has it, else fp32."""


def run(options: Options, console: Console) -> dict[str, Any]:
    """Make images and write them."""
    from dataclasses import fields

    from vitreous.inference.samples import SampleOptions, sample

    asked = {one.name: getattr(options, one.name) for one in fields(SampleOptions)}
    document: dict[str, Any] = {**sample(options.source(options.run), options.out, console, **asked)}
    files, (name, steps) = document["files"], document["sampler"]
    rate = f"{document['seconds']:.1f} s, {name} in {steps} steps, {document['precision']}"
    count = document["count"]
    is_picture = document["frames"] in (None, 1)
    noun = ("image" if is_picture else "clip") + "s" * (count > 1)
    length = "" if is_picture else f" of {document['frames']} frames"
    length += f" at {'x'.join(document['size'].split('x')[-2:])} pixels"
    console.say(f"{options.out}: {count:,} {noun}{length} in {rate}")
    if len(files) > 1:
        console.say(f"{files[0]} … {files[-1]}")
    return document
