"""Zero-shot classifiers: an image encoder with a head whose weights are embeddings of class names, computed by the text
encoder of the same model (CLIP, arXiv:2103.00020, section 3.1).

T texts, N tokens of a text, E channels of an embedding, K classes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitreous.data.prompts import check_label_texts, fill_template, read_labels, resolve_templates
from vitreous.data.tokenizer import Tokenizer, missing_tokenizer_error
from vitreous.errors import DataError, UsageError
from vitreous.models.config import ModelConfig
from vitreous.models.configs.image_text import ImageTextConfig
from vitreous.models.image_text import ImageTextModel
from vitreous.models.zoo import build_without_init
from vitreous.system.torch_types import from_numpy
from vitreous.tasks.classification import Classification
from vitreous.weights.adopt import PretrainedWeights, open_weights
from vitreous.weights.bundle import Bundle, load_state_dict_strict
from vitreous.weights.options import get_label_source

TEXT_BATCH = 64  # texts per forward pass
NO_TEXT_HINT = "use a model with a text encoder: CLIP-B/32-text, SigLIP2-B/16-text, PE-Core-B/16-text or their weights"


def default_templates(config: ImageTextConfig) -> str:
    """Return the name of the templates of a model: those of the prompts in its model card."""
    return "this-is" if config.bias else "photo"


def require_text_encoder(bundle: Bundle, source: str) -> tuple[ImageTextModel, Tokenizer]:
    """Return the model and the tokenizer of a bundle with a text encoder. Raises UsageError for another model,
    WeightsError without a tokenizer."""
    model: Any = bundle.model
    if not isinstance(model, ImageTextModel):
        raise UsageError(f"{source} is {model.config.name()}, which has no text encoder", NO_TEXT_HINT)
    if bundle.tokenizer is None:
        raise missing_tokenizer_error(source)
    return model, bundle.tokenizer


@torch.no_grad()
def embed_texts(model: ImageTextModel, tokenizer: Tokenizer, texts: Sequence[str]) -> Tensor:
    """Compute normalised embeddings of texts, (T, E) float32 on the CPU. Raises UsageError for a text that is longer
    than the text encoder supports, and the errors of `Tokenizer.library_tokenizer`."""
    try:
        tokens = from_numpy(tokenizer.encode_texts(texts))
    except DataError as error:
        raise UsageError(error.message, "use a shorter label or template") from None
    device = model.log_scale.device
    chunks = [model.embed_texts(chunk.to(device)).cpu() for chunk in tokens.split(TEXT_BATCH)]
    return torch.cat(chunks) if chunks else torch.zeros(0, model.config.num_features)


def average_prompt_embeddings(embeddings: Tensor) -> Tensor:
    """Average the normalised embeddings of each label's prompts, and normalise again: (K, templates, E) -> (K, E).

    Equivalent loop: `[normalise(sum(prompts) / len(prompts)) for prompts in embeddings]`.
    """
    return F.normalize(embeddings.mean(1), dim=-1)


def embed_labels(
    model: ImageTextModel, tokenizer: Tokenizer, labels: Sequence[str], templates: Sequence[str]
) -> Tensor:
    """Compute the normalised embedding of each label, averaged over templates: (K, E) float32. Raises the errors of
    `embed_texts`."""
    prompts = [fill_template(template, label) for label in labels for template in templates]
    return average_prompt_embeddings(embed_texts(model, tokenizer, prompts).unflatten(0, (-1, len(templates))))


def build_classifier_config(config: ImageTextConfig, classes: int) -> Any:
    """Return the config of the image encoder with a cosine head for `classes` labels. A projection to embeddings, which
    is the head of CLIP's image encoder, becomes the layer before the cosine head."""
    encoder: Any = config.backbone
    head = {"kind": "cosine", "representation": encoder.classes or None, "bias": config.bias}
    return encoder.with_options(classes=classes, head=head)


def build_classifier_state(model: ImageTextModel, class_embeddings: Tensor) -> dict[str, Tensor]:
    """Build the tensors of the zero-shot classifier of class embeddings (K, E): those of the image encoder, and a head
    with weights exp(t) y and biases b, so that its logits are those of `ImageTextModel.compute_logits`."""
    state = dict(model.image.state_dict())
    if model.config.backbone.classes:
        weight = state.pop("head.weight")
        state |= {
            "representation.weight": weight,
            "representation.bias": state.pop("head.bias", weight.new_zeros(len(weight))),
        }
    state["head.weight"] = model.log_scale.detach().exp() * class_embeddings.to(model.log_scale.device)
    if model.logit_bias is not None:
        state["head.bias"] = model.logit_bias.detach().repeat(len(class_embeddings))
    return state


def build_label_task(labels: Sequence[str], multilabel: bool = False) -> Classification:
    """Return the task of a zero-shot classifier: softmax over the labels, or a sigmoid of each."""
    return Classification(tuple(labels), multilabel, "sigmoid" if multilabel else "softmax")


@dataclass(frozen=True)
class ZeroShotLabels:
    """The labels of a zero-shot classifier, their templates (names of `TEMPLATES` or texts with `{}`; () for the
    default of the model), whether they are independent (`multilabel`), and the names of the classes (None: the
    labels)."""

    labels: tuple[str, ...]
    templates: tuple[str, ...] = ()
    multilabel: bool = False
    class_names: tuple[str, ...] | None = None

    def resolve(self, config: ImageTextConfig) -> tuple[str, ...]:
        """Return the templates for a model. Raises the errors of `resolve_templates`."""
        return resolve_templates(self.templates or default_templates(config))


def build_zero_shot_bundle(bundle: Bundle, zero_shot: ZeroShotLabels, source: str) -> Bundle:
    """Build the bundle of a zero-shot classifier from the bundle of an image encoder with a text encoder.

    Raises UsageError for invalid labels or templates, a label that is too long, and a model without a text encoder;
    WeightsError without a tokenizer.
    """
    check_label_texts(zero_shot.labels, zero_shot.multilabel)
    model, tokenizer = require_text_encoder(bundle, source)
    templates = zero_shot.resolve(model.config)
    embeddings = embed_labels(model, tokenizer, zero_shot.labels, templates)
    classifier = build_without_init(build_classifier_config(model.config, len(embeddings)))
    load_state_dict_strict(classifier, build_classifier_state(model, embeddings), source)
    provenance = bundle.provenance | {"zero_shot": {"model": model.config.name(), "templates": list(templates)}}
    return replace(
        bundle,
        model=classifier.eval(),
        task=build_label_task(zero_shot.class_names or zero_shot.labels, zero_shot.multilabel),
        provenance=provenance,
        tokenizer=None,
    )


def get_zero_shot_labels(source: str | os.PathLike[str]) -> ZeroShotLabels | None:
    """Return the labels of a `WeightsSource`; None if it has none, and for other sources. Raises DataError for a file
    of labels that cannot be read, UsageError for invalid labels or templates."""
    label_source = get_label_source(source)
    if label_source is None or label_source.labels is None:
        return None
    labels = read_labels(label_source.labels)
    check_label_texts(labels, label_source.multilabel)
    if label_source.templates:
        resolve_templates(label_source.templates)
    return ZeroShotLabels(labels, label_source.templates, label_source.multilabel, label_source.class_names)


def open_labelled_weights(
    source: str | os.PathLike[str], settings: dict[str, Any] | None = None, reference: ModelConfig | None = None
) -> PretrainedWeights:
    """Open weights as `open_weights`; with labels in `source`, those of the zero-shot classifier. Raises the errors of
    `open_weights` and `build_zero_shot_bundle`."""
    zero_shot = get_zero_shot_labels(source)
    weights = open_weights(source, settings, reference)
    if zero_shot is None:
        return weights
    bundle = build_zero_shot_bundle(weights.build_bundle(), zero_shot, weights.source)
    return replace(
        weights,
        config=bundle.model.config,
        task=bundle.task,
        read_state=bundle.model.state_dict,
        provenance=bundle.provenance,
        tokenizer=None,
    )
