"""Cost of a Vision Transformer: multiply-adds per image, and activation memory in training.

N patch tokens, P prefix tokens, T = P + N, D width, M hidden channels of the MLP, L blocks, K classes, C channels.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from vitreous.models.configs.base import ImageSize, ModelConfig
from vitreous.models.configs.groups import AttentionConfig, HeadConfig, MlpConfig
from vitreous.models.cost import block_macs, window_lengths
from vitreous.nn.sizes import format_size, patch_grid


class ViTCost(ModelConfig):
    """Base class of `ViTConfig` that computes its cost from terms that related families override."""

    if TYPE_CHECKING:
        heads: int
        attention: AttentionConfig
        mlp: MlpConfig
        head: HeadConfig

        @property
        def windowed_blocks(self) -> tuple[int, ...]:
            """Return the blocks whose patches attend within windows."""
            ...

        @property
        def pooled_prefix(self) -> int | None:
            """Return the number of leading tokens, if pooling uses only prefix tokens; None if it uses patches."""
            ...

    def macs(self, image: ImageSize = None) -> int:
        """Count the multiply-adds of one forward pass for one image, with attention products, without softmax, norms
        and GELU.

        For a plain ViT with patches of p x p pixels: N p^2 C D + L (T (4 D^2 + 2 D M) + 2 T^2 D) + K D. Every token is
        counted in every block, as in papers. FLOPs are twice this number; a training step costs three forward passes.
        """
        image = tuple(image or self.image)
        grid, width = patch_grid(image, self.patch), self.width
        patches = math.prod(grid)
        attention = sum(self.attention_macs(grid, index) for index in range(self.depth))
        num_tokens = patches + self.prefix
        pool = num_tokens * 2 * width**2 + 2 * num_tokens * width + 2 * width**2
        pool += 2 * width * (self.head.pool_hidden or self.mlp.hidden)
        head = (self.head.representation or 0) * self.width_out + self.classes * self.num_features
        blocks = attention + self.mlp_layers * self.mlp_macs(grid)
        return self.embedding_macs(image) + blocks + pool * (self.pool == "attention") + self.extra_macs(grid) + head

    @property
    def mlp_layers(self) -> int:
        """Return the number of MLPs in all blocks."""
        return self.depth

    def embedding_macs(self, image: tuple[int, ...]) -> int:
        """Count the multiply-adds of the patch projection and of a stem."""
        return math.prod(patch_grid(image, self.patch)) * math.prod(self.patch) * self.channels * self.width

    def mlp_macs(self, grid: tuple[int, ...]) -> int:
        """Count the multiply-adds of the MLP of one block."""
        tokens = math.prod(grid) + self.prefix * self.time_slots(grid)
        return tokens * (3 if self.mlp.kind == "swiglu" else 2) * self.width * self.mlp.hidden

    def attention_macs(self, grid: tuple[int, ...], index: int) -> int:
        """Count the multiply-adds of a block's attention: four D x D products, the logits, and the products with
        probabilities."""
        tokens, width = math.prod(grid) + self.prefix, self.width
        if index in self.windowed_blocks:
            pairs = math.prod(
                sum(window_length**2 for window_length in window_lengths(length, self.attention.window))
                for length in grid
            )
            pairs += 2 * self.prefix * math.prod(grid) + self.prefix**2
            return tokens * 4 * width**2 + 2 * pairs * width
        bias = (2 * tokens - 1) * width if self.attention.kind == "relative" else 0
        return tokens * (4 * width**2 + 2 * tokens * width + bias)

    def extra_macs(self, grid: tuple[int, ...]) -> int:
        """Count the multiply-adds that related families add to blocks, pooling and head."""
        return 0

    def time_slots(self, grid: tuple[int, ...]) -> int:
        """Return the number of time slots with separate prefix tokens; 1 for images."""
        return 1

    def computed_macs(self, image: ImageSize = None, patches: int | None = None) -> int:
        """Count the multiply-adds that one image's forward pass performs: `macs` without the unused part of the last
        block.

        If `patches` is set, the blocks compute only this number of patches of the image; all patches are projected.
        """
        image = tuple(image or self.image)
        total = self.macs(image)
        if patches is None:
            return total - self.skipped_macs(patch_grid(image, self.patch))
        full_config = self.with_options(image=image, stem=None)
        # a 1-D grid: the cost of blocks depends only on the number of patches
        flat_grid = (patches, *(1,) * (len(image) - 1))
        reduced_config = full_config.with_options(
            image=tuple(n * p for n, p in zip(flat_grid, self.patch, strict=True))
        )
        projection = math.prod(self.patch) * self.channels * self.width
        skipped = full_config.macs() - reduced_config.macs() - (math.prod(full_config.grid) - patches) * projection
        return total - skipped - self.skipped_macs(flat_grid)

    def skipped_macs(self, grid: tuple[int, ...]) -> int:
        """Count the multiply-adds in `macs` that `ViT.forward` skips for an image of this grid.

        Attention pooling does not compute keys and values (`nn.attention.attend_unprojected`). If pooling uses only
        `pooled_prefix` tokens, the last block computes only keys and values for the other tokens: with rotary attention
        only keys, and with plain attention neither.
        """
        if self.pool == "attention":
            return self.skipped_pool_macs(math.prod(grid) + self.prefix)
        if not self.pooled_prefix:
            return 0
        slots = self.time_slots(grid)
        tokens = math.prod(grid) // slots + self.prefix
        skipped_tokens = tokens - self.pooled_prefix
        mlp = skipped_tokens * (3 if self.mlp.kind == "swiglu" else 2) * self.width * self.mlp.hidden
        return slots * (self.skipped_attention_macs(grid, slots, tokens) + mlp)

    def skipped_pool_macs(self, tokens: int) -> int:
        """Count the multiply-adds in `macs` that attention pooling of a number of tokens skips."""
        width, heads = self.width, self.head.pool_heads or self.heads
        return tokens * 2 * width**2 + 2 * tokens * width - (2 * width**2 + 2 * heads * tokens * width)

    def skipped_attention_macs(self, grid: tuple[int, ...], slots: int, tokens: int) -> int:
        """Count the multiply-adds that the last block's attention skips, per slot of `tokens` tokens."""
        width, queries = self.width, self.pooled_prefix or 0
        if self.attention.kind == "plain" and not self.attention.qk_norm:
            return self.skipped_plain_attention_macs(self.attention_macs(grid, self.depth - 1), tokens)
        if self.attention.kind == "rotary" and not self.attention.qk_norm:
            computed_macs = tokens * width**2 + queries * (3 * width**2 + (1 + self.heads) * tokens * width)
            return block_macs(tokens, width, 0) - computed_macs
        bias = (2 * tokens - 1) * width * (self.attention.kind == "relative")
        return (tokens - queries) * (width**2 + 2 * tokens * width + bias)

    def skipped_plain_attention_macs(self, total_macs: int, tokens: int) -> int:
        """Return `total_macs`, the multiply-adds of plain attention over `tokens` tokens, minus those that the pooled
        tokens need."""
        return total_macs - (self.pooled_prefix or 0) * (4 * self.width**2 + 2 * self.heads * tokens * self.width)

    def count_activations(self, image: ImageSize = None, device: str = "cuda") -> int | None:
        """Estimate the number of values that the blocks of a plain ViT store per image for the backward pass: L T
        (9 D + 2 M).

        A block stores the inputs of its two norms, of its four products and of GELU, and q, k and v. Fused attention
        stores no probabilities; gradient checkpointing, which is not considered, would store less. On a CPU GELU is
        recomputed, which saves M. If only prefix tokens are pooled, the last block stores only its input, before and
        after the norm. Each value has two or four bytes. Returns None for other kinds of blocks.
        """
        if self.on_grid or self.front != "patches" or self.attention.kind != "plain" or self.factorised:
            return None
        tokens = math.prod(patch_grid(image or self.image, self.patch)) + self.prefix
        recomputes_gelu = device == "cpu" and self.mlp.gelu != "quick"
        hidden = (4 if self.mlp.kind == "swiglu" else 1 if recomputes_gelu else 2) * self.mlp.hidden
        last_block = tokens * 2 * self.width if self.pooled_prefix else tokens * (9 * self.width + hidden)
        return (self.depth - 1) * tokens * (9 * self.width + hidden) + last_block

    def describe_window_change(self, source_config: ModelConfig) -> str:
        """Return a note if the weights of the config `source_config` were not trained with the windows of this model,
        else ""."""
        if self.on_grid or not self.windowed_blocks:
            return ""
        if isinstance(source_config, ViTCost) and window_of(source_config) == window_of(self):
            return ""
        unwindowed = self.with_options(attention={"window": 0, "global_blocks": ()})
        costs = " in place of ".join(f"{2 * config.macs() / 1e9:.3g}" for config in (self, unwindowed))
        window = " x ".join([str(self.attention.window)] * len(self.image))
        return (
            f"windows of {window} tokens in {len(self.windowed_blocks)} of {self.depth} blocks; the "
            f"weights were trained without them: {costs} GFLOPs per image of {format_size(self.image)} pixels, and "
            "different features until the model is fine-tuned"
        )


def window_of(config: ViTCost) -> tuple[int, tuple[int, ...]]:
    """Return the length of a window along each axis, in tokens, and the blocks without windows."""
    return config.attention.window, config.attention.global_blocks
