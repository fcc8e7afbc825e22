"""Zero-shot classification over HTTP: the probabilities of `predict`, cached text embeddings, and rejected requests."""

import json

import pytest

import vitreous
from tests.inference.server_client import ServerClient, encode_multipart, encode_noise_image, save_bundle
from tests.weights.pairs import save_pair
from vitreous.apps.server.server import serve_in_thread
from vitreous.weights.options import WeightsSource

LABELS = ("cat", "dog", "bird on a wire")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def predictor(pair):
    return vitreous.load(pair, headless=True, precision="fp32")


@pytest.fixture(scope="module")
def site(predictor):
    with serve_in_thread(predictor) as server:
        yield ServerClient(server.address)


def encode_form(image: bytes, settings: object) -> tuple[bytes, dict[str, str]]:
    text = settings if isinstance(settings, str) else json.dumps(settings)
    body, headers = encode_multipart(("image", image))
    boundary = headers["Content-Type"].partition("boundary=")[2].strip('"')
    part = f'--{boundary}\r\nContent-Disposition: form-data; name="settings"\r\n\r\n{text}\r\n'
    return part.encode() + body, headers


@pytest.mark.parametrize("options", [{}, {"multilabel": True}, {"templates": ["photo", "{}"]}])
def test_probabilities_are_those_of_predict(site, pair, predictor, options):
    image = encode_noise_image(3)
    body, headers = encode_form(image, {"labels": list(LABELS), **options})
    status, document, _ = site.ask("POST", "/v1/zero_shot", body, headers)
    settings = options | {"templates": tuple(options.get("templates", ()))}
    expected = vitreous.load(WeightsSource(str(pair), labels=LABELS, **settings), precision="fp32").predict(image)
    assert status == 200 and document["multilabel"] == options.get("multilabel", False)
    probabilities = {row["class"]: row["probability"] for row in document["classes"]}
    assert [row["class"] for row in document["classes"]] == sorted(LABELS, key=lambda name: -probabilities[name])
    assert probabilities.keys() == set(LABELS)
    for name, probability in zip(expected.names, expected.probabilities, strict=True):
        assert probabilities[name] == pytest.approx(probability, abs=1e-5)
    assert len(predictor.text_embedder.cache) > 0


def test_the_description_lists_the_endpoint(site):
    _, model, _ = site.ask("GET", "/v1/model")
    assert model["capabilities"]["zero_shot"] and not model["capabilities"]["predict"]
    _, document, _ = site.ask("GET", "/openapi.json")
    assert "/v1/zero_shot" in document["paths"] and "ZeroShot" in document["components"]["schemas"]


@pytest.mark.parametrize(
    ("settings", "status", "message"),
    [
        ("nothing", 400, "not a JSON object"),
        ([], 400, "not a JSON object"),
        ({"labels": ["cat"]}, 422, "is the only label"),
        ({"labels": ["cat", "Cat"]}, 422, "repeats"),
        ({"labels": ["cat", ""]}, 422, "a label is empty"),
        ({"labels": []}, 422, "no labels"),
        ({}, 422, "labels is not an array"),
        ({"labels": [1, 2]}, 422, "labels is not an array"),
        ({"labels": ["cat", "dog"], "top": 1}, 422, "unknown key top"),
        ({"labels": ["cat", "dog"], "multilabel": 1}, 422, "multilabel is not"),
        ({"labels": ["cat", "dog"], "templates": "a photo"}, 422, "unknown templates"),
        ({"labels": [str(i) for i in range(201)]}, 422, "too many or too long"),
        ({"labels": ["cat", "d" * 201]}, 422, "too many or too long"),
        ({"labels": [str(i) for i in range(200)], "templates": "openai"}, 422, "16,000 prompts"),
        ({"labels": ["cat", "dog " * 45]}, 422, "tokens, but the text encoder supports 40"),
    ],
)
def test_invalid_settings_are_rejected(site, settings, status, message):
    body, headers = encode_form(encode_noise_image(1), settings)
    response_status, document, _ = site.ask("POST", "/v1/zero_shot", body, headers)
    assert response_status == status and message in document["error"]["message"]


def test_other_bodies_and_models_are_rejected(site, tmp_path):
    image = encode_noise_image(1)
    assert site.ask("POST", "/v1/zero_shot", image, {"Content-Type": "image/png"})[0] == 415
    body, headers = encode_multipart(("image", image))
    assert site.ask("POST", "/v1/zero_shot", body, headers)[0] == 400
    body, headers = encode_form(b"no image", {"labels": ["cat", "dog"]})
    status, document, _ = site.ask("POST", "/v1/zero_shot", body, headers)
    assert status == 422 and document["error"]["code"] == "unreadable_image"
    with serve_in_thread(vitreous.load(save_bundle(tmp_path / "model"))) as server:
        body, headers = encode_form(image, {"labels": ["cat", "dog"]})
        status, document, _ = ServerClient(server.address).ask("POST", "/v1/zero_shot", body, headers)
    assert status == 404 and "no text encoder" in document["error"]["message"]
