"""Text embeddings of a served or loaded model, with a cache, and zero-shot scores of images.

B images, T texts, K labels, E channels of an embedding.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

from vitreous.data.prompts import fill_template
from vitreous.system.torch_types import from_numpy
from vitreous.weights.zero_shot import (
    ZeroShotLabels,
    average_prompt_embeddings,
    build_label_task,
    embed_texts,
    require_text_encoder,
)

if TYPE_CHECKING:
    from vitreous.weights.bundle import Bundle

MAX_CACHED_TEXTS = 10_000  # texts whose embeddings are kept; 30 MB for 768 channels


@dataclass(eq=False)
class TextEmbedder:
    """The text encoder of a bundle, with a cache of the latest `MAX_CACHED_TEXTS` texts. `source` is the name of the
    model for messages. Raises UsageError for a model without a text encoder, WeightsError without a tokenizer."""

    bundle: Bundle
    source: str
    cache: OrderedDict[str, np.ndarray] = field(default_factory=OrderedDict[str, np.ndarray], repr=False)
    lock: Lock = field(default_factory=Lock, repr=False)

    def __post_init__(self) -> None:
        self.model, self.tokenizer = require_text_encoder(self.bundle, self.source)

    def embed_texts(self, texts: Sequence[str]) -> np.ndarray:
        """Compute normalised embeddings of texts: (T, E) float32. Only texts that are not cached are computed. Raises
        UsageError for a text that is too long."""
        with self.lock:
            embeddings = {text: self.cache[text] for text in dict.fromkeys(texts) if text in self.cache}
            missing = [text for text in dict.fromkeys(texts) if text not in embeddings]
            if missing:
                computed = embed_texts(self.model, self.tokenizer, missing).numpy()
                embeddings |= dict(zip(missing, computed, strict=True))
            for text, embedding in embeddings.items():
                self.cache[text] = embedding
                self.cache.move_to_end(text)
            while len(self.cache) > MAX_CACHED_TEXTS:
                self.cache.popitem(last=False)
        width = self.model.config.num_features
        return np.stack([embeddings[text] for text in texts]) if texts else np.zeros((0, width), np.float32)

    def embed_labels(self, zero_shot: ZeroShotLabels) -> np.ndarray:
        """Compute the normalised embedding of each label, averaged over templates: (K, E) float32. Raises UsageError
        for unknown templates, and for a label that is too long."""
        templates = zero_shot.resolve(self.model.config)
        prompts = [fill_template(template, label) for label in zero_shot.labels for template in templates]
        embeddings = self.embed_texts(prompts).reshape(len(zero_shot.labels), len(templates), -1)
        return average_prompt_embeddings(from_numpy(embeddings)).numpy()

    def score_images(self, features: np.ndarray, zero_shot: ZeroShotLabels) -> np.ndarray:
        """Compute the probability of each label from image embeddings of any norm: (B, E) float32 -> (B, K) float64.

        It is the softmax over the labels, or with `multilabel` the sigmoid of each. Raises the errors of
        `embed_labels`.
        """
        labels = self.embed_labels(zero_shot)
        norms = np.linalg.norm(features, axis=1, keepdims=True)
        logits = self.model.log_scale.exp().item() * (features / np.maximum(norms, 1e-12)) @ labels.T
        if self.model.logit_bias is not None:
            logits = logits + self.model.logit_bias.item()
        return build_label_task(zero_shot.labels, zero_shot.multilabel).activate(logits)
