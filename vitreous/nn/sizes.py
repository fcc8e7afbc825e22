"""Arithmetic of sizes in pixels and in tokens, one number per axis, without PyTorch."""

from __future__ import annotations

import math

from vitreous.errors import UsageError

#: of `fit_size_by_scale`: the largest factor, and the precision of the factor
MAX_SCALE, SCALE_TOLERANCE = 100.0, 1e-5
MIN_TOKENS = 4  # minimum number of patches of an image at native aspect ratio


def patch_grid(image: tuple[int, ...], patch: tuple[int, ...]) -> tuple[int, ...]:
    """Return the number of patches along each axis of an image; `image` and `patch` are one length per axis, in pixels.

    Raises ValueError if the image is not divisible by the patch along an axis; remainders are never dropped silently.
    """
    if len(image) != len(patch) or any(i <= 0 or i % p for i, p in zip(image, patch, strict=True)):
        raise ValueError(f"image size {format_size(image)} is not divisible by patch size {format_size(patch)}")
    return tuple(i // p for i, p in zip(image, patch, strict=True))


def format_size(sizes: tuple[int, ...]) -> str:
    """Format a size for output: `224` for a square, `224x192` otherwise."""
    return str(sizes[0]) if len(set(sizes)) == 1 else "x".join(map(str, sizes))


def nearest_divisible_size(image: tuple[int, ...], patch: tuple[int, ...]) -> tuple[int, ...]:
    """Return the image size nearest to `image` that is divisible by `patch` along each axis."""
    sizes = image if len(image) == len(patch) else (image[0],) * len(patch)
    return tuple(max(1, round(i / p)) * p for i, p in zip(sizes, patch, strict=True))


def fit_size_to_tokens(size: tuple[float, ...], patch: tuple[int, ...], tokens: int) -> tuple[int, ...]:
    """Return the size in pixels with about the aspect ratio of `size` and the most whole patches, at most `tokens` in
    all.

    There is at least one patch along each axis. Raises UsageError if `tokens` is below 1.
    """
    if tokens < 1:
        raise UsageError(f"the number of tokens must be at least 1, got {tokens}")
    patches = [extent / length for extent, length in zip(size, patch, strict=True)]  # along each axis, unscaled
    low, high = 0.0, tokens / min(patches)  # bisect the scale of the image, with which the number of patches rises
    for _ in range(60):
        middle = (low + high) / 2
        is_within = math.prod(max(1, round(count * middle)) for count in patches) <= tokens
        low, high = (middle, high) if is_within else (low, middle)
    return tuple(min(tokens, max(1, round(count * low))) * length for count, length in zip(patches, patch, strict=True))


def check_token_budget(tokens: int) -> None:
    """Raise UsageError if `tokens`, the option --tokens for images at native aspect ratio, is below `MIN_TOKENS`."""
    if tokens < MIN_TOKENS:
        raise UsageError(
            f"--tokens {tokens} is too small for images at native aspect ratio",
            f"use {MIN_TOKENS} or more, for example --tokens 256",
        )


def fit_size_by_scale(size: tuple[float, ...], patch: tuple[int, ...], tokens: int) -> tuple[int, ...]:
    """Choose the input size for an image of this size, with at most `tokens` patches, by the rule of SigLIP 2 NaFlex
    (arXiv:2502.14786; `_get_image_size_for_seq` of big_vision).

    The image is enlarged or reduced by the largest factor, found by bisection, with which the lengths rounded up to
    multiples of the patch have at most `tokens` patches.
    """

    def count_patches(scale: float) -> tuple[int, ...]:
        """Return the patches along each axis of the image, scaled and rounded up."""
        return tuple(max(1, math.ceil(length * scale / p)) for length, p in zip(size, patch, strict=True))

    low, high = SCALE_TOLERANCE / 10, MAX_SCALE
    while high - low >= SCALE_TOLERANCE:
        middle = (low + high) / 2
        if math.prod(count_patches(middle)) <= tokens:
            low = middle
        else:
            high = middle
    return tuple(count * p for count, p in zip(count_patches(low), patch, strict=True))
