"""Attention maps, position similarity and nearest training images of a served model, compared with explicit loops."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
import torch
from PIL import Image

from tests.conftest import make_folder
from tests.inference.server_client import save_bundle
from tests.inspection.small_models import make_model
from vitreous.apps.server.attention import (
    AttentionRequest,
    attention_to_json,
    compute_position_similarity,
    compute_visible_box,
    detect_inspections,
    render_attention_image,
    render_patch_filters,
    round_significant,
)
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.errors import UsageError, WeightsError
from vitreous.inference.index import INDEX_FILE, NeighbourIndex, PackedStrings, open_index, write_index
from vitreous.inference.predict import load
from vitreous.inference.reading import read_model_input
from vitreous.inspection.positions import get_position_embeddings
from vitreous.inspection.rollout import collect_attention_calls
from vitreous.models.zoo import create_untrained_model
from vitreous.reports.pages.thumbnails import scale_attention_map
from vitreous.tasks.classification import Classification
from vitreous.weights.bundle import Bundle, load_bundle

IMAGE_SIZE = (16, 20)  # patches of 4: 4 rows of 5


def build_bundle(kind: str = "plain") -> Bundle:
    return Bundle(make_model(kind), Classification(tuple("abcde")), ImagePreprocess(IMAGE_SIZE))


def draw_pixels(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (3, *IMAGE_SIZE), dtype=np.uint8)


def collect_attention_maps(bundle: Bundle, array: np.ndarray) -> np.ndarray:
    """(L, h, T, T): the attention weights of every block, computed with the model's own submodules."""
    return np.stack(
        [
            look.compute_weights()[0].numpy()
            for look in collect_attention_calls(
                bundle.model, bundle.preprocess.normalise(torch.from_numpy(array)[None])
            )
        ]
    )


def parse_request(bundle: Bundle, **words: str) -> AttentionRequest:
    return AttentionRequest.parse(words, bundle.model)


@pytest.mark.parametrize("kind", ["plain", "registers", "mean", "distilled", "decomposed"])
@pytest.mark.parametrize("query", ["prediction", "2,3"])
def test_raw_attention_matches_every_block_and_head(kind, query):
    bundle, array = build_bundle(kind), draw_pixels()
    attention, prefix = collect_attention_maps(bundle, array), bundle.model.config.prefix
    response = attention_to_json(bundle, array, parse_request(bundle, kind="raw", layer="all", head="all", query=query))
    assert (response["layers"], response["heads"], response["prefix_tokens"], response["grid"]) == (
        2,
        2,
        prefix,
        [4, 5],
    )
    assert response["query"] == ("prediction" if query == "prediction" else [2, 3])
    for layer in range(2):
        for head in range(2):
            if query != "prediction":
                expected = attention[layer, head, prefix + 2 * 5 + 3]
            elif bundle.model.config.pool == "mean":
                expected = sum(attention[layer, head, prefix + patch] for patch in range(20)) / 20
            else:
                expected = attention[layer, head, 0]
            assert np.allclose(response["prefix_weights"][layer][head], expected[:prefix], atol=1e-6)
            for row in range(4):
                for column in range(5):
                    assert response["weights"][layer][head][row][column] == pytest.approx(
                        expected[prefix + row * 5 + column], abs=1e-6
                    )


@pytest.mark.parametrize("fusion", ["mean", "max", "min"])
@pytest.mark.parametrize("query", [None, (3, 0)])
def test_rollout_of_a_patch_matches_the_matrix_product(fusion, query):
    bundle, array = build_bundle(), draw_pixels(1)
    joint, rows = np.eye(21), []
    for heads in collect_attention_maps(bundle, array).astype(np.float64):
        mixed = getattr(heads, fusion)(0) / 2 + np.eye(21) / 2
        joint = mixed / mixed.sum(1, keepdims=True) @ joint
        rows.append(joint[0 if query is None else 1 + query[0] * 5 + query[1]])
    response = attention_to_json(bundle, array, AttentionRequest("rollout", "all", fusion, query))
    assert np.allclose(np.reshape(response["weights"], (2, 20)), np.stack(rows)[:, 1:], atol=1e-6)
    assert np.allclose(response["prefix_weights"], np.stack(rows)[:, :1], atol=1e-6)
    last = attention_to_json(bundle, array, AttentionRequest("rollout", 1, fusion, query))
    assert last["weights"] == response["weights"][1] and np.shape(last["weights"]) == (4, 5)


@pytest.mark.parametrize("head", ["0", "1", "mean", "max", "min"])
def test_single_block_and_head_have_no_extra_axes(head):
    bundle, array = build_bundle(), draw_pixels(2)
    every = np.array(
        attention_to_json(bundle, array, parse_request(bundle, kind="raw", layer="1", head="all"))["weights"]
    )
    response = attention_to_json(bundle, array, parse_request(bundle, kind="raw", layer="1", head=head))
    expected = every[int(head)] if head.isdigit() else getattr(every, head)(0)
    assert np.allclose(response["weights"], expected, atol=1e-5) and len(response["prefix_weights"]) == 1
    assert AttentionRequest.parse({}, bundle.model) == AttentionRequest("rollout", 1, "mean", None)


@pytest.mark.parametrize(
    ("name", "value"),
    [("kind", "cooked"), ("layer", "2"), ("layer", "-1"), ("layer", "1.0"), ("head", "2"), ("head", "median"), ("query", "4,0"),
     ("query", "0,5"), ("query", "1"), ("query", "1,2,3"), ("query", "x,1"), ("query", "²,1"), ("layer", "9" * 5000), ("layer", "")],
)  # fmt: skip
def test_invalid_parameter_is_rejected_with_allowed_values(name, value):
    bundle = build_bundle()
    with pytest.raises(UsageError) as refused:
        parse_request(bundle, **{"kind": "raw", name: value})
    assert (
        refused.value.message == f"invalid {name}={value[:40]}"
        and refused.value.hint.startswith(f"set {name} to ")
        and len(str(refused.value)) < 300
    )


def test_rollout_rejects_single_heads_and_png_rejects_several_maps():
    bundle = build_bundle()
    for head in ("0", "all"):
        with pytest.raises(UsageError, match=f"head={head}"):
            parse_request(bundle, head=head)
    with pytest.raises(UsageError, match="layer=all"):
        render_attention_image(bundle, draw_pixels(), parse_request(bundle, layer="all"))


@pytest.mark.parametrize("kind", ["axial", "windows"])
def test_windowed_models_have_no_attention_maps(kind):
    bundle = build_bundle(kind)
    assert not detect_inspections(bundle)["attention"] and detect_inspections(bundle)["filters"]
    with pytest.raises(UsageError, match="windows"):
        parse_request(bundle)
    with pytest.raises(UsageError):
        attention_to_json(bundle, draw_pixels(), AttentionRequest())


def test_resnet_supports_only_filter_inspection():
    bundle = Bundle(
        create_untrained_model("BiT-R50x1", image_size=32, num_classes=3, blocks=(1,), width=16).eval(),
        Classification(tuple("abc")),
        ImagePreprocess((32, 32)),
    )
    assert (
        detect_inspections(bundle) == {"attention": False, "positions": False, "filters": True}
        and compute_position_similarity(bundle) is None
    )
    with pytest.raises(UsageError, match="ResNet"):
        parse_request(bundle)
    png = render_patch_filters(bundle)
    assert png is not None and Image.open(io.BytesIO(png)).format == "PNG"


def test_png_brightness_follows_attention_weights():
    bundle, grey = build_bundle(), np.zeros((3, *IMAGE_SIZE), np.uint8)
    request = parse_request(bundle, kind="raw", layer="0", head="1", query="0,0")
    weights = scale_attention_map(np.array(attention_to_json(bundle, grey, request)["weights"]))
    image = Image.open(io.BytesIO(render_attention_image(bundle, grey, request))).convert("L")
    side = image.width // 5
    shown = np.asarray(image, float)[side // 2 :: side, side // 2 :: side]
    assert image.width >= 448 and shown.shape == (4, 5) and shown.argmax() == weights.argmax()
    ranks = [values.ravel().argsort().argsort() for values in (shown, weights)]
    assert np.corrcoef(*ranks)[0, 1] > 0.98


def test_position_similarity_is_the_cosine_of_embeddings():
    bundle = build_bundle()
    response = compute_position_similarity(bundle)
    table = get_position_embeddings(bundle.model)["input"].reshape(20, -1)
    assert response is not None and response["grid"] == [4, 5] and response["kind"] == "learned"
    for first in range(20):
        for second in range(20):
            expected = torch.nn.functional.cosine_similarity(table[first], table[second], dim=0)
            assert response["similarity"][first][second] == pytest.approx(float(expected), abs=6e-5)
    pairs = [response["similarity"][first][second] for first in range(20) for second in range(20) if first != second]
    assert response["range"] == pytest.approx([min(pairs), max(pairs)], abs=1e-4) and response["range"][1] < 0.99


@pytest.mark.parametrize("size", [(80, 40), (40, 80), (300, 37), (20, 16), (16, 20)])
@pytest.mark.parametrize(("fit", "share"), [("crop", 1.0), ("crop", 0.875), ("crop", 0.5), ("squash", 1.0)])
def test_visible_box_matches_the_preprocessed_pixels(size, fit, share):
    width, height = size
    preprocess = ImagePreprocess(IMAGE_SIZE, 1, (0.5,), (0.5,), fit=fit, share=share, filter="bilinear")
    left, top, right, bottom = compute_visible_box(preprocess, width, height)
    x = np.broadcast_to((np.arange(width, dtype=np.float32) + 0.5) / width, (height, width))
    y = np.broadcast_to(((np.arange(height, dtype=np.float32) + 0.5) / height)[:, None], (height, width))
    across, down = (np.asarray(preprocess.fit_image(Image.fromarray(np.ascontiguousarray(ramp)))) for ramp in (x, y))
    wanted_x = left + (np.arange(20) + 0.5) / 20 * (right - left)
    wanted_y = top + (np.arange(16) + 0.5) / 16 * (bottom - top)
    assert np.allclose(across[8, 4:-4], wanted_x[4:-4], atol=4e-3) and np.allclose(
        down[4:-4, 10], wanted_y[4:-4], atol=4e-3
    )


def test_numbers_are_rounded_to_six_significant_digits():
    values = np.array([0.0, 1.0, 0.123456789, 9.87654321e-5, 1.23456789e-9, 0.999999999])
    assert round_significant(values).tolist() == [float(f"{value:.6g}") for value in values]


@pytest.fixture(scope="module")
def indexed_bundle(tmp_path_factory):
    """A bundle with an index of a folder that has one unreadable file."""
    root = tmp_path_factory.mktemp("indexed")
    data = make_folder(root / "photos", {"train": 6, "val": 1}, size=(40, 70))
    (data / "train" / "bee" / "broken.png").write_bytes(b"no picture")
    bundle = save_bundle(root / "model", classes=("ant", "bee", "cat"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        assert write_index(bundle, data) == bundle / INDEX_FILE
    return bundle, data


def test_index_contains_every_readable_image(indexed_bundle):
    bundle, data = indexed_bundle
    index, predictor = open_index(bundle), load(bundle)
    assert index is not None and len(index) == 18
    for file in sorted((data / "train").glob("*/?.png")):
        features = predictor.engine.features(read_model_input(file, predictor.card.preprocess)[None])[0]
        neighbours = index.nearest(features, 3)
        assert (neighbours[0].label, neighbours[0].name) == (file.parent.name, file.name) and neighbours[
            0
        ].similarity == pytest.approx(1, abs=1e-3)
        assert neighbours[0].similarity >= neighbours[1].similarity >= neighbours[2].similarity
        with Image.open(io.BytesIO(neighbours[0].thumbnail)) as small:
            assert small.format == "JPEG" and max(small.size) <= 64


def test_nearest_neighbours_match_the_loop():
    draw = np.random.default_rng(0)
    rows, query = draw.normal(size=(9, 7)), draw.normal(size=7).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    labels = PackedStrings.from_strings(f"ü{label}".encode() for label in range(9))
    index = NeighbourIndex(rows.astype(np.float16), labels, labels, labels)
    cosines = [float(row @ query / np.linalg.norm(query)) for row in rows]
    order = sorted(range(9), key=lambda row: -cosines[row])
    for count in (1, 4, 9, 20):
        neighbours = index.nearest(query, count)
        assert [neighbour.label for neighbour in neighbours] == [f"ü{row}" for row in order[:count]]
        assert np.allclose(
            [neighbour.similarity for neighbour in neighbours], [cosines[row] for row in order[:count]], atol=2e-3
        )
    with pytest.raises(UsageError, match="features"):
        index.nearest(query[:5])


def test_index_limit_is_deterministic_and_covers_all_classes(indexed_bundle, tmp_path):
    _, data = indexed_bundle
    bundle, names = save_bundle(tmp_path / "other", classes=("ant", "bee", "cat")), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        for _ in range(2):
            write_index(bundle, data, limit=9)
            index = open_index(bundle)
            assert index is not None and 8 <= len(index) <= 9
            names.append([(index.labels[row], index.names[row]) for row in range(len(index))])
        assert names[0] == names[1] and len({label for label, _ in names[0]}) == 3
        with pytest.raises(UsageError, match="index of 0"):
            write_index(bundle, data, limit=0)


def test_mismatched_or_damaged_index_is_rejected(indexed_bundle, tmp_path):
    bundle, _ = indexed_bundle
    content = (bundle / INDEX_FILE).read_bytes()
    other_bundle = save_bundle(tmp_path / "other", seed=1, classes=("ant", "bee", "cat"))
    assert open_index(other_bundle) is None
    (other_bundle / INDEX_FILE).write_bytes(content)
    with pytest.raises(WeightsError, match="other weights or another preprocessing"):
        open_index(other_bundle)
    same = load_bundle(bundle)
    same.preprocess = ImagePreprocess((32, 32), share=0.5)
    same.save(tmp_path / "same")
    (tmp_path / "same" / INDEX_FILE).write_bytes(content)
    with pytest.raises(WeightsError, match="other weights or another preprocessing"):
        open_index(tmp_path / "same")
    indexed = save_bundle(tmp_path / "whole", classes=("ant", "bee", "cat"))
    for broken in (
        content[:1000],
        content[: len(content) // 2],
        b"",
        b"\x93NUMPY",
        content[:600] + b"\xff" * 64 + content[664:],
    ):
        (indexed / INDEX_FILE).write_bytes(broken)
        with pytest.raises(WeightsError, match="cannot be read") as refused:
            open_index(indexed)
        assert "--index" in refused.value.hint


def test_index_with_pickled_objects_is_rejected(indexed_bundle, tmp_path):
    folder = save_bundle(tmp_path / "model", classes=("ant", "bee", "cat"))
    with np.load(indexed_bundle[0] / INDEX_FILE, allow_pickle=False) as stored:
        arrays = dict(stored)
    assert json.loads(str(arrays["record"]))["format"] == 2
    np.savez(folder / INDEX_FILE, **{**arrays, "labels": np.array([{"a": 1}], dtype=object)})
    with pytest.raises(WeightsError, match="cannot be read"):
        open_index(folder)
