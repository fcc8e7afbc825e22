"""Similarity of layers, within one model or between two models: linear CKA (Kornblith et al., arXiv:1905.00414).

Shapes: n images (B per batch) of C channels, D channels of a layer; layers may have different D.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vitreous.errors import UsageError
from vitreous.inspection.hooks import (
    ResidualState,
    eval_mode,
    forward_to_last_norm,
    remove_hook_on_exit,
    visit_residual_states,
)
from vitreous.models.base import VisionModel

MIN_CKA_IMAGES = 4  # minimum number of images, because the unbiased estimate divides by n - 3


def extract_layer_features(model: VisionModel[Any], images: Tensor) -> dict[str, Tensor]:
    """Compute the mean patch token of each layer for images (B, C, *image): layer name -> (B, D) float32 on the CPU, in
    order.

    For a ViT, layers are the residual stream after the `embedding` and after `attention 0`, `mlp 0`, ...; for a BiT,
    the feature maps after the `root` and the units of its stages, `stage 0 unit 0`, ...
    """
    by_layer: dict[str, Tensor] = {}
    if not model.config.has_attention:
        body: Any = model.body
        layer_names = {body.root: "root"}
        layer_names |= {
            unit: f"stage {stage_index} unit {unit_index}"
            for stage_index, stage in enumerate(body.stages)
            for unit_index, unit in enumerate(stage.units)
        }

        def store_stage_mean(module: Any, inputs: Any, out: Tensor) -> None:
            by_layer[layer_names[module]] = out.float().mean((2, 3)).cpu()

        with eval_mode(model) as stack:
            for layer in layer_names:
                stack.enter_context(remove_hook_on_exit(layer.register_forward_hook(store_stage_mean)))
            forward_to_last_norm(model, images)
        return by_layer

    def store_layer_mean(state: ResidualState) -> None:
        name = state.sublayer if state.layer < 0 else f"{state.sublayer} {state.layer}"
        by_layer[name] = state.patches.flatten(1, -2).mean(1).cpu()

    visit_residual_states(model, images, store_layer_mean)
    return by_layer


def compute_linear_cka(features: list[Tensor], other_features: list[Tensor], unbiased: bool = True) -> Tensor:
    """Compute linear CKA between all pairs of layers, from their features (n, D) of the same n images: (layers, layers)
    float64.

    CKA = HSIC(K, L) / sqrt(HSIC(K, K) HSIC(L, L)) of the (n, n) Gram matrices K = X X^T and L = Y Y^T. HSIC is
    tr(K H L H), H the centring matrix. If `unbiased`, it is the estimate of Song et al. (2012), 0 in expectation for
    independent layers. Both are elementwise products of centred Gram matrices. CKA is 0 for a layer that is constant
    over images.

    Raises UsageError for fewer than four images.
    """
    if len(features[0]) < MIN_CKA_IMAGES:
        raise UsageError(
            f"comparing layers requires at least {MIN_CKA_IMAGES} images, got {len(features[0])}",
            "use about a hundred images",
        )
    grams, other_grams = (
        torch.stack([compute_unit_gram(x, unbiased) for x in xs]) for xs in (features, other_features)
    )
    return grams @ other_grams.T


def compute_unit_gram(x: Tensor, unbiased: bool) -> Tensor:
    """Compute the centred Gram matrix of features (n, D), flattened to a unit vector (n * n,) float64."""
    x = x.double()
    x = x - x.mean(0)
    gram = x @ x.T
    gram = (u_centre_gram(gram) if unbiased else gram).flatten()
    return gram / gram.norm().clamp(min=1e-12)


def u_centre_gram(gram: Tensor) -> Tensor:
    """U-centre a Gram matrix (n, n), with zero diagonal and row and column sums 0, for unbiased products
    (Szekely and Rizzo, 2014).

    Sums exclude the diagonal; off the diagonal:

        out[i, j] = gram[i, j] - (sum(gram[i]) + sum(gram[:, j])) / (n - 2) + sum(gram) / ((n - 1) (n - 2))
    """
    n = len(gram)
    gram = gram - gram.diag().diag()
    sums = gram.sum(1) / (n - 2)
    centred = gram - sums[:, None] - sums + gram.sum() / ((n - 1) * (n - 2))
    return centred - centred.diag().diag()
