"""Video Transformers: the arrangements of ViViT (arXiv:2103.15691, section 3.3) on the ViT's own blocks.

B batch, T time slots, N = T h w patch tokens, P prefix tokens, S = P + h w tokens of a slot, D width.

    joint                    the ViT itself, on three axes
    factorised-encoder       (B, T, S, D) -> blocks over S -> a vector of each slot (B, T, D) -> blocks over T
    factorised-attention     (B, T, S, D) -> in each block attention over S, attention over T, MLP
    factorised-dot-product   (B, T, S, D) -> in each block half of the heads over S, half over T, MLP

The tensors of space have the names of a picture's ViT. With `temporal_zero` those of time add nothing until they are
trained, so that a fresh factorised model answers as its ViT answers for the frames: logits are the mean over slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vitreous.models.configs.video import VideoConfig
from vitreous.models.vit import ViT
from vitreous.nn.attention import Attention, QkvLinearWithoutKeyBias
from vitreous.nn.block import Block, ResidualBranch
from vitreous.nn.encoder import Encoder, build_blocks
from vitreous.nn.position import SpaceTimePosition, TokenPositions
from vitreous.nn.spacetime import SpaceTimeBlock, SpaceTimeHeads, flatten_time_slots, zero_output_layer


class Video(ViT):
    """A ViT of clips, (B, C, T, H, W) -> (B, classes)."""

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

    def block(self, index: int, drop_path: float) -> nn.Module:
        """One block of the stack; with attention over time where the arrangement has it in each block."""
        c, block = self.config, super().block(index, drop_path)
        if c.arrangement != "factorised-attention":
            return block
        assert isinstance(block, Block)
        part = self.drop_key_bias(Attention(c.width, c.heads, c.attention.qkv_bias))
        dropout, scale = c.regularization.dropout, c.norm.layer_scale
        time = ResidualBranch(part, c.width, dropout=dropout, drop_path=drop_path, layer_scale=scale, eps=c.norm.eps)
        if c.temporal_zero:
            zero_output_layer(time, "out")
        return SpaceTimeBlock(block, time)

    def temporal_block(self, index: int, drop_path: float) -> Block:
        """One block over the time slots of a factorised encoder."""
        block = self.plain_block(index, drop_path)
        if self.config.temporal_zero:
            zero_output_layer(block.attention, "out")
            zero_output_layer(block.mlp, "fc2")
        return block

    def attention(self, index: int) -> nn.Module:
        """The attention of a block, that over space where there are two."""
        c = self.config
        if c.arrangement == "factorised-dot-product":
            return self.drop_key_bias(SpaceTimeHeads(c.width, c.heads, c.attention.qkv_bias))
        return self.drop_key_bias(super().attention(index))

    def drop_key_bias(self, part: nn.Module) -> nn.Module:
        """The attention, without a bias of its keys where the config says so."""
        if self.config.no_key_bias:
            part.qkv = QkvLinearWithoutKeyBias(self.config.width)
        return part

    def positions_at(self, grid: tuple[int, ...]) -> Tensor:
        """(*grid, D), or (h, w, D) where the temporal encoder adds those of time."""
        if self.temporal is not None and isinstance(self.position, SpaceTimePosition):
            return self.position.space.read(grid[1:])
        return super().positions_at(grid)

    def prepare(self, tokens: Tensor, places: TokenPositions | None = None) -> tuple[Any, ...]:
        """(B, N, D) -> what the encoder is given: as a ViT's, or (B, T, P + h w, D), each slot with prefix tokens in
        front. Raises ValueError for tokens of no whole grid."""
        if not self.config.factorised:
            return super().prepare(tokens, places)
        places = places or self.native_token_positions(tokens)
        if places.index is not None:
            raise ValueError("factorised blocks take whole clips: no patch can be left out")
        slots = places.grid[0]
        return (self.with_prefix(tokens.unflatten(1, (slots, -1)).flatten(0, 1)).unflatten(0, (-1, slots)),)

    def encode(self, tokens: Tensor, places: TokenPositions | None = None, whole: bool = True) -> Tensor:
        """(B, N, D) -> (B, P + N, D): prefix tokens, blocks, final norm; prefix tokens of a factorised model are the
        means of those of its slots. `whole` and errors are those of a ViT."""
        if not self.config.factorised:
            return super().encode(tokens, places, whole)
        (x,) = self.prepare(tokens, places)
        x = self.encoder.norm(self.run_temporal_blocks(self.encoder.run_blocks(x, whole=whole)))
        return self.join(x) if whole else flatten_time_slots(x, self.config.pooled_prefix or self.config.prefix)

    def encode_to_depths(self, tokens: Tensor, depths: Sequence[int]) -> list[Tensor]:
        """(B, *grid, D) -> for each depth t, (B, P + N, D): what `project` gave after t blocks; those over time of a
        factorised encoder come after all of them and are not among these."""
        if not self.config.factorised:
            return super().encode_to_depths(tokens, depths)
        (x,) = self.prepare(self.place(tokens), self.places(tokens))
        return [self.join(output) for output in self.encoder.features(x, depths)]

    def run_temporal_blocks(self, x: Tensor) -> Tensor:
        """(B, T, S, D) -> (B, T, S, D): a factorised encoder's vectors of slots, after its blocks over time.

        The vector of a slot is its class token if that is pooled, which is replaced; else the mean of its patch tokens,
        each of which changes by as much as the mean does. So `pool` reads the mean over slots of what is related.
        """
        if self.temporal is None:
            return x
        c = self.config
        before = x[:, :, 0] if c.pool == "class" else x[:, :, c.prefix :].mean(2)
        after = before
        if isinstance(self.position, SpaceTimePosition):
            after = before + self.position.time.read((x.shape[1],)).to(before)
        after = self.temporal(after)
        if c.pool == "class":
            return torch.cat([after[:, :, None], x[:, :, 1:]], 2)
        return torch.cat([x[:, :, : c.prefix], x[:, :, c.prefix :] + (after - before)[:, :, None]], 2)

    def join(self, x: Tensor) -> Tensor:
        """(B, T, P + h w, D) -> (B, P + N, D): all tokens of a factorised model as one sequence."""
        return flatten_time_slots(x, self.config.prefix)
