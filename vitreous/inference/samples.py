"""Sample images and clips of a generative model, as files, as a grid, or in memory."""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitreous.config import OptionalPath, apply_keyword_options
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.errors import DataError, UsageError, suggest_nearest
from vitreous.generation.samplers import SamplerState
from vitreous.generation.settings import SamplingOptions
from vitreous.inference.image_grid import (
    GIF,
    MP4,
    arrange_clip_grid,
    arrange_image_grid,
    array_to_frames,
    array_to_image,
    check_video_encoder,
    enlarge_small_images,
    square_grid_columns,
    write_clip,
)
from vitreous.inference.image_sampler import InpaintingCanvas, build_sampler
from vitreous.inference.open_model import open_generator
from vitreous.inference.sample_sizes import MAX_SAMPLE_FRAMES, choose_sample_size, format_sample_size
from vitreous.progress import NullListener, ProgressDisplay, ProgressListener
from vitreous.system.disk import atomic_path, make_write_error, write_text_atomic
from vitreous.system.torch_types import from_numpy
from vitreous.tasks.documents import SampleDocument
from vitreous.weights.bundle import Bundle

if TYPE_CHECKING:
    from vitreous.keywords import SampleKeywords

SAMPLING_CHUNK = 64  # images sampled and written at a time
MAX_SAMPLES = 1_000_000  # images per call
MAX_CLASS_GRID_ASPECT = 4  # largest ratio of columns to rows, or rows to columns, of a grid with one row per class
GRID_SUFFIXES = (".png", GIF, MP4)  # suffixes of grid files; other names are folders
SETTINGS_FILE = "samples.json"  # in a sample folder: the settings that the images depend on


@dataclass(frozen=True)
class SampleOptions(SamplingOptions):
    """Options of `sample`, in addition to the sampling options.

    `classes`: names, or indices if the model has no class names; empty: all classes in turn. `count`: total number of
    images, over the classes in turn; None: one per class. `to_seed`: interpolate the images of each class from `seed`
    to this seed, in as many steps as images. `inpaint`: an image file, which is kept except where the image in the file
    `mask` is white. `vae`: an autoencoder's folder or `hf:` name, which decodes latents. `size`, as in 64x48, is height
    and width in pixels, and `frames` the length of each clip; None: as in training. `device` and `precision` are as in
    `predict`. Raises UsageError for values out of range.
    """

    classes: tuple[str, ...] = ()
    count: int | None = None
    to_seed: int | None = None
    inpaint: OptionalPath = None
    mask: OptionalPath = None
    vae: OptionalPath = None
    size: str | None = None
    frames: int | None = None
    device: str = "auto"
    precision: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.count is not None and not 1 <= self.count <= MAX_SAMPLES:
            raise UsageError(f"--count must be 1 to {MAX_SAMPLES:,}, not {self.count}")
        if self.frames is not None and not 1 <= self.frames <= MAX_SAMPLE_FRAMES:
            raise UsageError(f"--frames must be 1 to {MAX_SAMPLE_FRAMES:,}, not {self.frames}")
        if bool(self.inpaint) != bool(self.mask):
            raise UsageError(
                "--inpaint and --mask must be set together",
                "set an image and a mask, which is white where the image is inpainted",
            )
        if self.to_seed is not None and ((self.count or 1) < 2 or self.to_seed < 0):
            raise UsageError(
                f"--to-seed {self.to_seed} needs at least 2 images, and a seed of at least 0",
                "use --count 2 or more, and seeds from 0",
            )


@dataclass(frozen=True, eq=False)
class Sample:
    """A generated image (H, W, C) uint8, or clip (T, H, W, C), with the name of its class, "" if unconditional, and its
    number within the class."""

    image: np.ndarray
    name: str
    number: int

    @property
    def to_pil(self) -> Image.Image:
        """Return the image as a PIL image. Raises UsageError unless it has 1 or 3 channels."""
        return array_to_image(self.image)

    @property
    def to_pil_frames(self) -> list[Image.Image]:
        """Return the T frames of a clip, or the single image, as PIL images. Raises UsageError unless it has 1 or 3
        channels."""
        return array_to_frames(self.image)


class Generator:
    """A generative model ready to sample images of `size` pixels, as in 64x48, or clips of `frames` frames (None: as in
    training). `vae` replaces the autoencoder of its run. `note` is called if the model was not trained at that size.
    Raises UsageError as `choose_sample_size` does, and the errors of `build_sampler`."""

    def __init__(
        self,
        bundle: Bundle,
        device: str = "auto",
        precision: str = "auto",
        vae: str | None = None,
        *,
        frames: int | None = None,
        size: str | None = None,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.bundle, self.classes = bundle, bundle.task.classes
        self.is_clip_model = bundle.preprocess.is_animated
        self.sampler = build_sampler(bundle, device, precision, vae)
        self.process = self.sampler.process
        self.sampler.image = choose_sample_size(bundle, size, frames, self.sampler.stride, note)
        self.generates_clips = self.is_clip_model and self.sampler.image[0] > 1

    @property
    def size(self) -> str:
        """The sample size in pixels: `64x48` for images, `8x64x48` for clips of 8 frames."""
        return format_sample_size(self.sampler.image, self.sampler.stride)

    def labels_of(self, names: Sequence[str]) -> list[int]:
        """Return the indices of classes by name, or of all classes if `names` is empty. Raises UsageError for an
        unknown name, and for any name if the model is unconditional."""
        if names and not self.classes:
            raise UsageError("the model is unconditional and has no classes", "leave --class out")
        for name in names:
            if name not in self.classes:
                hint = suggest_nearest(name, self.classes) or f"use one of {', '.join(self.classes[:20])}"
                raise UsageError(f"no class {name}", hint)
        return [self.classes.index(name) for name in names] or list(range(max(1, len(self.classes))))

    def pairs_of(self, labels: Sequence[int], options: SampleOptions) -> list[tuple[int, int]]:
        """List the requested images as (class, number) pairs, sorted by class: `count` images with the classes in turn,
        or one per class without a count. Raises UsageError if an interpolation would have unequal numbers of images per
        class."""
        count = options.count or len(labels)
        if options.to_seed is not None and (count % len(labels) or count < 2 * len(labels)):
            hint = f"use a multiple of {len(labels)} for --count, at least {2 * len(labels)}, or set --class"
            problem = f"--to-seed requires the same number of images, at least 2, for each of {len(labels)} classes"
            raise UsageError(f"{problem}, not {count} in total", hint)
        pairs_in_turn = [(labels[index % len(labels)], index // len(labels)) for index in range(count)]
        return [pair for label in dict.fromkeys(labels) for pair in pairs_in_turn if pair[0] == label]

    def generate(
        self,
        pairs: Sequence[tuple[int, int]],
        options: SampleOptions,
        on_images: Callable[[float], None] = lambda images: None,
        on_step: Callable[[slice, SamplerState], None] = lambda rows, state: None,
        canvas: InpaintingCanvas | None = None,
    ) -> Iterator[Sample]:
        """Yield the samples of (class, number) pairs, in order. The callbacks are those of `ImageSampler.sample`.
        `canvas` replaces the inpainting canvas that the options describe."""
        labels, sample_indices = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).unbind(1)
        canvas = canvas or self.load_canvas(options, len(pairs))
        noise = None if options.to_seed is None else self.interpolate_noise(labels, sample_indices, options)
        images = self.sampler.sample(
            labels, sample_indices, options, on_images=on_images, noise=noise, canvas=canvas, on_step=on_step
        )
        for (label, sample_index), image in zip(pairs, images.movedim(1, -1).numpy(), strict=True):
            yield Sample(image, self.classes[label] if self.classes else "", sample_index)

    def interpolate_noise(self, labels: Tensor, sample_indices: Tensor, options: SampleOptions) -> Tensor:
        """Interpolate the noise of `options.seed` and `options.to_seed` on the great circle: labels (n,) int64 and
        `sample_indices` (n,) int64, the steps of the interpolation -> noise (n, C, *image)."""
        zero_indices, end_seed = torch.zeros_like(sample_indices), options.to_seed or 0
        start_noise, end_noise = (
            self.sampler.draw_noise(labels, zero_indices, seed) for seed in (options.seed, end_seed)
        )
        fraction = (sample_indices / ((options.count or 2) - 1)).view(-1, *[1] * (start_noise.dim() - 1)).float()
        return slerp_noise(start_noise, end_noise, fraction)

    def load_canvas(self, options: SampleOptions, count: int) -> InpaintingCanvas | None:
        """Load the inpainting canvas that the options describe, for `count` images; None without inpainting. Raises
        DataError for files that are not images, UsageError for a mask of another size, for latents and for clips."""
        if not options.inpaint or not options.mask:
            return None
        preprocess = replace(self.bundle.preprocess, image=self.sampler.image)
        if self.is_clip_model:
            raise UsageError("--inpaint is for image models, not for clips", "leave --inpaint out")
        if self.sampler.decode is not None:
            raise UsageError("--inpaint is for pixel models, not for latents", "leave --inpaint out")
        image, mask = preprocess.decode(options.inpaint), ImagePreprocess(preprocess.image, 1).decode(options.mask)
        if not isinstance(image, Image.Image):
            raise DataError(f"{options.inpaint} is not an image", "set an image file with --inpaint")
        if image.size != mask.size:
            sizes = [" x ".join(map(str, source.size)) for source in (image, mask)]
            raise UsageError(f"the image has {sizes[0]} pixels, but its mask {sizes[1]}", "use a mask of the same size")
        return self.canvas_of(preprocess.to_array(image), preprocess.to_array(mask), count)

    def canvas_of(self, pixels: np.ndarray, mask: np.ndarray, count: int) -> InpaintingCanvas:
        """Build the inpainting canvas of `count` images from an image (C, H, W) and a mask (1, H, W), uint8 at the
        sample size. Pixels that are black in the mask are kept."""
        image = self.bundle.preprocess.normalise(from_numpy(pixels)[None])
        is_kept = from_numpy(mask)[None] < 128
        return InpaintingCanvas(image.expand(count, -1, -1, -1), is_kept.expand(count, -1, -1, -1))


def slerp_noise(start: Tensor, end: Tensor, fraction: Tensor) -> Tensor:
    """Interpolate noise (n, ...) spherically at fractions in 0..1; each point has the same distribution as the ends
    (arXiv:1609.04468)."""
    axes = tuple(range(1, start.dim()))
    cosine = (start * end).sum(axes, keepdim=True) / (
        start.square().sum(axes, keepdim=True) * end.square().sum(axes, keepdim=True)
    ).sqrt().clamp(min=1e-12)
    angle = cosine.clamp(-1 + 1e-6, 1 - 1e-6).acos()
    return ((1 - fraction) * angle).sin() / angle.sin() * start + (fraction * angle).sin() / angle.sin() * end


def sample(
    run: str | os.PathLike[str],
    out: str | os.PathLike[str],
    listener: ProgressListener | None = None,
    progress: bool = True,
    **options: Unpack[SampleKeywords],
) -> SampleDocument:
    """Generate images or clips, write them, and return the document of `vitreous sample --json`; `options` are the
    fields of `SampleOptions`.

    `out`: a .png file is a grid with the class below each image, or, of clips, with the frames of each in a row; a .gif
    or .mp4 file is an animated grid of clips. Images of less than 64 pixels are enlarged in a grid. Any other name is a
    folder, with CLASS-NUMBER.png per image or CLASS-NUMBER.gif per clip; existing files are skipped. Raises UsageError,
    WeightsError, DataError and ResourceError, each with a hint.
    """
    (sample_options,) = apply_keyword_options(
        "sample", dict(options), SampleOptions(), extra_names=("run", "out", "listener", "progress")
    )
    display = listener or (ProgressDisplay() if progress else NullListener())
    start_time, output_path = time.monotonic(), Path(out)
    bundle = open_generator(run, display.note)
    suffix = output_path.suffix.lower()
    check_sample_path(output_path, bundle.preprocess.is_animated)
    generator = Generator(
        bundle,
        sample_options.device,
        sample_options.precision,
        sample_options.vae,
        frames=sample_options.frames,
        size=sample_options.size,
        note=display.note,
    )
    labels = generator.labels_of(sample_options.classes)
    sample_options.resolve_sampler(generator.process)
    pairs = generator.pairs_of(labels, sample_options)
    sample_options = (
        replace(sample_options, count=len(pairs) // len(labels))
        if sample_options.to_seed is not None
        else sample_options
    )
    write = write_sample_grid if suffix in GRID_SUFFIXES else write_sample_folder
    try:
        files = write(output_path, generator, pairs, sample_options, display)
    except OSError as error:
        raise make_write_error(output_path, error) from None
    finally:
        if isinstance(display, ProgressDisplay) and listener is None:
            display.close()
    return {
        "run": os.fspath(run),
        "files": files,
        "classes": [generator.classes[label] for label in labels] if generator.classes else [],
        "count": len(pairs),
        "size": generator.size,
        "frames": generator.sampler.image[0] if generator.is_clip_model else None,
        "seeds": [sample_options.seed] + ([] if sample_options.to_seed is None else [sample_options.to_seed]),
        "guidance": sample_options.guidance,
        "sampler": sample_options.resolve_sampler(generator.process),
        "precision": generator.sampler.precision,
        "seconds": time.monotonic() - start_time,
    }


def check_sample_path(output_path: Path, clips: bool) -> None:
    """Raise UsageError for a path that samples cannot be written to, and for an animation of images; ResourceError if
    the video encoder is not installed."""
    suffix = output_path.suffix.lower()
    if suffix in (GIF, MP4) and not clips:
        raise UsageError(f"{output_path} is for clips, but the model generates images", "use a .png file, or a folder")
    if suffix not in GRID_SUFFIXES and output_path.is_file():
        suffixes = ".png, .gif or .mp4" if clips else ".png"
        raise UsageError(
            f"{output_path} is a file, not a folder", f"use a folder, or a file that ends in {suffixes} for a grid"
        )
    check_video_encoder(suffix)


def generate_with_progress(
    generator: Generator, pairs: Sequence[tuple[int, int]], options: SampleOptions, listener: ProgressListener
) -> Iterator[Sample]:
    """Yield the samples of (class, number) pairs, computed chunk by chunk, and report progress to the listener."""
    num_done = 0.0

    def add_progress(images: float) -> None:
        """Report the fraction of images that was done."""
        nonlocal num_done
        num_done += images
        listener.progress("sample", min(int(num_done), len(pairs)), len(pairs))

    chunk = max(1, SAMPLING_CHUNK // generator.sampler.image[0]) if generator.is_clip_model else SAMPLING_CHUNK
    for start in range(0, len(pairs), chunk):
        yield from generator.generate(pairs[start : start + chunk], options, add_progress)


def write_sample_grid(
    output_path: Path,
    generator: Generator,
    pairs: Sequence[tuple[int, int]],
    options: SampleOptions,
    listener: ProgressListener,
) -> list[str]:
    """Write all samples to one file: a grid image, or an animated grid of clips. The grid is about square, or has one
    row per class if that is not too elongated. An image of clips has the frames of each clip in a row. Raises
    OSError."""
    samples = list(generate_with_progress(generator, pairs, options, listener))
    images, captions = (
        [sample_item.to_pil_frames for sample_item in samples],
        [sample_item.name for sample_item in samples],
    )
    columns, suffix = choose_grid_columns(pairs), output_path.suffix.lower()
    captions = captions if any(captions) else []
    output_path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(output_path) as temporary:
        if suffix in (GIF, MP4):
            write_clip(temporary, suffix, arrange_clip_grid(images, columns, captions))
        else:
            all_frames = enlarge_small_images([frame for frames in images for frame in frames])
            length = len(images[0])
            frame_captions = [name if output_path == 0 else "" for name in captions for output_path in range(length)]
            arrange_image_grid(all_frames, length if generator.generates_clips else columns, frame_captions).save(
                temporary, "PNG"
            )
    return [os.fspath(output_path)]


def choose_grid_columns(pairs: Sequence[tuple[int, int]]) -> int:
    """Choose the number of columns of a grid of (class, number) pairs, which are sorted by class. The grid has one row
    per class if all classes have equally many images and the aspect is at most `MAX_CLASS_GRID_ASPECT`; else about as
    many columns as rows."""
    counts = Counter(label for label, _ in pairs)
    max_count, classes = max(counts.values()), len(counts)
    if (
        classes > 1
        and min(counts.values()) == max_count
        and 1 / MAX_CLASS_GRID_ASPECT <= max_count / classes <= MAX_CLASS_GRID_ASPECT
    ):
        return max_count
    return square_grid_columns(len(pairs))


def write_sample_folder(
    output_path: Path,
    generator: Generator,
    pairs: Sequence[tuple[int, int]],
    options: SampleOptions,
    listener: ProgressListener,
) -> list[str]:
    """Write each missing sample to a file of a folder: one image, or a GIF per clip (an image if it has one frame).
    Raises OSError, and UsageError for a folder of images with other settings."""
    output_path.mkdir(parents=True, exist_ok=True)
    excluded = ("classes", "count", "size", "frames")
    settings = {name: value for name, value in asdict(options).items() if name not in excluded}
    settings |= {"count": len(pairs)} if options.to_seed is not None else {}
    settings |= {"frames": generator.sampler.image[0]} if generator.is_clip_model else {}
    has_custom_size = generator.sampler.image[-2:] != tuple(generator.bundle.model.config.image[-2:])
    settings |= {"size": generator.size} if has_custom_size else {}
    settings = json.loads(json.dumps(settings | {"model": get_model_version(generator.bundle)}))
    settings_path = output_path / SETTINGS_FILE
    if settings_path.is_file() and json.loads(settings_path.read_text("utf-8")) != settings:
        raise UsageError(f"{output_path} has images with other settings ({settings_path})", "use another folder")
    write_text_atomic(settings_path, json.dumps(settings, indent=2) + "\n")
    stems = build_file_stems(generator.classes)
    suffix, noun = (GIF, "clips") if generator.generates_clips else (".png", "images")
    paths = {
        (label, sample_index): output_path / f"{stems[label]}-{sample_index:05d}{suffix}"
        for label, sample_index in pairs
    }
    missing_pairs = [pair for pair in pairs if not paths[pair].is_file()]
    if len(missing_pairs) < len(pairs):
        listener.note(f"{len(pairs) - len(missing_pairs):,} of {len(pairs):,} {noun} exist already")
    for pair, sample_item in zip(
        missing_pairs, generate_with_progress(generator, missing_pairs, options, listener), strict=True
    ):
        with atomic_path(paths[pair]) as temporary:
            if generator.generates_clips:
                write_clip(temporary, suffix, sample_item.to_pil_frames)
            else:
                sample_item.to_pil_frames[0].save(temporary, "PNG")
    return [os.fspath(path) for path in paths.values()]


def build_file_stems(classes: Sequence[str]) -> list[str]:
    """Build distinct file name stems of the classes from the characters that file systems allow."""
    stems = [re.sub(r"[^\w.-]+", "_", name).strip("._")[:80] or "class" for name in classes] or ["image"]
    return [f"{stem}-{index}" if stems.count(stem) > 1 else stem for index, stem in enumerate(stems)]


def get_model_version(bundle: Bundle) -> str:
    """Return the version in a model's card, which identifies weights and settings."""
    from vitreous.inference.card import build_card

    return build_card(bundle).version
