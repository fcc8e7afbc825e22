"""What a Vision Transformer costs: multiply-adds of an image, and the memory that its activations take in training."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from vitreous.models.configs.base import ImageSize, ModelConfig
from vitreous.models.configs.groups import AttentionConfig, HeadConfig, MlpConfig
from vitreous.models.cost import window_lengths
from vitreous.nn.sizes import format_size, patch_grid


class ViTCost(ModelConfig):
    """The cost of a `ViTConfig`, whose parts kin override."""

    if TYPE_CHECKING:
        heads: int
        attention: AttentionConfig
        mlp: MlpConfig
        head: HeadConfig
        windowed_blocks: tuple[int, ...]
        pooled_prefix: int | None

    def macs(self, image: ImageSize = None) -> int:
        """Multiply-adds of one forward pass for one image, attention products included, softmax, norms and GELU left
        out.

        For a plain ViT, N P^2 C D + L (T (4 D^2 + 2 D M) + 2 T^2 D) + K D with T = P + N tokens, every token in every
        block, as papers count. FLOPs are twice this; a training step costs three forward passes.
        """
        image = tuple(image or self.image)
        grid, width = patch_grid(image, self.patch), self.width
        patches = math.prod(grid)
        attention = sum(self.attention_macs(grid, index) for index in range(self.depth))
        seen = patches + self.prefix
        pool = seen * 2 * width**2 + 2 * seen * width + 2 * width**2 + 2 * width * self.mlp.hidden
        head = (self.head.representation or 0) * self.width_out + self.classes * self.features
        blocks = attention + self.mlp_layers * self.mlp_macs(grid)
        return self.embedding_macs(image) + blocks + pool * (self.pool == "attention") + self.extra_macs(grid) + head

    @property
    def mlp_layers(self) -> int:
        """MLPs of all blocks."""
        return self.depth

    def embedding_macs(self, image: tuple[int, ...]) -> int:
        """Multiply-adds of what makes tokens of an image: the projection of its patches."""
        return math.prod(patch_grid(image, self.patch)) * math.prod(self.patch) * self.channels * self.width

    def mlp_macs(self, grid: tuple[int, ...]) -> int:
        """Multiply-adds of the MLP of one block."""
        tokens = math.prod(grid) + self.prefix * self.time_slots(grid)
        return tokens * (3 if self.mlp.kind == "swiglu" else 2) * self.width * self.mlp.hidden

    def attention_macs(self, grid: tuple[int, ...], index: int) -> int:
        """Multiply-adds of a block's attention: four products of width D, and those of queries and keys."""
        tokens, width = math.prod(grid) + self.prefix, self.width
        if index in self.windowed_blocks:
            pairs = math.prod(sum(side**2 for side in window_lengths(length, self.attention.window)) for length in grid)
            pairs += 2 * self.prefix * math.prod(grid) + self.prefix**2
            return tokens * 4 * width**2 + 2 * pairs * width
        bias = (2 * tokens - 1) * width if self.attention.kind == "relative" else 0
        return tokens * (4 * width**2 + 2 * tokens * width + bias)

    def extra_macs(self, grid: tuple[int, ...]) -> int:
        """Multiply-adds of what kin have beside blocks, pooling and head."""
        return 0

    def time_slots(self, grid: tuple[int, ...]) -> int:
        """Slots of time that have prefix tokens of their own."""
        return 1

    def computed_macs(self, image: ImageSize = None, patches: int | None = None) -> int:
        """Multiply-adds that one image's forward pass carries out: `macs` without what of the last block is not read.

        Blocks compute only so many `patches` of the image, where they drop the others; all are projected.
        """
        image = tuple(image or self.image)
        total = self.macs(image)
        if patches is None:
            return total - self.skipped_macs(patch_grid(image, self.patch))
        whole = self.with_options(image=image, stem=None)
        # as many patches in a row: the cost of blocks depends on their number alone
        row = (patches, *(1,) * (len(image) - 1))
        thin = whole.with_options(image=tuple(n * p for n, p in zip(row, self.patch, strict=True)))
        projection = math.prod(self.patch) * self.channels * self.width
        skipped = whole.macs() - thin.macs() - (math.prod(whole.grid) - patches) * projection
        return total - skipped - self.skipped_macs(row)

    def skipped_macs(self, grid: tuple[int, ...]) -> int:
        """Of the `macs` of an image of such a grid, those that `ViT.forward` need not carry out.

        Where `pooled_prefix` tokens are all that is pooled, nothing of the last block is computed for the others but
        their keys and values, and with plain attention not even these (`nn.attention.attend_few_queries`).
        """
        if not self.pooled_prefix:
            return 0
        slots = self.time_slots(grid)
        tokens = math.prod(grid) // slots + self.prefix
        others = tokens - self.pooled_prefix
        mlp = others * (3 if self.mlp.kind == "swiglu" else 2) * self.width * self.mlp.hidden
        return slots * (self.skipped_attention_macs(grid, slots, tokens) + mlp)

    def skipped_attention_macs(self, grid: tuple[int, ...], slots: int, tokens: int) -> int:
        """Multiply-adds that attention of the last block need not carry out, for each of the slots of so many
        tokens."""
        if self.attention.kind == "plain":
            return self.skipped_plain_attention_macs(self.attention_macs(grid, self.depth - 1), tokens)
        bias = (2 * tokens - 1) * self.width * (self.attention.kind == "relative")
        return (tokens - (self.pooled_prefix or 0)) * (self.width**2 + 2 * tokens * self.width + bias)

    def skipped_plain_attention_macs(self, whole: int, tokens: int) -> int:
        """Of the `whole` multiply-adds of plain attention over so many tokens, those beside the pooled tokens'."""
        return whole - (self.pooled_prefix or 0) * (4 * self.width**2 + 2 * self.heads * tokens * self.width)

    def count_activations(self, image: ImageSize = None, device: str = "cuda") -> int | None:
        """Numbers that the blocks of a plain ViT keep of one image for the backward pass, about: L T (9 D + 2 M).

        A block keeps the inputs of its two norms, of its four products and of GELU, and q, k and v; fused attention
        keeps no probabilities, recomputation would keep less; on a CPU GELU is computed again, which saves M. Where
        only prefix tokens are read, the last block keeps its input, normed and not. Two or four bytes each. None for
        models whose blocks are of another kind.
        """
        if self.on_grid or self.front != "patches" or self.attention.kind != "plain" or self.factorised:
            return None
        tokens = math.prod(patch_grid(image or self.image, self.patch)) + self.prefix
        again = device == "cpu" and self.mlp.gelu != "quick"
        hidden = (4 if self.mlp.kind == "swiglu" else 1 if again else 2) * self.mlp.hidden
        last = tokens * 2 * self.width if self.pooled_prefix else tokens * (9 * self.width + hidden)
        return (self.depth - 1) * tokens * (9 * self.width + hidden) + last

    def describe_window_change(self, before: ModelConfig) -> str:
        """A note on windows that weights of the config `before` were not trained with; "" where there are none."""
        if self.on_grid or not self.windowed_blocks:
            return ""
        if isinstance(before, ViTCost) and window_of(before) == window_of(self):
            return ""
        whole = self.with_options(attention={"window": 0, "global_blocks": ()})
        costs = " in place of ".join(f"{2 * config.macs() / 1e9:.3g}" for config in (self, whole))
        sides = " x ".join([str(self.attention.window)] * len(self.image))
        return (
            f"windows of {sides} tokens in {len(self.windowed_blocks)} of {self.depth} blocks, without which the "
            f"weights were trained: {costs} GFLOPs an image of {format_size(self.image)} pixels, and "
            "other features until they are tuned"
        )


def window_of(config: ViTCost) -> tuple[int, tuple[int, ...]]:
    """The tokens along a side of a window, and the blocks that have none."""
    return config.attention.window, config.attention.global_blocks
