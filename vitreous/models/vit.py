"""The Vision Transformer, "An Image is Worth 16x16 Words" (arXiv:2010.11929).

The forward pass consists of public methods that can be called one at a time:

    images (B, C, *image) -> project (B, *grid, D) -> add_positions (B, N, D) -> encode (B, P + N, D)
        -> pool (B, D) -> classify (B, K)

If only the class token is pooled, `forward` computes only this token in the last block; `features` computes every
token.

Shapes: B batch, C channels, N patch tokens, P prefix tokens, D width, K classes, k selected patches; image and grid are
one length per axis.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitreous.models.base import VisionModel, zero_parameters
from vitreous.models.configs.vit import ViTConfig
from vitreous.models.vit_parts import (
    build_classifier_head,
    build_mlp,
    build_position,
    build_prefix_positions,
    build_rotary_form,
)
from vitreous.nn.attention import Attention, QKNormAttention, QkvLinearWithoutKeyBias
from vitreous.nn.block import Block, drop_bias, replace_layer_norms
from vitreous.nn.encoder import Encoder, build_blocks
from vitreous.nn.grid import gather_tokens, patchify
from vitreous.nn.local import LocalAttention
from vitreous.nn.pool import AttentionPool
from vitreous.nn.position import (
    BlockWithPosition,
    BlockWithSharedPosition,
    Position,
    TokenPositions,
    gather_token_positions,
)
from vitreous.nn.relative import RelativeAttention
from vitreous.nn.rotary import InnerNormRotaryAttention, QKNormRotaryAttention, RotaryAttention
from vitreous.system.torch_types import get_bias

if TYPE_CHECKING:
    from vitreous.nn.convstem import ConvStem
    from vitreous.nn.resnet import ResNetStem

#: arguments of the encoder: tokens, and if its blocks need them, positions
EncoderInput: TypeAlias = tuple[Tensor, *tuple[Tensor | TokenPositions, ...]]


class ViT(VisionModel[ViTConfig]):
    """Vision Transformer (Eqs. 1-4), initialised as in Google's code:

    | parameter | drawn from |
    |---|---|
    | patch projection | LeCun normal, truncated at two std; bias 0 |
    | class token, positions, registers | 0; N(0, 0.02^2); N(0, 0.02^2) |
    | q, k, v, output, MLP matrices | Xavier uniform per matrix; biases 0, those of the MLP N(0, 1e-6^2) |
    | representation layer | LeCun normal; bias 0 |
    | head | 0 |
    """

    any_size: bool  # do not warn about images of other sizes than the config's
    dropout: float  # dropout of patch and prefix tokens before the blocks
    stem: ConvStem | ResNetStem | None
    cell: tuple[int, ...]  # size of a token's input along each axis, in pixels or positions of the stem's map
    patch_norm: nn.Module
    position: Position | None
    slots: nn.Parameter | None  # position embeddings of the first prefix tokens
    first_norm: nn.Module
    encoder: Encoder
    neck: nn.Module | None
    pooling: AttentionPool | None
    head: nn.Module

    def __init__(self, config: ViTConfig) -> None:
        if not isinstance(self, config.model_class()):
            problem = f"{type(config).__name__} is the config of {config.module.rpartition(':')[2]}"
            raise TypeError(f"{problem}, not of {type(self).__name__}: use build_model(config)")
        super().__init__()
        self.config = c = config
        self.any_size = False
        self.dropout = c.regularization.dropout
        self.stem = self.build_stem()
        self.cell = c.cell
        channels = c.channels if self.stem is None else self.stem.width_out
        self.projection = nn.Linear(channels * math.prod(self.cell), c.width, bias=c.projection_bias)
        self.patch_norm = nn.LayerNorm(c.width, eps=c.norm.eps) if c.norm.patches else nn.Identity()
        self.position = build_position(c) if c.positions.at != "each" else None
        self.prefix = nn.Parameter(torch.empty(c.prefix, c.width).normal_(std=0.02)) if c.prefix else None
        if self.prefix is not None and c.class_token:
            nn.init.zeros_(self.prefix.data[0])
        self.slots = build_prefix_positions(c) if c.positions.at != "each" else None
        self.first_norm = self.build_first_norm()
        blocks = build_blocks(c.depth, self.build_block, c.regularization.drop_path, c.regularization.drop_path_rises)
        self.encoder = Encoder(c.width, blocks, c.norm.eps, c.norm.final == "tokens", read=c.pooled_prefix)
        self.neck = self.build_neck()
        pool_hidden = c.head.pool_hidden or c.mlp.hidden
        self.pooling = (
            AttentionPool(c.width, c.head.pool_heads or c.heads, pool_hidden, c.norm.eps, gelu=c.mlp.gelu)
            if c.pool == "attention"
            else None
        )
        self.pooled_norm = nn.LayerNorm(c.width_out, eps=c.norm.eps) if c.norm.final == "pooled" else nn.Identity()
        self.representation = nn.Linear(c.width_out, c.head.representation) if c.head.representation else None
        self.head = self.build_head()
        for linear in filter(None, (self.projection, self.representation)):
            std = linear.in_features**-0.5 / 0.87962566103423978  # corrects for truncation at 2 std
            nn.init.trunc_normal_(linear.weight, std=std, a=-2 * std, b=2 * std)
            if (bias := get_bias(linear)) is not None:
                nn.init.zeros_(bias)
        if c.norm.kind == "rms":
            replace_layer_norms(self)

    def position_tables(self) -> dict[str, Position]:
        """Return the positions added to patch tokens, by location: `input`, or `block 0`, `block 1`, ..."""
        if self.config.positions.kind == "none":
            return {}
        if self.config.positions.at != "each":
            return super().position_tables()
        blocks = enumerate(self.blocks())
        return {f"block {index}": block.position for index, block in blocks if isinstance(block, BlockWithPosition)}

    def build_head(self) -> nn.Module:
        """Build a head (B, F) -> (B, K) whose weights are 0."""
        return zero_parameters(build_classifier_head(self.config))

    def build_block(self, index: int, drop_path: float) -> nn.Module:
        """Build the block at `index` with this stochastic depth rate, including position embeddings that are added in
        each block."""
        c = self.config

        if c.positions.at == "each":
            position = build_position(c)
            assert position is not None
            return BlockWithPosition(self.plain_block(index, drop_path), position, build_prefix_positions(c))
        block = self.plain_block(index, drop_path)
        return BlockWithSharedPosition(block) if c.positions.at == "shared" else block

    def plain_block(self, index: int, drop_path: float) -> Block:
        """Build attention and MLP of the block at `index`, without position embeddings."""
        c, attention = self.config, self.build_attention(index)
        return Block(
            c.width,
            attention,
            mlp=build_mlp(c),
            dropout=c.regularization.dropout,
            drop_path=drop_path,
            layer_scale=c.norm.layer_scale,
            eps=c.norm.eps,
        )

    def build_stem(self) -> ConvStem | ResNetStem | None:
        """Build the layers before the projection, (B, C, *image) -> (B, *map, channels); None for a plain ViT."""
        return None

    def build_first_norm(self) -> nn.Module:
        """Build the layer that is applied to prefix and patch tokens before the first block."""
        return nn.Identity()

    def build_neck(self) -> nn.Module | None:
        """Build the layers after the encoder of a model on a grid, (B, *grid, D) -> (B, *grid, width_out); None for a
        plain ViT."""
        return None

    def build_attention(self, index: int) -> nn.Module:
        """Build the attention of the block at `index`."""
        c, attention = self.config, self.config.attention
        size = c.width, c.heads
        if attention.kind == "relative":
            return self.drop_biases(RelativeAttention(*size, c.prefix + math.prod(c.grid), attention.qkv_bias))
        if attention.kind == "rotary":
            options = len(c.grid), attention.qkv_bias
            form = build_rotary_form(c)
            if attention.inner_norm:
                return self.drop_biases(InnerNormRotaryAttention(*size, *options, form=form, eps=c.norm.eps))
            rotary_class = QKNormRotaryAttention if attention.qk_norm else RotaryAttention
            return self.drop_biases(rotary_class(*size, *options, form=form))
        if attention.window:
            window = attention.window if index in c.windowed_blocks else 0
            return self.drop_biases(LocalAttention(*size, window, attention.qkv_bias))
        return self.drop_biases((QKNormAttention if attention.qk_norm else Attention)(*size, attention.qkv_bias))

    def drop_biases(self, attention: Attention) -> Attention:
        """Remove the biases of an attention that the config disables, and return it."""
        if not self.config.attention.key_bias:
            attention.qkv = QkvLinearWithoutKeyBias(self.config.width)
        if not self.config.attention.out_bias:
            drop_bias(attention.out)
        return attention

    def forward(self, images: Tensor) -> Tensor:
        """Compute logits: (B, C, *image) -> (B, K)."""
        self.warn_about_size(images, stacklevel=6)
        tokens = self.project(images)
        return self.forward_tokens(self.add_positions(tokens), self.make_token_positions(tokens))

    def first_layer(self) -> nn.Module:
        """Return the layer whose input is the image: the projection, or the first convolution of the stem."""
        return self.projection if self.stem is None else self.stem.first_layer()

    def forward_patches(self, images: Tensor, index: Tensor) -> Tensor:
        """Compute logits from some of the patches: images (B, C, *image), indices of patches (B, k) int64 -> (B, K)."""
        tokens = self.project(images)
        return self.forward_tokens(
            gather_tokens(self.add_positions(tokens), index), self.make_token_positions(tokens, index)
        )

    def encode_patches(self, images: Tensor, index: Tensor) -> Tensor:
        """Compute every token from some of the patches: images (B, C, *image), indices of patches (B, k) int64 ->
        (B, P + k, D)."""
        tokens = self.project(images)
        return self.encode(gather_tokens(self.add_positions(tokens), index), self.make_token_positions(tokens, index))

    def blocks(self) -> list[nn.Module]:
        """Return the residual blocks in order."""
        return list(self.encoder.blocks)

    def features(self, images: Tensor) -> Tensor:
        """Compute every token after the last norm: (B, C, *image) -> (B, P + N, D)."""
        self.warn_about_size(images, stacklevel=3)
        tokens = self.project(images)
        return self.encode(self.add_positions(tokens), self.make_token_positions(tokens))

    def features_after(self, images: Tensor, depths: Sequence[int]) -> list[Tensor]:
        """Compute every token after t blocks, before the last norm, for each depth t: (B, C, *image) -> list of
        (B, P + N, D).

        Later blocks are not computed. Raises ValueError for a depth out of range.
        """
        return self.encode_to_depths(self.project(images), depths)

    def features_at(self, images: Tensor, strides: Sequence[int]) -> list[Tensor]:
        """Compute the maps of these strides, in pixels: (B, C, *image) -> (B, *grid, D) per stride.

        A ViT has a single map, the patch tokens after the last block, before any last norm or neck; `config.levels`
        lists it. Raises ValueError if no map has a stride.
        """
        self.config.check_strides(strides)
        tokens = self.project(images)
        return [self.last_map(tokens)] * len(strides)

    def encode_to_depths(self, tokens: Tensor, depths: Sequence[int]) -> list[Tensor]:
        """Encode projected tokens to several depths: (B, *grid, D) -> for each depth t, (B, P + N, D) after t
        blocks."""
        x, *context = self.prepare(self.add_positions(tokens), self.make_token_positions(tokens))
        return [output.flatten(1, -2) for output in self.encoder.features(x, depths, *context)]

    def last_map(self, tokens: Tensor) -> Tensor:
        """Compute the patch tokens after the last block from projected tokens: (B, *grid, D) -> (B, *grid, D)."""
        encoded = self.encode_to_depths(tokens, [self.config.depth])[0]
        return torch.unflatten(encoded[:, self.config.prefix :], 1, tuple(tokens.shape[1:-1]))

    def warn_about_size(self, images: Tensor, stacklevel: int) -> None:
        """Warn once if the size of images (B, C, *image) differs from the native size, unless `any_size` is set.

        There is no warning for smaller images in training (progressive resizing), and for compiled, exported or traced
        graphs.
        """
        if self.any_size or torch.compiler.is_compiling() or torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
            return
        self.check_images(images)
        size, native_size = tuple(images.shape[2:]), self.config.image
        if (
            size == native_size
            or len(size) != len(native_size)
            or (self.training and all(a <= b for a, b in zip(size, native_size, strict=True)))
        ):
            return
        self.any_size = True
        size_text, native_text = (" x ".join(map(str, image_size)) for image_size in (size, native_size))
        problem = (
            f"images of {size_text} pixels, but the model was created for {native_text}: positions are resized to "
            "their grid of patches, and predictions are mostly worse"
        )
        hint = (
            f"Resize the images; or create(…, image_size={max(size)}) and fine-tune at that size; or, if this is "
            "intended, set model.any_size = True"
        )
        warnings.warn(f"{problem}. {hint}", stacklevel=stacklevel)

    def project(self, images: Tensor) -> Tensor:
        """Project flattened patches of the image, or of the stem's map, linearly (E in Eq. 1): (B, C, *image) ->
        (B, *grid, D)."""
        self.check_images(images)
        if self.stem is not None:
            images = self.stem(images.to(next(self.stem.parameters()).dtype)).movedim(-1, 1)
        return self.patch_norm(self.projection(patchify(images, self.cell)))

    def add_positions(self, tokens: Tensor) -> Tensor:
        """Add positions, resized to the input's grid, and flatten: (B, *grid, D) -> (B, N, D)."""
        if self.position is not None and self.config.positions.at == "input":
            table = self.positions_at(tuple(tokens.shape[1:-1])).to(tokens.device)
            tokens = tokens + (table.to(tokens.dtype) if self.training else table)  # frozen models sum in float32
        return F.dropout(tokens.flatten(1, -2), self.dropout, self.training)

    def positions_at(self, grid: tuple[int, ...]) -> Tensor:
        """Return the positions added to the patch tokens of a grid: (*grid, D), or a shape that broadcasts to it."""
        assert self.position is not None
        return self.position.read(grid)

    def make_token_positions(self, tokens: Tensor, index: Tensor | None = None) -> TokenPositions:
        """Create the `TokenPositions` of tokens (B, *grid, D) for `encode`; `index` (B, k) int64 selects some of the
        patches. In training with `rotary.rescale`, they have a random scale."""
        limit = math.log(self.config.rotary.rescale)
        scale = torch.empty(1, device=tokens.device).uniform_(-limit, limit).exp() if self.training and limit else None
        return TokenPositions(tuple(tokens.shape[1:-1]), self.config.prefix, index, scale)

    def forward_tokens(self, tokens: Tensor, positions: TokenPositions | None = None) -> Tensor:
        """Compute logits from tokens with positions: (B, N, D) -> (B, K). Only the tokens that `pool` uses are
        computed.

        Raises the errors of `encode`.
        """
        return self.classify(self.pool(self.encode(tokens, positions, all_tokens=False)))

    def encode(self, tokens: Tensor, positions: TokenPositions | None = None, all_tokens: bool = True) -> Tensor:
        """Add prefix tokens, run the blocks and the final norm: (B, N, D) -> (B, P + N, D).

        If `all_tokens` is false and `pool` uses only the R leading tokens, the output is (B, R, D). Models whose blocks
        use positions require `positions`, unless the tokens are those of the native grid; other models accept any
        number of tokens in any order. Raises ValueError if positions are missing, or for missing patches in a model on
        a grid.
        """
        x, *context = self.prepare(tokens, positions)
        if not self.config.on_grid:
            return self.encoder(x, *context, all_tokens=all_tokens)
        x = self.encoder(x)
        return (x if self.neck is None else self.neck(x)).flatten(1, -2)

    def prepare(self, tokens: Tensor, positions: TokenPositions | None = None) -> EncoderInput:
        """Build the encoder's arguments from tokens (B, N, D): (B, P + N, D) with prefix tokens in front, or
        (B, *grid, D) for blocks on a grid; then the positions for blocks that need them.

        Raises the errors of `encode`.
        """
        c = self.config
        if not c.needs_positions:
            return (self.with_prefix(tokens),)
        positions = positions or self.native_token_positions(tokens)
        tokens = self.with_prefix(tokens)
        if c.on_grid:
            if positions.index is not None:
                raise ValueError("axial and windowed blocks require all patches of the grid")
            return (torch.unflatten(tokens, 1, positions.grid),)
        if c.positions.at == "shared":
            assert self.position is not None
            return tokens, gather_token_positions(self.position, self.slots, positions)
        return tokens, positions

    def with_prefix(self, tokens: Tensor) -> Tensor:
        """Add prefix tokens in front, with their positions, and apply the norm before the blocks: (B, N, D) ->
        (B, P + N, D)."""
        c = self.config
        if self.prefix is not None:
            prefix = self.prefix
            if self.slots is not None and c.positions.at == "input":
                prefix = torch.cat([prefix[: c.prefix_position_count] + self.slots, prefix[c.prefix_position_count :]])
            prefix = F.dropout(prefix.expand(tokens.shape[0], -1, -1), self.dropout, self.training)
            tokens = torch.cat([prefix, tokens], dim=1)
        return self.first_norm(tokens)

    def native_token_positions(self, tokens: Tensor) -> TokenPositions:
        """Create the `TokenPositions` of patch tokens (B, N, D) of the native grid. Raises ValueError for another
        number of tokens."""
        if tokens.shape[1] != math.prod(self.config.grid):
            grid = " x ".join(map(str, self.config.grid))
            raise ValueError(f"{tokens.shape[1]} tokens do not match the native grid, {grid}: pass their positions")
        return TokenPositions(self.config.grid, self.config.prefix)

    def last_norm(self, x: Tensor) -> Tensor:
        """Apply the norm after the last block: (..., D) -> (..., D)."""
        return self.encoder.norm(x)

    def pool(self, tokens: Tensor) -> Tensor:
        """Pool tokens to the head's input: (B, P + N, D) -> (B, D).

        This is the class token (Eq. 4), the mean of the patch tokens, or attention pooling. For `distilled` it is
        (B, 2 D), the class token and the distillation token, concatenated.
        """
        if self.pooling is not None:
            pooled = self.pooling(tokens)
        elif self.config.pool == "mean":
            pooled = tokens[:, self.config.prefix :].mean(1)
        elif self.config.pool == "distilled":
            pooled = tokens[:, :2].flatten(1)
        else:
            pooled = tokens[:, 0]
        return self.pooled_norm(pooled)

    def classify(self, pooled: Tensor) -> Tensor:
        """Apply the representation layer, if there is one (section 3.2), and the head: (B, D) -> (B, K). The
        representation layer has a tanh; features of a cosine head are normalised instead."""
        if self.representation is not None:
            pooled = self.representation(pooled)
        if self.config.head.kind == "cosine":
            pooled = F.normalize(pooled.float(), dim=-1).to(pooled.dtype)
        elif self.representation is not None:
            pooled = pooled.tanh()
        return self.head(pooled)
