"""Alternative weight initialisations: MAE's (`init_xavier`), timm's (`init_truncated_normal`), and mimetic
initialisation of attention (`init_mimetic`)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitreous.models.vit import ViT
from vitreous.models.zoo import Model
from vitreous.nn.attention import Attention
from vitreous.nn.position import LearnedPosition, sincos_position_table
from vitreous.system.torch_types import get_bias, svd


def init_mimetic(
    model: Model, query_key: tuple[float, float] = (0.7, 0.7), value_out: tuple[float, float] = (0.4, 0.4)
) -> None:
    """Initialise attention and positions of a ViT like those of trained ViTs, in place (mimetic initialisation,
    Trockman and Kolter, arXiv:2305.09828).

    In trained ViTs, W_q W_k^T of each head is close to a positive multiple of I, and W_v W_out to a negative multiple.
    Each product is therefore drawn as a Z + b I for query and key, and as a Z - b I for value and output, with (a, b) =
    `query_key` and `value_out`. Z is Gaussian with variance 1 / D. The product is factored by its SVD, of which a head
    keeps the d largest directions. Positions start as sines and cosines of amplitude 1/2, so neighbouring positions are
    similar. Accuracy on datasets as small as CIFAR-10 improves by several points (benchmarks/README.md).
    """
    assert isinstance(model, ViT), "mimetic initialisation requires a plain ViT"
    if isinstance(model.position, LearnedPosition):
        model.position.table.data.copy_(0.5 * sincos_position_table(model.config.table_grid, model.config.width))
    for attention in (module for module in model.encoder.modules() if isinstance(module, Attention)):
        width, head_width = model.config.width, model.config.width // attention.heads
        q, k, v = attention.qkv.weight.data.chunk(3)  # each (D, D), rows grouped by head
        for head_rows in torch.split(torch.arange(width), head_width):
            q[head_rows], k[head_rows] = compute_low_rank_factors(draw_near_identity(width, *query_key), head_width)
        v[:], out = compute_low_rank_factors(draw_near_identity(width, value_out[0], -value_out[1]), width)
        attention.out.weight.data.copy_(out.T)


def init_truncated_normal(module: nn.Module, std: float) -> None:
    """Initialise the weights of all linear layers with a truncated normal distribution, and their biases with 0, in
    place, as timm and DeiT do with `std` 0.02. Convolutions, norms, tokens and positions are unchanged."""
    for submodule in module.modules():
        if isinstance(submodule, nn.Linear):
            nn.init.trunc_normal_(submodule.weight, std=std)
            if (bias := get_bias(submodule)) is not None:
                nn.init.zeros_(bias)


def init_xavier(module: nn.Module) -> None:
    """Initialise all linear layers Xavier uniform, in place, as MAE does (arXiv:2111.06377, appendix A.1).

    Biases are 0, prefix tokens N(0, 0.02^2).
    """
    for submodule in module.modules():
        if isinstance(submodule, nn.Linear):
            nn.init.xavier_uniform_(submodule.weight)
            if (bias := get_bias(submodule)) is not None:
                nn.init.zeros_(bias)
        elif isinstance(submodule, ViT) and submodule.prefix is not None:
            nn.init.normal_(submodule.prefix, std=0.02)


def draw_near_identity(width: int, noise: float, diagonal: float) -> Tensor:
    """Draw a matrix (D, D): noise Z + diagonal I, with Z Gaussian of variance 1 / D."""
    return noise * torch.randn(width, width) * width**-0.5 + diagonal * torch.eye(width)


def compute_low_rank_factors(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Factor a matrix (D, D) into left and right, each (rank, D), such that left^T right is its best approximation."""
    u, s, vh = svd(matrix)
    root = s[:rank].sqrt()
    return (u[:, :rank] * root).T, vh[:rank] * root[:, None]
