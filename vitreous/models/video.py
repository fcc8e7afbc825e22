"""Video Transformers: the arrangements of ViViT (arXiv:2103.15691, section 3.3) on the ViT's own blocks.

B batch, T time slots, N = T h w patch tokens, P prefix tokens, S = P + h w tokens of a slot, D width.

    joint                    the ViT itself, on three axes
    factorised-encoder       (B, T, S, D) -> blocks over S -> a vector of each slot (B, T, D) -> blocks over T
    factorised-attention     (B, T, S, D) -> in each block attention over S, attention over T, MLP
    factorised-dot-product   (B, T, S, D) -> in each block half of the heads over S, half over T, MLP

Spatial tensors have the names of an image ViT. With `temporal_zero`, temporal layers add nothing until they are
trained, so a fresh factorised model has the outputs of its ViT on the frames: logits are the mean over slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vitreous.models.configs.video import VideoConfig
from vitreous.models.vit import EncoderInput, ViT
from vitreous.nn.attention import Attention, QkvLinearWithoutKeyBias
from vitreous.nn.block import Block, ResidualBranch
from vitreous.nn.encoder import Encoder, build_blocks
from vitreous.nn.position import SpaceTimePosition, TokenPositions
from vitreous.nn.spacetime import SpaceTimeBlock, SpaceTimeHeads, flatten_time_slots, zero_output_layer


class Video(ViT):
    """A ViT for clips, (B, C, T, H, W) -> (B, classes)."""

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
        """Build one block of the stack. With `factorised-attention`, each block also has attention over time."""
        c, block = self.config, super().build_block(index, drop_path)
        if c.arrangement != "factorised-attention":
            return block
        assert isinstance(block, Block)
        attention = self.drop_key_bias(Attention(c.width, c.heads, c.attention.qkv_bias))
        dropout, scale = c.regularization.dropout, c.norm.layer_scale
        time = ResidualBranch(
            attention, c.width, dropout=dropout, drop_path=drop_path, layer_scale=scale, eps=c.norm.eps
        )
        if c.temporal_zero:
            zero_output_layer(time, "out")
        return SpaceTimeBlock(block, time)

    def temporal_block(self, index: int, drop_path: float) -> Block:
        """Build one block over the time slots of a factorised encoder."""
        block = self.plain_block(index, drop_path)
        if self.config.temporal_zero:
            zero_output_layer(block.attention, "out")
            zero_output_layer(block.mlp, "fc2")
        return block

    def build_attention(self, index: int) -> nn.Module:
        """Build the attention of a block; if there are two, the one over space."""
        c = self.config
        if c.arrangement == "factorised-dot-product":
            return self.drop_key_bias(SpaceTimeHeads(c.width, c.heads, c.attention.qkv_bias))
        return self.drop_key_bias(super().build_attention(index))

    def drop_key_bias(self, attention: nn.Module) -> nn.Module:
        """Return the attention, without a bias of its keys if the config disables it."""
        if self.config.no_key_bias:
            attention.qkv = QkvLinearWithoutKeyBias(self.config.width)
        return attention

    def positions_at(self, grid: tuple[int, ...]) -> Tensor:
        """(*grid, D), or (h, w, D) if the temporal encoder adds the positions of time."""
        if self.temporal is not None and isinstance(self.position, SpaceTimePosition):
            return self.position.space.read(grid[1:])
        return super().positions_at(grid)

    def prepare(self, tokens: Tensor, positions: TokenPositions | None = None) -> EncoderInput:
        """(B, N, D) -> the encoder's input: as for a ViT, or (B, T, P + h w, D), each slot with prefix tokens in front.
        Raises ValueError for tokens that are not a complete grid."""
        if not self.config.factorised:
            return super().prepare(tokens, positions)
        positions = positions or self.native_token_positions(tokens)
        if positions.index is not None:
            raise ValueError("factorised blocks require all patches of a clip")
        slots = positions.grid[0]
        x = self.with_prefix(torch.unflatten(tokens, 1, (slots, -1)).flatten(0, 1))
        return (torch.unflatten(x, 0, (-1, slots)),)

    def encode(self, tokens: Tensor, positions: TokenPositions | None = None, all_tokens: bool = True) -> Tensor:
        """(B, N, D) -> (B, P + N, D): prefix tokens, blocks, final norm.

        The prefix tokens of a factorised model are the means of those of its slots. `all_tokens` and errors are as in
        `ViT.encode`.
        """
        if not self.config.factorised:
            return super().encode(tokens, positions, all_tokens)
        (x,) = self.prepare(tokens, positions)
        x = self.encoder.norm(self.run_temporal_blocks(self.encoder.run_blocks(x, all_tokens=all_tokens)))
        return self.join(x) if all_tokens else flatten_time_slots(x, self.config.pooled_prefix or self.config.prefix)

    def encode_to_depths(self, tokens: Tensor, depths: Sequence[int]) -> list[Tensor]:
        """(B, *grid, D) -> for each depth t, (B, P + N, D): the output of `project` after t blocks.

        The blocks over time of a factorised encoder follow all of them and are not counted.
        """
        if not self.config.factorised:
            return super().encode_to_depths(tokens, depths)
        (x,) = self.prepare(self.add_positions(tokens), self.make_token_positions(tokens))
        return [self.join(output) for output in self.encoder.features(x, depths)]

    def run_temporal_blocks(self, x: Tensor) -> Tensor:
        """(B, T, S, D) -> (B, T, S, D): run a factorised encoder's blocks over time on one vector per slot.

        The vector of a slot is its class token if that is pooled; it is replaced by the result. Otherwise it is the
        mean of the slot's patch tokens, and each of them changes by as much as the mean. Thus `pool` returns the mean
        over slots of the results.
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
        """(B, T, P + h w, D) -> (B, P + N, D): all tokens of a factorised model as one sequence."""
        return flatten_time_slots(x, self.config.prefix)
