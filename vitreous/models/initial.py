"""Alternative weight initialisations: MAE's, and mimetic initialisation of attention."""

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
    """Mimetic initialisation (Trockman and Kolter, arXiv:2305.09828), in place.

    In trained ViTs, W_q W_k^T is close to a positive multiple of I in each head, and W_v W_out to a negative one. Thus
    each product is drawn as a Z + b I, or a Z - b I for value and output, with Z Gaussian of variance 1 / D, and
    factored by its SVD; a head keeps its d largest directions. Positions start as sines and cosines of amplitude 1/2,
    so that neighbouring positions are similar. It gains several points on datasets as small as CIFAR-10
    (benchmarks/README.md).
    """
    assert isinstance(model, ViT), "mimetic initialisation requires a plain ViT"
    if isinstance(model.position, LearnedPosition):
        model.position.table.data.copy_(0.5 * sincos_position_table(model.config.table_grid, model.config.width))
    for attention in (module for module in model.encoder.modules() if isinstance(module, Attention)):
        width, head = model.config.width, model.config.width // attention.heads
        q, k, v = attention.qkv.weight.data.chunk(3)  # each (D, D), rows grouped by head
        for head_rows in torch.split(torch.arange(width), head):
            q[head_rows], k[head_rows] = low_rank_factors(draw_near_identity(width, *query_key), head)
        v[:], out = low_rank_factors(draw_near_identity(width, value_out[0], -value_out[1]), width)
        attention.out.weight.data.copy_(out.T)


def init_xavier(module: nn.Module) -> None:
    """Draw the weights of all linear layers from Xavier's uniform distribution, in place, as MAE does
    (arXiv:2111.06377, appendix A.1). Biases are 0, prefix tokens N(0, 0.02^2)."""
    for submodule in module.modules():
        if isinstance(submodule, nn.Linear):
            nn.init.xavier_uniform_(submodule.weight)
            if (bias := get_bias(submodule)) is not None:
                nn.init.zeros_(bias)
        elif isinstance(submodule, ViT) and submodule.prefix is not None:
            nn.init.normal_(submodule.prefix, std=0.02)


def draw_near_identity(width: int, noise: float, diagonal: float) -> Tensor:
    """(D, D): noise Z + diagonal I."""
    return noise * torch.randn(width, width) * width**-0.5 + diagonal * torch.eye(width)


def low_rank_factors(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """(D, D) -> left and right, each (rank, D), with left^T right the best approximation of the matrix."""
    u, s, vh = svd(matrix)
    root = s[:rank].sqrt()
    return (u[:, :rank] * root).T, vh[:rank] * root[:, None]
