"""The Inception network whose features define FID (torch-fidelity, extra `gen`)."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitreous.errors import UsageError, install_hint

FIRST_WEIGHT_NAME = "Conv2d_1a_3x3.conv.weight"  # in weight files
SPATIAL_CHANNELS = 7  # channels of the middle layer that sFID compares per position
INCEPTION_BATCH_SIZE = 32
SCORE_SPLIT_IMAGES = 5000  # images per split of the Inception score


class Inception:
    """The Inception network of 2015 (arXiv:1512.00567) as in the code of FID (arXiv:1706.08500) and of ADM
    (arXiv:2105.05233), with the given weights. It maps images (n, H, W, C) to features. Raises UsageError if
    torch-fidelity is not installed, ValueError for weights of another architecture."""

    def __init__(self, weights: Mapping[str, Tensor], device: str = "cpu") -> None:
        """Build the network from `weights` by name; the first layer's are (32, 3, 3, 3)."""
        try:
            from torch_fidelity import FeatureExtractorInceptionV3
        except ImportError:
            raise UsageError(
                "Inception features need torch-fidelity, which is not installed", install_hint("gen")
            ) from None
        buffer = io.BytesIO()
        torch.save(dict(weights), buffer)  # the library only reads files
        buffer.seek(0)
        try:
            self.network: Any = FeatureExtractorInceptionV3("inception", ["2048", "logits_unbiased"], buffer)
        except RuntimeError as error:
            raise ValueError(str(error).splitlines()[-1].strip()[:200]) from None
        self.device, self.spatial_features = device, []
        self.network.to(device).Mixed_6d.branch1x1.register_forward_hook(self.store_spatial_features)

    def store_spatial_features(self, module: Any, inputs: Any, output: Tensor) -> None:
        """Store the sFID features (b, 2023) of a batch: a forward hook on (b, 192, 17, 17), the layer that TensorFlow
        calls mixed_6/conv."""
        self.spatial_features.append(output[:, :SPATIAL_CHANNELS].movedim(1, -1).flatten(1))

    @torch.inference_mode()
    def features(self, images: np.ndarray) -> dict[str, np.ndarray]:
        """Embed (n, H, W, 1 or 3) uint8 images: "features" (n, 2048) for FID, "spatial" (n, 2023) for sFID,
        and "logits" (n, 1008) without bias, all float32."""
        pixels = torch.from_numpy(images).movedim(-1, 1)
        chunks: dict[str, list[Tensor]] = {"features": [], "spatial": [], "logits": []}
        for batch in pixels.expand(-1, 3, -1, -1).split(INCEPTION_BATCH_SIZE):
            pool_features, logits = self.network(batch.to(self.device))
            for name, values in zip(chunks, (pool_features, self.spatial_features.pop(), logits), strict=True):
                chunks[name].append(values.float().cpu())
        return {name: torch.cat(values).numpy() for name, values in chunks.items()}


def inception_score(logits: np.ndarray) -> float:
    """Compute the Inception score of (n, K) logits (arXiv:1606.03498): exp of the mean KL divergence of p(class |
    image) from the mean p(class), averaged over splits of `SCORE_SPLIT_IMAGES` images."""
    scores = []
    for log_probabilities in torch.from_numpy(logits).double().log_softmax(1).split(SCORE_SPLIT_IMAGES):
        mean = log_probabilities.exp().mean(0, keepdim=True).log()
        scores.append(float((log_probabilities.exp() * (log_probabilities - mean)).sum(1).mean().exp()))
    return float(np.mean(scores))
