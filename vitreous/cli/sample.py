"""The verb `vitreous sample`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from tyro.conf import Positional, arg

from vitreous.cli.console import Console
from vitreous.weights.options import WeightsOptions


@dataclass(frozen=True, kw_only=True)
class Options(WeightsOptions):
    """Generate images or clips with a generative model.

    Example: vitreous sample runs/pets --class cat --count 16 --guidance 2 --out cats.png
    """

    SECTIONS: ClassVar[dict[str, str]] = {
        "out": "Images",
        "guidance": "Sampling",
        "inpaint": "Inpainting",
        "vae": "Device and decoder",
    }

    run: Annotated[Positional[str], arg(metavar="RUN")]
    """A run folder, a bundle, or weights of a supported format."""
    out: Annotated[str, arg(metavar="PATH")]
    """Output: a .png file for a grid of labelled images; for clips a .gif or .mp4 file, or a .png file with one row of
    frames per clip; or a folder for CLASS-00000.png (or .gif) and so on. Images that a folder already contains are not
    generated again."""
    classes: Annotated[tuple[str, ...], arg(name="class", metavar="NAME...")] = ()
    """Classes to generate (default: every class of the model)."""
    count: int | None = None
    """Total number of images, cycling through the classes (default: one per class)."""
    guidance: float = 1.0
    """Classifier-free guidance scale; values above 1 give more typical and less varied images."""
    interval: tuple[float, float] = (0.0, 1.0)
    """Apply guidance only between these points of sampling, from noise (0) to image (1)."""
    guided_channels: int | None = None
    """Apply guidance to the first channels only; the published DiT code guides 3 of 4 latent channels (default:
    all)."""
    sampler: Literal["ddim", "ddpm", "dpm-solver", "heun", "euler"] | None = None
    """Sampler (default: ddim for diffusion, heun for flow matching; dpm-solver needs the extra `gen`)."""
    steps: int | None = None
    """Sampling steps (default: ddim 50, ddpm 250, heun 25)."""
    size: Annotated[str | None, arg(metavar="HEIGHTxWIDTH")] = None
    """Image size in pixels, such as 64x48 (default: the size most used in training)."""
    frames: int | None = None
    """Frames per clip (default: as in training)."""
    seed: int = 0
    """Seed of the noise; an image depends only on seed, class and its number."""
    to_seed: int | None = None
    """Interpolate from the noise of --seed to that of this seed; --count is the number of images per class."""
    inpaint: str | None = None
    """Image to inpaint; only the white area of --mask is generated."""
    mask: str | None = None
    """Mask of the same size as --inpaint."""
    vae: str | None = None
    """Latent models: folder or hf: name of the autoencoder that decodes the latents; needs the extra `gen`."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1 or mps."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Compute dtype. auto is bf16 if the device supports it, else fp32."""


def run(options: Options, console: Console) -> dict[str, Any]:
    """Generate images or clips, write them, and print their number and the duration."""
    from dataclasses import fields

    from vitreous.inference.samples import SampleOptions, sample

    sample_options = {field.name: getattr(options, field.name) for field in fields(SampleOptions)}
    document: dict[str, Any] = {**sample(options.source(options.run), options.out, console, **sample_options)}
    files, (name, steps) = document["files"], document["sampler"]
    summary = f"{document['seconds']:.1f} s, {name} in {steps} steps, {document['precision']}"
    count = document["count"]
    is_image = document["frames"] in (None, 1)
    noun = ("image" if is_image else "clip") + "s" * (count > 1)
    length = "" if is_image else f" of {document['frames']} frames"
    length += f" at {'x'.join(document['size'].split('x')[-2:])} pixels"
    console.print_line(f"{options.out}: {count:,} {noun}{length} in {summary}")
    if len(files) > 1:
        console.print_line(f"{files[0]} … {files[-1]}")
    return document
