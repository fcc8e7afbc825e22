"""What a model costs: multiply-adds of an image, and the memory that its activations take in training."""

from __future__ import annotations

import math
from dataclasses import replace

from vitreous.models.adapter import adapter_macs
from vitreous.models.bit import bit_macs, stem_macs
from vitreous.models.config import (
    AdapterConfig,
    BiTConfig,
    ConvStemConfig,
    DetectorConfig,
    DiTConfig,
    ForeignConfig,
    ModelConfig,
    SegmenterConfig,
    SwinConfig,
    VideoConfig,
    ViTConfig,
)
from vitreous.models.detector import detector_macs
from vitreous.models.foreign import foreign_macs
from vitreous.models.segmenter import segmenter_macs
from vitreous.models.swin import swin_macs
from vitreous.nn.sizes import format_size, grid_of


def macs(config: ModelConfig, image: tuple[int, ...] | None = None) -> int:
    """Multiply-adds of one forward pass for one image, attention products included, softmax, norms and GELU left out.

    For a plain ViT, N P^2 C D + L (T (4 D^2 + 2 D M) + 2 T^2 D) + K D with T = P + N tokens, every token in every
    block, as papers count. FLOPs are twice this; a training step costs three forward passes.
    """
    image = image or config.image
    if isinstance(config, BiTConfig):
        return bit_macs(config, (image[0], image[1]))
    if isinstance(config, SwinConfig):
        return swin_macs(config, (image[0], image[1]))
    if isinstance(config, AdapterConfig):
        return macs(config.backbone, image) + adapter_macs(config, tuple(image))
    if isinstance(config, SegmenterConfig):
        return segmenter_macs(config, image, macs)
    if isinstance(config, DetectorConfig):
        return detector_macs(config, tuple(image), macs)
    if isinstance(config, DiTConfig):
        return dit_macs(config, image)
    if isinstance(config, ForeignConfig):
        return foreign_macs(config, image)
    grid, width, out = grid_of(image, config.patch), config.width, config.neck or config.width
    patches = math.prod(grid)
    tokens = patches + config.prefix * slots_of(config, grid)
    embed = patches * math.prod(config.patch) * config.channels * width
    if config.stem:
        stem, size = config.stem, (image[0], image[1])
        if isinstance(stem, ConvStemConfig):
            channels, embed = stem.widths[-1], convolution_macs(stem, size, config.channels)
        else:
            channels = 4 * stem.width * 2 ** (len(stem.blocks) - 1) if stem.blocks else stem.width
            embed = stem_macs(stem.blocks, size, stem.width, config.channels)
        embed += patches * math.prod(p // stem.reduction for p in config.patch) * channels * width
    mlp = tokens * (3 if config.mlp == "swiglu" else 2) * width * config.hidden
    attention = sum(attention_macs(config, grid, index) for index in range(config.depth))
    seen = patches + config.prefix
    pool = seen * 2 * width**2 + 2 * seen * width + 2 * width**2 + 2 * width * config.hidden
    neck = patches * (width * config.neck + 9 * config.neck**2)
    neck += len(config.conv_blocks) * patches * (2 * width * (width // 2) + 9 * (width // 2) ** 2)
    head = (config.representation or 0) * out + config.classes * config.features
    layers = config.depth * (1 + config.axial)
    if isinstance(config, VideoConfig) and config.arrangement == "factorised-encoder":
        head += config.temporal_depth * (block_macs(grid[0], width, 0) + mlp * grid[0] // tokens)
    return embed + layers * mlp + attention + pool * (config.pool == "attention") + neck + head


def computed(config: ModelConfig, image: tuple[int, ...] | None = None, patches: int | None = None) -> int:
    """Multiply-adds that one image's forward pass carries out: `macs` without what of the last block is not read.

    Blocks compute only so many `patches` of the image, where they drop the others; all are projected.
    """
    total, image = macs(config, image), image or config.image
    if not isinstance(config, ViTConfig):
        return total
    if patches is None:
        return total - unread(config, grid_of(image, config.patch))
    whole = replace(config, image=image, stem=None)
    # as many patches in a row: the cost of blocks depends on their number alone
    row = (patches, *(1,) * (len(image) - 1))
    thin = replace(whole, image=tuple(n * p for n, p in zip(row, config.patch, strict=True)))
    projection = math.prod(config.patch) * config.channels * config.width
    skipped = macs(whole) - macs(thin) - (math.prod(whole.grid) - patches) * projection
    return total - skipped - unread(config, row)


def unread(config: ModelConfig, grid: tuple[int, ...]) -> int:
    """Of the `macs` of an image of such a grid, those that `ViT.forward` need not carry out.

    Where `pooled_prefix` tokens are all that is pooled, nothing of the last block is computed for the others but their
    keys and values, and with plain attention not even these (`nn.attention.attend_few`).
    """
    if not isinstance(config, ViTConfig) or not config.pooled_prefix:
        return 0
    width, mlp = config.width, (3 if config.mlp == "swiglu" else 2) * config.width * config.hidden
    slots = slots_of(config, grid)
    tokens = math.prod(grid) // slots + config.prefix
    others = tokens - config.pooled_prefix
    if slots > 1 and config.arrangement == "factorised-dot-product":  # queries and keys of all tokens are computed
        attention = others * (width**2 + (tokens + slots) * width)
    elif config.attention == "plain":
        factorised = isinstance(config, VideoConfig) and config.factorised
        whole = block_macs(tokens, width, 0) if factorised else attention_macs(config, grid, config.depth - 1)
        attention = whole - config.pooled_prefix * (4 * width**2 + 2 * config.heads * tokens * width)
        if config.arrangement == "factorised-attention":
            attention += others * block_macs(slots, width, 0) // slots
    else:
        bias = (2 * tokens - 1) * width * (config.attention == "relative")
        attention = others * (width**2 + 2 * tokens * width + bias)
    return slots * (attention + others * mlp)


def slots_of(config: ViTConfig, grid: tuple[int, ...]) -> int:
    """How many sequences of space a grid has, each with prefix tokens: its time slots where the arrangement is
    factorised."""
    return grid[0] if isinstance(config, VideoConfig) and config.factorised else 1


def block_macs(tokens: int, width: int, hidden: int) -> int:
    """Multiply-adds of a plain block: four products of the width, attention, and an MLP of two layers."""
    return tokens * (4 * width**2 + 2 * tokens * width + 2 * width * hidden)


def dit_macs(config: DiTConfig, image: tuple[int, ...]) -> int:
    """Multiply-adds of one answer of a DiT, what is worked out once for the condition included."""
    c, pixels = config, math.prod(config.patch)
    grid = grid_of(image, c.patch)
    tokens = math.prod(grid)
    blocks = c.depth * block_macs(tokens, c.width, c.hidden)
    if c.arrangement == "alternating":
        slots, places = grid[0], tokens // grid[0]
        over_space = (c.depth + 1) // 2 * slots * block_macs(places, c.width, c.hidden)
        blocks = over_space + c.depth // 2 * places * block_macs(slots, c.width, c.hidden)
    condition = c.depth * 6 * c.width**2 + 256 * c.width + c.width**2 + 2 * c.width**2
    return blocks + condition + tokens * pixels * c.width * (c.channels + c.out_channels)


def convolution_macs(stem: ConvStemConfig, image: tuple[int, int], channels: int) -> int:
    """Multiply-adds of a `ConvStem` for one image: a 3x3 from the stage before and one for each unit, at the size
    before pooling."""
    total = 0
    for number, (width, units) in enumerate(zip(stem.widths, stem.blocks, strict=True)):
        places = math.ceil(image[0] / 2**number) * math.ceil(image[1] / 2**number)
        total += 9 * places * width * (channels + units * width)
        channels = width
    return total


def attention_macs(config: ViTConfig, grid: tuple[int, ...], index: int) -> int:
    """Multiply-adds of a block's attention, or of its two if it is axial: four products of width D, and those of
    queries and keys."""
    tokens, width = math.prod(grid) + config.prefix, config.width
    if isinstance(config, VideoConfig) and config.factorised:
        return space_time_macs(config, grid)
    if config.axial:
        return 2 * tokens * 4 * width**2 + 2 * tokens * sum(grid) * width
    if config.on_grid and index in config.windowed_blocks:
        size = config.window
        seen, tokens = size**2, math.prod(math.ceil(length / size) * size for length in grid)
        return tokens * (4 * width**2 + 2 * seen * width + 2 * size * width)
    if index in config.windowed_blocks:
        pairs = math.prod(sum(side**2 for side in sides_of(length, config.window)) for length in grid)
        pairs += 2 * config.prefix * math.prod(grid) + config.prefix**2
        return tokens * 4 * width**2 + 2 * pairs * width
    bias = {"relative": (2 * tokens - 1) * width, "decomposed": sum(grid) * width}.get(config.attention, 0)
    return tokens * (4 * width**2 + 2 * tokens * width + bias)


def space_time_macs(config: VideoConfig, grid: tuple[int, ...]) -> int:
    """Multiply-adds of the attention of a block that tells space and time apart: T slots of S tokens.

    A factorised encoder T S (4 D^2 + 2 S D), its blocks over time left out; factorised attention T S (8 D^2 + 2 (S + T)
    D); factorised dot products T S (4 D^2 + (S + T) D), or those of the first where T is 1.
    """
    slots, width = grid[0], config.width
    tokens = math.prod(grid[1:]) + config.prefix
    space, time = slots * block_macs(tokens, width, 0), tokens * block_macs(slots, width, 0)
    if config.arrangement == "factorised-attention":
        return space + time
    return (space + time) // 2 if config.arrangement == "factorised-dot-product" and slots > 1 else space


def sides_of(length: int, window: int) -> list[int]:
    """The sides of the windows that an axis is cut into: 5, 2 -> [2, 2, 1]."""
    whole, rest = divmod(length, window)
    return [window] * whole + [rest] * (rest > 0)


def windows_text(before: ModelConfig, after: ModelConfig) -> str:
    """What is to be said of windows of a plain ViT that the weights were not trained with; nothing where there are
    none."""
    if not isinstance(after, ViTConfig) or after.on_grid or not after.windowed_blocks:
        return ""
    if isinstance(before, ViTConfig) and (before.window, before.global_blocks) == (after.window, after.global_blocks):
        return ""
    whole = replace(after, window=0, global_blocks=())
    costs = " in place of ".join(f"{2 * macs(config) / 1e9:.3g}" for config in (after, whole))
    sides = " x ".join([str(after.window)] * len(after.image))
    return (
        f"windows of {sides} tokens in {len(after.windowed_blocks)} of {after.depth} blocks, without which the weights "
        f"were trained: {costs} GFLOPs an image of {format_size(after.image)} pixels, and "
        "other features until they are tuned"
    )


def activations(config: ModelConfig, image: tuple[int, ...] | None = None, device: str = "cuda") -> int | None:
    """Numbers that the blocks of a plain ViT keep of one image for the backward pass, about: L T (9 D + 2 M).

    A block keeps the inputs of its two norms, of its four products and of GELU, and q, k and v; fused attention keeps
    no probabilities, recomputation would keep less; on a CPU GELU is computed again, which saves M. Where only prefix
    tokens are read, the last block keeps its input, normed and not. Two or four bytes each. None for models whose
    blocks are of another kind.
    """
    if not isinstance(config, ViTConfig) or config.on_grid or config.stem or config.attention != "plain":
        return None
    if isinstance(config, VideoConfig) and config.factorised:
        return None
    tokens = math.prod(grid_of(image or config.image, config.patch)) + config.prefix
    again = device == "cpu" and config.gelu != "quick"
    hidden = (4 if config.mlp == "swiglu" else 1 if again else 2) * config.hidden
    last = tokens * 2 * config.width if config.pooled_prefix else tokens * (9 * config.width + hidden)
    return (config.depth - 1) * tokens * (9 * config.width + hidden) + last
