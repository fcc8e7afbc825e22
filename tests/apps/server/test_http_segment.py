"""Semantic segmentation over HTTP: the class maps of `predict`, and rejected requests."""

import base64
import io

import numpy as np
import pytest
from PIL import Image

import vitreous
from tests.inference.server_client import ServerClient, encode_multipart, encode_noise_image, save_bundle
from tests.reports.test_scenes import CLASSES, scenes_run  # noqa: F401
from vitreous.apps.server.server import serve_in_thread


@pytest.fixture(scope="module")
def predictor(scenes_run):  # noqa: F811
    return vitreous.load(scenes_run)


@pytest.fixture(scope="module")
def site(predictor):
    with serve_in_thread(predictor) as server:
        yield ServerClient(server.address)


def open_image(content):
    return Image.open(io.BytesIO(content))


@pytest.mark.parametrize("size", [(32, 32), (48, 40), (9, 70)])
def test_http_class_maps_match_predict(site, predictor, size):
    content = encode_noise_image(3, size)
    status, document, _ = site.ask("POST", "/v1/segment", content, {"Content-Type": "image/png"})
    expected = predictor.segment(content)
    numbers = open_image(base64.b64decode(document["class_map"].partition(",")[2]))
    assert status == 200 and document["size"] == [size[1], size[0]] == list(expected.classes.shape)
    assert numbers.mode == "L" and np.array_equal(np.asarray(numbers), expected.classes)
    assert {row["class"]: row["share"] for row in document["class_shares"]} == expected.class_shares
    status, content, headers = site.ask("POST", "/v1/segment?format=png", content, {"Content-Type": "image/png"})
    assert headers["Content-Type"] == "image/png" and np.array_equal(np.asarray(open_image(content)), expected.classes)


def test_the_model_endpoint_lists_its_tasks(site):
    _, model, _ = site.ask("GET", "/v1/model")
    assert model["capabilities"]["segment"] and not model["capabilities"]["predict"] and model["capabilities"]["embed"]
    assert model["classes"] == CLASSES and len(model["class_colours"]) == 3


def test_unsupported_requests_are_rejected(site, predictor):
    status, document, _ = site.predict(encode_noise_image(1))
    assert status == 404 and document["error"]["hint"] == "POST /v1/segment"
    status, document, _ = site.ask(
        "POST", "/v1/segment?format=gif", encode_noise_image(1), {"Content-Type": "image/png"}
    )
    assert status == 422 and "json or png" in document["error"]["hint"]
    status, document, _ = site.ask(
        "POST", "/v1/segment", encode_noise_image(1, (32, 32 * 140)), {"Content-Type": "image/png"}
    )
    assert status == 413 and "tiles of 32 x 32" in document["error"]["message"]
    status, document, _ = site.ask("POST", "/v1/segment", b"none", {"Content-Type": "image/png"})
    assert status == 422 and document["error"]["code"] == "unreadable_image"
    body, headers = encode_multipart(("a", encode_noise_image(1)), ("b", encode_noise_image(2)))
    assert site.ask("POST", "/v1/segment", body, headers)[0] == 400


def test_a_classifier_rejects_segment_requests(tmp_path):
    with serve_in_thread(vitreous.load(save_bundle(tmp_path / "model"))) as server:
        status, document, _ = ServerClient(server.address).ask(
            "POST", "/v1/segment", encode_noise_image(1), {"Content-Type": "image/png"}
        )
    assert status == 404 and "not a segmentation model" in document["error"]["message"]


def test_http_features_match_embed(site, predictor):
    status, document, _ = site.ask("POST", "/v1/embed", encode_noise_image(1), {"Content-Type": "image/png"})
    assert status == 200 and document["embeddings"][0]["embedding"] == pytest.approx(
        predictor.embed(encode_noise_image(1)), rel=1e-6
    )
