"""Multiply-adds of model components as functions of sizes, for `ModelConfig.macs`."""

from __future__ import annotations

import math


def block_macs(tokens: int, width: int, hidden: int) -> int:
    """Compute the multiply-adds of a Transformer block: four D x D products, attention, and an MLP of two layers."""
    return tokens * (4 * width**2 + 2 * tokens * width + 2 * width * hidden)


def convolution_macs(widths: tuple[int, ...], units: tuple[int, ...], image: tuple[int, int], channels: int) -> int:
    """Compute the multiply-adds of a `ConvStem` for one image of (height, width), in pixels.

    Each stage has a 3x3 convolution of the previous stage's output and one per residual unit, at the size before
    pooling.
    """
    total = 0
    for stage, (width, count) in enumerate(zip(widths, units, strict=True)):
        positions = math.ceil(image[0] / 2**stage) * math.ceil(image[1] / 2**stage)
        total += 9 * positions * width * (channels + count * width)
        channels = width
    return total


def resnet_macs(blocks: tuple[int, ...], width: int, channels: int, image: tuple[int, int], axial: bool = False) -> int:
    """Compute the multiply-adds of a ResNet's root and stages for one image of (height, width), in pixels.

    A unit of width w has a 1x1 convolution of its inputs, a 3x3 (or axial attention), and a 1x1 to 4 w channels; the
    first unit of a stage also has a 1x1 shortcut. All but the first convolution are at the size after the unit's
    stride. Pre- and post-activation units have the same cost.
    """

    def count_positions(scale: int) -> int:
        """Count the positions of a map with `scale` pixels per position."""
        return math.ceil(image[0] / scale) * math.ceil(image[1] / scale)

    total, inputs = 49 * channels * width * count_positions(2), width
    for stage, depth in enumerate(blocks):
        inner, output_stride = width * 2**stage, 4 * 2**stage
        for index in range(depth):
            input_stride = output_stride // 2 if stage and not index else output_stride
            middle = axial_macs(inner, image, input_stride) if axial else 9 * inner**2 * count_positions(output_stride)
            shortcut = 4 * inputs * inner * count_positions(output_stride) if not index else 0
            total += (
                inputs * inner * count_positions(input_stride)
                + middle
                + 4 * inner**2 * count_positions(output_stride)
                + shortcut
            )
            inputs = 4 * inner
    return total


def axial_macs(width: int, image: tuple[int, int], scale: int) -> int:
    """Compute the multiply-adds of row and column attention on a map of stride `scale`, in pixels.

    For a line of L positions: 2 L C^2 for queries, keys and values; 3 L^2 C / 2 for three logits of half width; 2 L^2 C
    for values and their positions.
    """
    height, length = (math.ceil(size / scale) for size in image)
    lines = ((height, length), (length, height))  # number of lines, length
    return sum(count * (2 * size * width**2 + 7 * size**2 * width // 2) for count, size in lines)


def window_lengths(length: int, window: int) -> list[int]:
    """Return the lengths of the windows along an axis, the last one possibly shorter: 5, 2 -> [2, 2, 1]."""
    count, remainder = divmod(length, window)
    return [window] * count + [remainder] * (remainder > 0)
