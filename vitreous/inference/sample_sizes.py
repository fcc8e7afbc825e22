"""At what size a generator makes images, or clips: that which is asked for, or one that it learned from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vitreous.errors import UsageError
from vitreous.nn.sizes import nearest_divisible_size
from vitreous.weights.bundle import Bundle

MAX_SAMPLE_SIDE, MAX_SAMPLE_FRAMES = 8192, 4096  # pixels, of a clip
MAX_LISTED_SIZES = 12  # sizes that a note names


def list_training_sizes(bundle: Bundle) -> tuple[tuple[int, ...], ...]:
    """The sizes that a model learned from, in pixels or places of latents; its own first."""
    own = tuple(bundle.model.config.image)
    return (own, *(size for size in bundle.preprocess.buckets if size != own))


def choose_sample_size(
    bundle: Bundle,
    size: str | None = None,
    frames: int | None = None,
    stride: int = 1,
    note: Callable[[str], None] = lambda text: None,
) -> tuple[int, ...]:
    """The size of what is made, one length per axis, in pixels or in places of latents of `stride` pixels: of those
    that the model learned from the first of this `size` (`64x48`, or `64` for a square) and of so many `frames`, else
    what is asked for and the model's own for the rest. `note` hears that it learned from no such size.

    Raises UsageError for a size or frames that the patch does not divide, and for frames of a model of pictures.
    """
    config: Any = bundle.model.config
    if frames is not None:
        check_frames(bundle, frames)
    plane = None if size is None else parse_sample_size(size, config.patch[-2:], stride)
    learned = list_training_sizes(bundle)
    fitting = [one for one in learned if plane in (None, one[-2:]) and frames in (None, one[0])]
    if fitting:
        return fitting[0]
    chosen = (*learned[0][:-2], *(plane or learned[0][-2:]))
    chosen = chosen if frames is None else (frames, *chosen[1:])
    listed = ", ".join(format_sample_size(one, stride) for one in learned[:MAX_LISTED_SIZES]) + ", …" * (
        len(learned) > MAX_LISTED_SIZES
    )
    note(
        f"the model did not learn at {format_sample_size(chosen, stride)}, but at "
        f"{listed}: how good others are, nothing promises"
    )
    return chosen


def check_frames(bundle: Bundle, frames: int) -> None:
    """Raise UsageError for a model that makes no clips, and for frames that its patch does not divide."""
    config: Any = bundle.model.config
    if not bundle.preprocess.is_animated:
        raise UsageError("--frames is for models of clips, and this one makes pictures", "leave it out")
    if frames % config.patch[0]:
        problem = f"--frames {frames} is not a multiple of the {config.patch[0]} frames of a patch"
        raise UsageError(problem, f"use --frames {nearest_divisible_size((frames,), config.patch[:1])[0]}")


def parse_sample_size(words: str, patch: tuple[int, ...], stride: int) -> tuple[int, int]:
    """`64x48` or `64`, in pixels -> (height, width) in places of `stride` pixels. Raises UsageError for other words,
    and for sides that a patch of so many places does not divide."""
    parts = words.lower().split("x")
    sides = [int(part) for part in parts if part.isdecimal() and 0 < int(part) <= MAX_SAMPLE_SIDE]
    if len(parts) not in (1, 2) or len(sides) != len(parts):
        raise UsageError(
            f"--size cannot be {words}", f"it is HEIGHTxWIDTH in pixels, each at most {MAX_SAMPLE_SIDE}, as in 64x48"
        )
    height, width = sides * 2 if len(sides) == 1 else sides
    cell = (patch[0] * stride, patch[1] * stride)
    if height % cell[0] or width % cell[1]:
        hint = f"use --size {format_sample_size(nearest_divisible_size((height, width), cell))}"
        raise UsageError(f"--size {words} is no whole number of patches of {format_sample_size(cell)} pixels", hint)
    return height // stride, width // stride


def format_sample_size(size: tuple[int, ...], stride: int = 1) -> str:
    """A size in places of `stride` pixels as people write it, in pixels: `8x64x48`."""
    return "x".join(map(str, (*size[:-2], *(side * stride for side in size[-2:]))))
