"""Sizes in pixels and in tokens, one number per axis: arithmetic that needs no tensors, and no PyTorch."""

from __future__ import annotations

import math

from vitreous.errors import UsageError

MIN_TOKENS = 4  # patches of a picture that can be wide or tall


def patch_grid(image: tuple[int, ...], patch: tuple[int, ...]) -> tuple[int, ...]:
    """The grid that `patch` cuts out of `image`; both hold one length per axis, in pixels.

    Raises ValueError where a patch does not divide its axis: a remainder is never dropped in silence.
    """
    if len(image) != len(patch) or any(i <= 0 or i % p for i, p in zip(image, patch, strict=True)):
        raise ValueError(f"image size {format_size(image)} is not divisible by patch size {format_size(patch)}")
    return tuple(i // p for i, p in zip(image, patch, strict=True))


def format_size(sizes: tuple[int, ...]) -> str:
    """`224` for a square, `224x192` otherwise: how sizes are written for people."""
    return str(sizes[0]) if len(set(sizes)) == 1 else "x".join(map(str, sizes))


def nearest_divisible_size(image: tuple[int, ...], patch: tuple[int, ...]) -> tuple[int, ...]:
    """The nearest size that `patch` divides, axis by axis."""
    sizes = image if len(image) == len(patch) else (image[0],) * len(patch)
    return tuple(max(1, round(i / p)) * p for i, p in zip(sizes, patch, strict=True))


def fit_size_to_tokens(size: tuple[float, ...], patch: tuple[int, ...], tokens: int) -> tuple[int, ...]:
    """Pixels along each axis of an image -> those of about its aspect ratio that have at most so many patches, whole
    ones: as many as there may be, at least one along each axis.

    Raises UsageError for fewer than one token.
    """
    if tokens < 1:
        raise UsageError(f"an image has at least one token, not {tokens}")
    cells = [side / length for side, length in zip(size, patch, strict=True)]
    low, high = 0.0, tokens / min(cells)  # bisect the scale: counts rise with it
    for _ in range(60):
        middle = (low + high) / 2
        fits = math.prod(max(1, round(cell * middle)) for cell in cells) <= tokens
        low, high = (middle, high) if fits else (low, middle)
    return tuple(min(tokens, max(1, round(cell * low))) * length for cell, length in zip(cells, patch, strict=True))


def check_token_budget(tokens: int) -> None:
    """Raise UsageError where pictures at their own aspect would have too few tokens to have one."""
    if tokens < MIN_TOKENS:
        raise UsageError(
            f"--tokens {tokens} leaves too little of a picture", f"use {MIN_TOKENS} patches or more, as --tokens 256"
        )
