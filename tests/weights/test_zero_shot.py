"""Zero-shot classifiers: their logits are those of the text encoder, they are ordinary bundles, and bad input."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F

from tests.weights.pairs import save_pair
from vitreous.data.prompts import TEMPLATES, read_labels, resolve_templates
from vitreous.errors import UsageError, WeightsError
from vitreous.inference.open_model import open_bundle
from vitreous.inference.zero_shot import TextEmbedder
from vitreous.system.torch_types import from_numpy
from vitreous.tasks.classification import Classification
from vitreous.weights.bundle import load_bundle
from vitreous.weights.convert import convert
from vitreous.weights.options import WeightsSource
from vitreous.weights.zero_shot import ZeroShotLabels, embed_labels

LABELS = ("cat", "dog", "bird on a wire")


@pytest.fixture(scope="module", params=["siglip", "clip"])
def pair(request, tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp(request.param), request.param)


def draw_images(count: int = 5) -> torch.Tensor:
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("multilabel", [False, True])
@torch.no_grad()
def test_logits_are_those_of_the_prompts(pair, multilabel):
    bundle = load_bundle(pair)
    source = WeightsSource(str(pair), labels=LABELS, templates=("photo",), multilabel=multilabel)
    classifier = open_bundle(source)
    tokens = from_numpy(bundle.tokenizer.encode_texts([f"a photo of a {label}." for label in LABELS]))
    images = draw_images()
    expected = bundle.model.compute_logits(bundle.model.embed_images(images), bundle.model.embed_texts(tokens))
    assert torch.allclose(classifier.model(images), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    assert classifier.task == Classification(LABELS, multilabel, "sigmoid" if multilabel else "softmax")
    features = bundle.model(images).numpy()
    scores = TextEmbedder(bundle, "pair").score_images(features, ZeroShotLabels(LABELS, ("photo",), multilabel))
    assert from_numpy(scores).float().allclose((expected.sigmoid() if multilabel else expected.softmax(1)), atol=1e-5)


@torch.no_grad()
def test_class_embeddings_are_normalised_means_over_templates(pair):
    bundle = load_bundle(pair)
    templates = ("a photo of a {}.", "{}", "this is a {}")
    ours = embed_labels(bundle.model, bundle.tokenizer, LABELS, templates)
    for label, embedding in zip(LABELS, ours, strict=True):
        total = torch.zeros_like(embedding)
        for template in templates:
            tokens = from_numpy(bundle.tokenizer.encode_texts([template.format(label)]))
            total += F.normalize(bundle.model.text(tokens)[0], dim=0)
        mean = total / len(templates)
        assert torch.allclose(embedding, mean / mean.norm(), atol=1e-6)


def test_a_saved_classifier_is_an_ordinary_bundle(pair, tmp_path):
    source = WeightsSource(str(pair), labels=LABELS)
    convert(source, tmp_path / "classifier")
    saved, images = load_bundle(tmp_path / "classifier"), draw_images()
    assert saved.classes == LABELS and saved.tokenizer is None
    assert torch.equal(saved.model(images), open_bundle(source).model(images))
    assert saved.provenance["zero_shot"]["templates"] == list(TEMPLATES["photo" if "clip" in str(pair) else "this-is"])
    with pytest.raises(UsageError, match="huggingface cannot represent"):
        convert(tmp_path / "classifier", tmp_path / "hf", to="huggingface")
    convert(tmp_path / "classifier", tmp_path / "other", num_classes=5)
    assert load_bundle(tmp_path / "other").model(images).shape == (5, 5)


def test_text_embeddings_are_cached(pair, monkeypatch):
    embedder = TextEmbedder(load_bundle(pair), "pair")
    first = embedder.embed_texts(["a cat", "a dog", "a cat"])
    assert (first[0] == first[2]).all() and first.shape[0] == 3 and len(embedder.cache) == 2
    monkeypatch.setattr("vitreous.inference.zero_shot.embed_texts", None)  # would fail if it were called
    assert (embedder.embed_texts(["a dog"])[0] == first[1]).all()
    assert embedder.embed_texts([]).shape == (0, first.shape[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labels": ()}, "no labels"),
        ({"labels": ("cat", " ")}, "a label is empty"),
        ({"labels": ("cat", "dog", "Cat ")}, "the label 'Cat' repeats"),
        ({"labels": ("cat",)}, "'cat' is the only label, so its probability is always 1"),
        ({"labels": LABELS, "templates": ("a photo",)}, "unknown templates 'a photo'"),
        ({"labels": LABELS, "templates": ("opena",)}, "unknown templates 'opena'"),
        ({"labels": LABELS, "templates": ("{} and {}",)}, re.escape("unknown templates '{} and {}'")),
    ],
)
def test_invalid_labels_are_rejected_before_weights_are_opened(options, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        open_bundle(WeightsSource(str(tmp_path / "missing"), **options))


def test_other_models_long_labels_and_missing_tokenizers_are_rejected(pair, tmp_path):
    with pytest.raises(UsageError, match=r"has \d+ tokens, but the text encoder supports 40"):
        open_bundle(WeightsSource(str(pair), labels=("cat", "dog " * 40)))
    convert(WeightsSource(str(pair), labels=LABELS), tmp_path / "classifier")
    with pytest.raises(UsageError, match="has no text encoder"):
        open_bundle(WeightsSource(str(tmp_path / "classifier"), labels=LABELS))
    bundle = load_bundle(pair)
    bundle.tokenizer = None
    bundle.save(tmp_path / "without")
    with pytest.raises(WeightsError, match="has no tokenizer"):
        open_bundle(WeightsSource(str(tmp_path / "without"), labels=LABELS))


def test_templates_and_files_of_labels(tmp_path):
    assert len(TEMPLATES["openai"]) == 80 and set(TEMPLATES["openai-7"]) < set(TEMPLATES["openai"])
    assert all(template.count("{}") == 1 for templates in TEMPLATES.values() for template in templates)
    assert resolve_templates(("none", "a {}", "photo", "none")) == ("{}", "a {}", "a photo of a {}.")
    path = tmp_path / "labels.txt"
    path.write_text("cat\n\n  hot dog \r\n")
    assert read_labels([str(path)]) == ("cat", "hot dog")
