"""Choose the size of generated images or clips: the requested size, or a training size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vitreous.errors import UsageError
from vitreous.nn.sizes import nearest_divisible_size
from vitreous.weights.bundle import Bundle

MAX_SAMPLE_SIDE, MAX_SAMPLE_FRAMES = 8192, 4096  # pixels, and frames of a clip
MAX_LISTED_SIZES = 12  # sizes listed in a note


def list_training_sizes(bundle: Bundle) -> tuple[tuple[int, ...], ...]:
    """List the image sizes that a generative model was trained at, in pixels or latent positions; the default size
    comes first."""
    default_size = tuple(bundle.model.config.image)
    return (default_size, *(size for size in bundle.preprocess.buckets if size != default_size))


def choose_sample_size(
    bundle: Bundle,
    size: str | None = None,
    frames: int | None = None,
    stride: int = 1,
    note: Callable[[str], None] = lambda text: None,
) -> tuple[int, ...]:
    """Choose the sample size, one length per axis, in pixels or latent positions of `stride` pixels.

    The first training size that matches `size` (`64x48`, or `64` for a square) and `frames` is used. If none matches,
    the sample size has the requested values, and the model's defaults for the others; `note` is called, because the
    model was not trained at that size. Raises UsageError for a size or frames that are not divisible by the patch size,
    and for frames of an image model.
    """
    config: Any = bundle.model.config
    if frames is not None:
        check_frame_count(bundle, frames)
    plane = None if size is None else parse_sample_size(size, config.patch[-2:], stride)
    training_sizes = list_training_sizes(bundle)
    matching_sizes = [
        training_size
        for training_size in training_sizes
        if plane in (None, training_size[-2:]) and frames in (None, training_size[0])
    ]
    if matching_sizes:
        return matching_sizes[0]
    sample_size = (*training_sizes[0][:-2], *(plane or training_sizes[0][-2:]))
    sample_size = sample_size if frames is None else (frames, *sample_size[1:])
    listed = ", ".join(
        format_sample_size(training_size, stride) for training_size in training_sizes[:MAX_LISTED_SIZES]
    ) + ", …" * (len(training_sizes) > MAX_LISTED_SIZES)
    note(
        f"the model was not trained at {format_sample_size(sample_size, stride)}, but at "
        f"{listed}: sample quality at other sizes is unknown"
    )
    return sample_size


def check_frame_count(bundle: Bundle, frames: int) -> None:
    """Raise UsageError if the model does not generate clips, or if the number `frames` is not divisible by the frames
    of a patch."""
    config: Any = bundle.model.config
    if not bundle.preprocess.is_animated:
        raise UsageError("--frames is for models of clips, but this one generates images", "leave --frames out")
    if frames % config.patch[0]:
        problem = f"--frames {frames} is not a multiple of the {config.patch[0]} frames of a patch"
        raise UsageError(problem, f"use --frames {nearest_divisible_size((frames,), config.patch[:1])[0]}")


def parse_sample_size(text: str, patch: tuple[int, ...], stride: int) -> tuple[int, int]:
    """Parse `64x48` or `64`, in pixels, to (height, width) in latent positions of `stride` pixels. Raises UsageError
    for other text, and for a height or width that is not divisible by the patch size in pixels."""
    length_texts = text.lower().split("x")
    lengths = [
        int(length_text)
        for length_text in length_texts
        if length_text.isdecimal() and 0 < int(length_text) <= MAX_SAMPLE_SIDE
    ]
    if len(length_texts) not in (1, 2) or len(lengths) != len(length_texts):
        raise UsageError(
            f"--size cannot be {text}", f"use HEIGHTxWIDTH in pixels, each at most {MAX_SAMPLE_SIDE}, as in 64x48"
        )
    height, width = lengths * 2 if len(lengths) == 1 else lengths
    cell = (patch[0] * stride, patch[1] * stride)
    if height % cell[0] or width % cell[1]:
        hint = f"use --size {format_sample_size(nearest_divisible_size((height, width), cell))}"
        raise UsageError(f"--size {text} is not a multiple of the patch of {format_sample_size(cell)} pixels", hint)
    return height // stride, width // stride


def format_sample_size(size: tuple[int, ...], stride: int = 1) -> str:
    """Format a latent size ([T,] H, W) in pixels, `stride` per latent position: `64x48`, or `8x64x48` for 8 frames."""
    return "x".join(map(str, (*size[:-2], *(length * stride for length in size[-2:]))))
