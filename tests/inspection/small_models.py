"""Helpers of the inspection tests: models of every kind, and synthetic attention."""

from __future__ import annotations

import torch
from torch import nn

from vitreous.inspection.hooks import AttentionCall
from vitreous.models.zoo import create_untrained_model

MEAN_POOLING = {"class_token": False, "pool": "mean"}
#: models whose blocks attend to all tokens
MODEL_KINDS = {
    "plain": {},
    "registers": {"registers": 3},
    "mean": MEAN_POOLING,
    "registers-mean": {**MEAN_POOLING, "registers": 2},
    "pooled-by-attention": {"pool": "attention"},
    "distilled": {"pool": "distilled"},
    "relative": {"attention": {"kind": "relative"}},
    "rotary": {"attention": {"kind": "rotary"}},
    "decomposed": {**MEAN_POOLING, "attention": {"kind": "decomposed"}},
    "each": {"positions": {"at": "each"}},
    "shared": {"positions": {"at": "shared"}},
    "scaled": {"norm": {"layer_scale": 0.3}},
}
#: models with local attention
LOCAL_MODEL_KINDS = {
    "axial": {**MEAN_POOLING, "axial": True},
    "windows": {**MEAN_POOLING, "attention": {"kind": "decomposed", "window": 3, "global_blocks": (1,)}},
}
IMAGE_SIZE = (16, 20)  # patches of 4: a grid of 4 x 5


def make_model(kind: str = "plain", name: str = "ViT-16x2/4", image=IMAGE_SIZE, num_classes: int = 5, **changes):
    """A model in evaluation mode with non-uniform attention and a nonzero head."""
    torch.manual_seed(0)
    model = create_untrained_model(
        name, image, num_classes, **{**{**MODEL_KINDS, **LOCAL_MODEL_KINDS}[kind], "heads": 2, **changes}
    ).eval()
    for parameter in model.head.parameters():
        nn.init.normal_(parameter)
    for key, parameter in model.named_parameters():
        if "qkv.weight" in key:
            parameter.data *= 3
        if key.endswith(("rows", "columns")):
            nn.init.normal_(parameter)
    return model


def make_images(count: int = 2, image=IMAGE_SIZE):
    return torch.randn(count, 3, *image, generator=torch.Generator().manual_seed(1))


class FixedAttention(nn.Module):
    """Attention with fixed probabilities (B, h, T, T)."""

    def __init__(self, maps):
        super().__init__()
        self.maps, self.heads = maps, maps.shape[1]

    def compute_weights(self, x, queries=slice(None)):
        return self.maps[..., queries, :]


def make_attention_call(maps, grid, prefix=0, layer=0):
    """A recorded attention call with synthetic probabilities."""
    maps = torch.as_tensor(maps, dtype=torch.float32)
    maps = maps.view(*[1] * (4 - maps.dim()), *maps.shape)
    return AttentionCall(layer, "all", grid, prefix, FixedAttention(maps), torch.zeros(len(maps), maps.shape[-1], 1))


def draw_probabilities(*shape, seed=0):
    """Random probabilities: the last axis sums to one."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).mul(2).softmax(-1)


class SmallChunkAttentionCall(AttentionCall):
    """A recorded attention call that yields about three queries per chunk."""

    def iterate_chunks(self, max_bytes=0):
        batch = self.x[..., 0].numel() // (
            self.tokens if self.x.shape[-2] == self.tokens else self.x.shape[-3] * self.x.shape[-2]
        )
        return super().iterate_chunks(3 * 4 * batch * self.module.heads * self.tokens)
