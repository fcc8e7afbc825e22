"""Sizes in pixels and in tokens, one number per axis: arithmetic that needs no tensors, and no PyTorch."""

from __future__ import annotations


def grid_of(image: tuple[int, ...], patch: tuple[int, ...]) -> tuple[int, ...]:
    """The grid that `patch` cuts out of `image`; both hold one length per axis, in pixels.

    Raises ValueError where a patch does not divide its axis: a remainder is never dropped in silence.
    """
    if len(image) != len(patch) or any(i <= 0 or i % p for i, p in zip(image, patch, strict=True)):
        raise ValueError(f"image size {format_size(image)} is not a multiple of patch {format_size(patch)}")
    return tuple(i // p for i, p in zip(image, patch, strict=True))


def format_size(sizes: tuple[int, ...]) -> str:
    """`224` for a square, `224x192` otherwise: how sizes are written for people."""
    return str(sizes[0]) if len(set(sizes)) == 1 else "x".join(map(str, sizes))


def nearby(image: tuple[int, ...], patch: tuple[int, ...]) -> tuple[int, ...]:
    """The nearest size that `patch` divides, axis by axis."""
    sizes = image if len(image) == len(patch) else (image[0],) * len(patch)
    return tuple(max(1, round(i / p)) * p for i, p in zip(sizes, patch, strict=True))
