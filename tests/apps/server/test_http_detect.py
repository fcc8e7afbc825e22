"""Object detection over HTTP: the detections of `predict`, and rejected requests."""

import io

import numpy as np
import pytest
from PIL import Image

import vitreous
from tests.inference.blobs import CLASSES, make_blob_predictor, make_scene
from tests.inference.detectors import save_detector, write_photos
from tests.inference.server_client import ServerClient, encode_multipart, encode_noise_image, save_bundle
from vitreous.apps.server.server import serve_in_thread
from vitreous.data.annotations.drawing import encode_png
from vitreous.data.annotations.shapes import rle_to_mask


@pytest.fixture(scope="module")
def site():
    with serve_in_thread(make_blob_predictor()) as server:
        yield ServerClient(server.address)


def post_detect(site, content, query=""):
    return site.ask("POST", f"/v1/detect{query}", content, {"Content-Type": "image/png"})


@pytest.mark.parametrize(("size", "tiles"), [((64, 64), False), ((150, 90), False), ((150, 90), True)])
def test_http_detections_match_predict(site, size, tiles):
    content = encode_png(make_scene(size))
    status, document, _ = post_detect(site, content, f"?threshold=0.3&tiles={str(tiles).lower()}")
    expected = make_blob_predictor().detect(content, 0.3, tiles, keep_images=True)
    assert status == 200 and document["size"] == list(size[::-1]) and len(document["objects"]) == len(expected) == 2
    assert document["objects"] == expected.objects() and document["objects"][0]["label"] == CLASSES[0]
    status, png, headers = post_detect(site, content, f"?threshold=0.3&format=png&tiles={str(tiles).lower()}")
    assert headers["Content-Type"] == "image/png"
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(png))), np.asarray(expected.draw_overlay()))


def test_a_threshold_leaves_objects_out(site):
    assert [
        len(post_detect(site, encode_png(make_scene()), f"?threshold={t}")[1]["objects"]) for t in (0, 0.7, 0.95)
    ] == [2, 1, 0]


def test_the_model_endpoint_lists_its_tasks(site):
    _, model, _ = site.ask("GET", "/v1/model")
    assert model["capabilities"]["detect"] and not any(
        model["capabilities"][name] for name in ("predict", "segment", "embed")
    )
    assert model["classes"] == list(CLASSES) and len(model["class_colours"]) == 2


def test_unsupported_requests_are_rejected(site):
    for address in ("predict", "segment"):
        status, document, _ = site.ask("POST", f"/v1/{address}", encode_noise_image(1), {"Content-Type": "image/png"})
        assert status == 404 and document["error"]["hint"] == "use POST /v1/detect"
    for query in ("?format=gif", "?threshold=2", "?threshold=x", "?tiles=yes", "?top=3"):
        assert post_detect(site, encode_noise_image(1), query)[0] == 422, query
    status, document, _ = post_detect(site, encode_noise_image(1, (64, 64 * 140)), "?tiles=true")
    assert status == 413 and "tiles of 64 x 64" in document["error"]["message"]
    assert post_detect(site, encode_noise_image(1, (64, 64 * 140)))[0] == 200
    status, document, _ = post_detect(site, b"none")
    assert status == 422 and document["error"]["code"] == "unreadable_image"
    body, headers = encode_multipart(("a", encode_noise_image(1)), ("b", encode_noise_image(2)))
    assert site.ask("POST", "/v1/detect", body, headers)[0] == 400


def test_a_classifier_rejects_detect_requests(tmp_path):
    with serve_in_thread(vitreous.load(save_bundle(tmp_path / "model"))) as server:
        status, document, _ = post_detect(ServerClient(server.address), encode_noise_image(1))
    assert status == 404 and document["error"]["hint"] == "use POST /v1/predict"


def test_openapi_lists_the_detect_endpoint(site):
    _, document, _ = site.ask("GET", "/openapi.json")
    parameters = {parameter["name"] for parameter in document["paths"]["/v1/detect"]["post"]["parameters"]}
    assert {"threshold", "tiles", "format"} < parameters
    objects = document["components"]["schemas"]["Objects"]["properties"]["objects"]["items"]
    assert set(objects["required"]) == {"label", "score", "left", "top", "right", "bottom", "segmentation"}


def test_a_trained_detector_matches_predict_over_http(tmp_path):
    path = save_detector(tmp_path / "model")
    local = vitreous.load(path, precision="fp32")
    with serve_in_thread(vitreous.load(path, precision="fp32", quick=True)) as server:
        for photo in write_photos(tmp_path / "photos", 3):
            document = post_detect(ServerClient(server.address), photo.read_bytes(), "?threshold=0.1")[1]
            expected = local.detect(photo, 0.1)
            assert [detected["label"] for detected in document["objects"]] == list(expected.names) and len(expected) > 3
            boxes = [
                [detected[edge] for edge in ("left", "top", "right", "bottom")] for detected in document["objects"]
            ]
            assert np.abs(np.array(boxes) - expected.boxes).max() < 0.01
            runs = [detected["segmentation"]["counts"] for detected in document["objects"]]
            masks = np.stack([rle_to_mask(run, tuple(document["size"])) for run in runs])
            assert np.mean(masks == expected.masks) > 0.999 and masks.any()
        _, document, _ = ServerClient(server.address).ask(
            "POST", "/v1/embed", photo.read_bytes(), {"Content-Type": "image/png"}
        )
        assert document["embeddings"][0]["embedding"] == pytest.approx(local.embed(photo), rel=1e-5)
