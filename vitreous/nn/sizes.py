"""Sizes in pixels and in tokens, one number per axis: arithmetic that needs no tensors, and no PyTorch."""

from __future__ import annotations

import math

from vitreous.errors import UsageError

MIN_TOKENS = 4  # minimum patches of an image at native aspect ratio, wide or tall


def patch_grid(image: tuple[int, ...], patch: tuple[int, ...]) -> tuple[int, ...]:
    """Return the grid that `patch` cuts out of `image`; both have one length per axis, in pixels.

    Raises ValueError if a patch does not divide its axis; remainders are never dropped silently.
    """
    if len(image) != len(patch) or any(i <= 0 or i % p for i, p in zip(image, patch, strict=True)):
        raise ValueError(f"image size {format_size(image)} is not divisible by patch size {format_size(patch)}")
    return tuple(i // p for i, p in zip(image, patch, strict=True))


def format_size(sizes: tuple[int, ...]) -> str:
    """Format a size for output: `224` for a square, `224x192` otherwise."""
    return str(sizes[0]) if len(set(sizes)) == 1 else "x".join(map(str, sizes))


def nearest_divisible_size(image: tuple[int, ...], patch: tuple[int, ...]) -> tuple[int, ...]:
    """Return the nearest size that `patch` divides, axis by axis."""
    sizes = image if len(image) == len(patch) else (image[0],) * len(patch)
    return tuple(max(1, round(i / p)) * p for i, p in zip(sizes, patch, strict=True))


def fit_size_to_tokens(size: tuple[float, ...], patch: tuple[int, ...], tokens: int) -> tuple[int, ...]:
    """Return the size in pixels with about the aspect ratio of `size` and the most whole patches up to `tokens`.

    There is at least one patch along each axis. Raises UsageError for fewer than one token.
    """
    if tokens < 1:
        raise UsageError(f"the number of tokens must be at least 1, got {tokens}")
    cells = [extent / length for extent, length in zip(size, patch, strict=True)]
    low, high = 0.0, tokens / min(cells)  # bisect the scale: counts rise with it
    for _ in range(60):
        middle = (low + high) / 2
        is_within = math.prod(max(1, round(cell * middle)) for cell in cells) <= tokens
        low, high = (middle, high) if is_within else (low, middle)
    return tuple(min(tokens, max(1, round(cell * low))) * length for cell, length in zip(cells, patch, strict=True))


def check_token_budget(tokens: int) -> None:
    """Raise UsageError if images at native aspect ratio would have fewer than the minimum number of tokens."""
    if tokens < MIN_TOKENS:
        raise UsageError(
            f"--tokens {tokens} is too small for images at native aspect ratio",
            f"use {MIN_TOKENS} or more, for example --tokens 256",
        )
