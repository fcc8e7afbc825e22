"""Objects over HTTP: those of `predict`, and what cannot be asked."""

import io

import numpy as np
import pytest
from PIL import Image

import vitreous
from tests.inference.asking import Site, file, form, save_bundle
from tests.inference.blobs import CLASSES, predictor, scene
from tests.inference.detectors import pictures, save_detector
from vitreous.apps.server.server import serve_in_thread
from vitreous.data.annotations.drawing import encode_png
from vitreous.data.annotations.shapes import rle_to_mask


@pytest.fixture(scope="module")
def site():
    with serve_in_thread(predictor()) as server:
        yield Site(server.address)


def ask(site, content, query=""):
    return site.ask("POST", f"/v1/detect{query}", content, {"Content-Type": "image/png"})


@pytest.mark.parametrize(("size", "tiles"), [((64, 64), False), ((150, 90), False), ((150, 90), True)])
def test_objects_are_those_of_predict(site, size, tiles):
    content = encode_png(scene(size))
    status, answer, _ = ask(site, content, f"?threshold=0.3&tiles={str(tiles).lower()}")
    expected = predictor().detect(content, 0.3, tiles, pictures=True)
    assert status == 200 and answer["size"] == list(size[::-1]) and len(answer["objects"]) == len(expected) == 2
    assert answer["objects"] == expected.objects() and answer["objects"][0]["label"] == CLASSES[0]
    status, png, headers = ask(site, content, f"?threshold=0.3&format=png&tiles={str(tiles).lower()}")
    assert headers["Content-Type"] == "image/png"
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(png))), np.asarray(expected.draw_overlay()))


def test_a_threshold_leaves_objects_out(site):
    assert [len(ask(site, encode_png(scene()), f"?threshold={t}")[1]["objects"]) for t in (0, 0.7, 0.95)] == [2, 1, 0]


def test_the_model_tells_what_it_can(site):
    _, model, _ = site.ask("GET", "/v1/model")
    assert model["capabilities"]["detect"] and not any(
        model["capabilities"][name] for name in ("predict", "segment", "embed")
    )
    assert model["classes"] == list(CLASSES) and len(model["class_colours"]) == 2


def test_what_cannot_be_answered_is_refused(site):
    for address in ("predict", "segment"):
        status, answer, _ = site.ask("POST", f"/v1/{address}", file(1), {"Content-Type": "image/png"})
        assert status == 404 and answer["error"]["hint"] == "POST /v1/detect"
    for query in ("?format=gif", "?threshold=2", "?threshold=x", "?tiles=yes", "?top=3"):
        assert ask(site, file(1), query)[0] == 422, query
    status, answer, _ = ask(site, file(1, (64, 64 * 140)), "?tiles=true")
    assert status == 413 and "tiles of 64 x 64" in answer["error"]["message"]
    assert ask(site, file(1, (64, 64 * 140)))[0] == 200
    status, answer, _ = ask(site, b"none")
    assert status == 422 and answer["error"]["code"] == "unreadable_image"
    body, headers = form(("a", file(1)), ("b", file(2)))
    assert site.ask("POST", "/v1/detect", body, headers)[0] == 400


def test_other_models_find_no_objects(tmp_path):
    with serve_in_thread(vitreous.load(save_bundle(tmp_path / "model"))) as server:
        status, answer, _ = ask(Site(server.address), file(1))
    assert status == 404 and answer["error"]["hint"] == "POST /v1/predict"


def test_the_description_has_the_address(site):
    _, document, _ = site.ask("GET", "/openapi.json")
    parameters = {one["name"] for one in document["paths"]["/v1/detect"]["post"]["parameters"]}
    assert {"threshold", "tiles", "format"} < parameters
    objects = document["components"]["schemas"]["Objects"]["properties"]["objects"]["items"]
    assert set(objects["required"]) == {"label", "score", "left", "top", "right", "bottom", "segmentation"}


def test_a_network_answers_over_http_as_predict_does(tmp_path):
    place = save_detector(tmp_path / "model")
    local = vitreous.load(place, precision="fp32")
    with serve_in_thread(vitreous.load(place, precision="fp32", quick=True)) as server:
        for picture in pictures(tmp_path / "photos", 3):
            answer = ask(Site(server.address), picture.read_bytes(), "?threshold=0.1")[1]
            expected = local.detect(picture, 0.1)
            assert [one["label"] for one in answer["objects"]] == list(expected.names) and len(expected) > 3
            boxes = [[one[edge] for edge in ("left", "top", "right", "bottom")] for one in answer["objects"]]
            assert np.abs(np.array(boxes) - expected.boxes).max() < 0.01
            runs = [one["segmentation"]["counts"] for one in answer["objects"]]
            masks = np.stack([rle_to_mask(one, tuple(answer["size"])) for one in runs])
            assert np.mean(masks == expected.masks) > 0.999 and masks.any()
        _, answer, _ = Site(server.address).ask(
            "POST", "/v1/embed", picture.read_bytes(), {"Content-Type": "image/png"}
        )
        assert answer["embeddings"][0]["embedding"] == pytest.approx(local.embed(picture), rel=1e-5)
