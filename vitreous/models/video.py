"""Video Transformers: the four arrangements of ViViT (arXiv:2103.15691, section 3.3), built from the blocks of a ViT.

    joint                    the ViT itself, on three axes
    factorised-encoder       (B, T, S, D) -> blocks over S -> a vector of each slot (B, T, D) -> blocks over T
    factorised-attention     (B, T, S, D) -> in each block attention over S, attention over T, MLP
    factorised-dot-product   (B, T, S, D) -> in each block half of the heads over S, half over T, MLP

Spatial parameters have the names of an image ViT. With `temporal_zero`, temporal layers add nothing until they are
trained, so a new factorised model computes the outputs of its ViT on each frame; logits are the mean over slots.

Shapes: B batch, T time slots, N = T h w patch tokens, P prefix tokens, S = P + h w tokens of a slot, D width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vitreous.models.configs.video import VideoConfig
from vitreous.models.vit import EncoderInput, ViT
from vitreous.nn.attention import Attention
from vitreous.nn.block import Block, ResidualBranch
from vitreous.nn.encoder import Encoder, build_blocks
from vitreous.nn.position import SpaceTimePosition, TokenPositions
from vitreous.nn.spacetime import SpaceTimeBlock, SpaceTimeHeads, flatten_time_slots, zero_output_layer


class Video(ViT):
    """ViT for clips: (B, C, T, H, W) -> logits (B, classes)."""

    config: VideoConfig

    def __init__(self, config: VideoConfig) -> None:
        super().__init__(config)
        c = config
        if c.pooled_eps is not None and isinstance(self.pooled_norm, nn.LayerNorm):
            self.pooled_norm.eps = c.pooled_eps
        self.temporal: Encoder | None = None
        if c.arrangement == "factorised-encoder":
            blocks = build_blocks(c.temporal_depth, self.temporal_block, c.regularization.drop_path, rises=False)
            self.temporal = Encoder(c.width, blocks, norm=False)

    def build_block(self, index: int, drop_path: float) -> nn.Module:
        """Build the block at `index`; with `factorised-attention`, each block also has attention over time."""
        c, block = self.config, super().build_block(index, drop_path)
        if c.arrangement != "factorised-attention":
            return block
        assert isinstance(block, Block)
        attention = self.drop_biases(Attention(c.width, c.heads, c.attention.qkv_bias))
        dropout, scale = c.regularization.dropout, c.norm.layer_scale
        time = ResidualBranch(
            attention, c.width, dropout=dropout, drop_path=drop_path, layer_scale=scale, eps=c.norm.eps
        )
        if c.temporal_zero:
            zero_output_layer(time, "out")
        return SpaceTimeBlock(block, time)

    def temporal_block(self, index: int, drop_path: float) -> Block:
        """Build a block over the time slots of a factorised encoder."""
        block = self.plain_block(index, drop_path)
        if self.config.temporal_zero:
            zero_output_layer(block.attention, "out")
            zero_output_layer(block.mlp, "fc2")
        return block

    def build_attention(self, index: int) -> nn.Module:
        """Build the attention of the block at `index`; for a block with attention over space and over time, that over
        space."""
        c = self.config
        if c.arrangement == "factorised-dot-product":
            return self.drop_biases(SpaceTimeHeads(c.width, c.heads, c.attention.qkv_bias))
        return super().build_attention(index)

    def positions_at(self, grid: tuple[int, ...]) -> Tensor:
        """Return the positions added to patch tokens: (*grid, D), or (h, w, D) if the temporal encoder adds the
        positions of time."""
        if self.temporal is not None and isinstance(self.position, SpaceTimePosition):
            return self.position.space.read(grid[1:])
        return super().positions_at(grid)

    def prepare(self, tokens: Tensor, positions: TokenPositions | None = None) -> EncoderInput:
        """Build the encoder's input from patch tokens (B, N, D): as `ViT.prepare`, or for factorised models
        (B, T, P + h w, D), each slot with prefix tokens in front.

        Raises ValueError for tokens that are not a complete grid.
        """
        if not self.config.factorised:
            return super().prepare(tokens, positions)
        positions = positions or self.native_token_positions(tokens)
        if positions.index is not None:
            raise ValueError("factorised blocks require all patches of a clip")
        slots = positions.grid[0]
        x = self.with_prefix(torch.unflatten(tokens, 1, (slots, -1)).flatten(0, 1))
        return (torch.unflatten(x, 0, (-1, slots)),)

    def encode(self, tokens: Tensor, positions: TokenPositions | None = None, all_tokens: bool = True) -> Tensor:
        """Add prefix tokens, run the blocks and the final norm: (B, N, D) -> (B, P + N, D).

        The prefix tokens of a factorised model are the means over its time slots. `all_tokens` and errors are those of
        `ViT.encode`.
        """
        if not self.config.factorised:
            return super().encode(tokens, positions, all_tokens)
        (x,) = self.prepare(tokens, positions)
        x = self.encoder.norm(self.run_temporal_blocks(self.encoder.run_blocks(x, all_tokens=all_tokens)))
        return self.join(x) if all_tokens else flatten_time_slots(x, self.config.pooled_prefix or self.config.prefix)

    def encode_to_depths(self, tokens: Tensor, depths: Sequence[int]) -> list[Tensor]:
        """Encode projected tokens to several depths: (B, *grid, D) -> for each depth t, (B, P + N, D) after t blocks.

        In a factorised encoder, depths count the blocks over space; the blocks over time follow them and are not run.
        """
        if not self.config.factorised:
            return super().encode_to_depths(tokens, depths)
        (x,) = self.prepare(self.add_positions(tokens), self.make_token_positions(tokens))
        return [self.join(output) for output in self.encoder.features(x, depths)]

    def run_temporal_blocks(self, x: Tensor) -> Tensor:
        """Run a factorised encoder's blocks over time on one vector per slot: (B, T, S, D) -> (B, T, S, D).

        If the class token is pooled, the vector of a slot is its class token, which the result replaces. Otherwise the
        vector is the mean of the slot's patch tokens, and the change of the mean is added to each of them. In both
        cases `pool` returns the mean of the results over slots.
        """
        if self.temporal is None:
            return x
        c = self.config
        slot_vectors = x[:, :, 0] if c.pool == "class" else x[:, :, c.prefix :].mean(2)
        outputs = slot_vectors
        if isinstance(self.position, SpaceTimePosition):
            outputs = slot_vectors + self.position.time.read((x.shape[1],)).to(slot_vectors)
        outputs = self.temporal(outputs)
        if c.pool == "class":
            return torch.cat([outputs[:, :, None], x[:, :, 1:]], 2)
        return torch.cat([x[:, :, : c.prefix], x[:, :, c.prefix :] + (outputs - slot_vectors)[:, :, None]], 2)

    def join(self, x: Tensor) -> Tensor:
        """Join the tokens of all slots of a factorised model to one sequence: (B, T, P + h w, D) -> (B, P + N, D)."""
        return flatten_time_slots(x, self.config.prefix)
