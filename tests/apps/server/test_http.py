"""The HTTP server gives the predictions of Python for concurrent clients, and describes its model and state."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from tests.conftest import run_cli
from tests.inference.server_client import CLASSES, ServerClient, encode_multipart, encode_noise_image, save_bundle
from tests.inference.small_models import read_predictor_input
from vitreous.apps.server.server import serve_in_thread
from vitreous.apps.server.settings import ServerSettings
from vitreous.inference.index import Neighbour, write_index
from vitreous.inference.predict import load


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return save_bundle(tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="module")
def predictor(bundle):
    return load(bundle)


@pytest.fixture(scope="module")
def server(predictor):
    with serve_in_thread(predictor) as server:
        yield server


@pytest.fixture(scope="module")
def site(server):
    return ServerClient(server.address)


def predict_in_python(predictor, content: bytes, top: int = 5) -> list[dict]:
    """Return the response's predictions, computed without a server."""
    pixels = read_predictor_input(predictor, content)
    prediction = predictor.prediction_format(top).predict(predictor.activations(pixels[None])[0], "")
    return [{"class": n, "probability": p} for n, p in zip(prediction.names, prediction.probabilities, strict=True)]


def test_an_image_body_gets_the_prediction_of_python(site, predictor):
    status, document, headers = site.predict(encode_noise_image(1), "?top=3", **{"X-Request-Id": "mine-1"})
    assert status == 200 and headers["X-Request-Id"] == document["request_id"] == "mine-1"
    assert document["predictions"] == [
        {
            "name": None,
            "classes": predict_in_python(predictor, encode_noise_image(1), 3),
            "unsure": False,
            "error": None,
        }
    ]
    assert document["model"] == {"name": predictor.card.name, "version": predictor.card.version}


def test_form_images_keep_their_order_and_broken_images_fail_separately(site, predictor):
    body, headers = encode_multipart(
        ("../../a\u202e.png", encode_noise_image(1)),
        ("b.jpg", b"not an image"),
        ("c", encode_noise_image(2, kind="JPEG")),
    )
    status, document, _ = site.ask("POST", "/v1/predict?top=1", body, headers)
    first_prediction, second_prediction, third_prediction = document["predictions"]
    assert status == 200 and [prediction["name"] for prediction in document["predictions"]] == [
        "a\u202e.png",
        "b.jpg",
        "c",
    ]
    assert first_prediction["classes"] == predict_in_python(predictor, encode_noise_image(1), 1) and third_prediction[
        "classes"
    ] == predict_in_python(predictor, encode_noise_image(2, kind="JPEG"), 1)
    assert second_prediction["classes"] == [] and second_prediction["error"]["code"] == "unreadable_image"


def test_a_request_without_readable_images_gets_422(site):
    body, headers = encode_multipart(("a", b""), ("b", b"<svg xmlns='http://x/'></svg>"))
    status, document, _ = site.ask("POST", "/v1/predict", body, headers)
    assert status == 422 and document["error"]["code"] == "unreadable_image" and "empty" in document["error"]["message"]


def test_concurrent_predictions_are_bit_identical(site, predictor):
    files = [encode_noise_image(seed) for seed in range(24)]
    expected = [predict_in_python(predictor, content) for content in files]
    with ThreadPoolExecutor(12) as pool:
        for responses in pool.map(
            lambda n: [(m % 24, site.predict(files[m % 24])) for m in range(n, n + 8)], range(12)
        ):
            for number, (status, document, _) in responses:
                assert status == 200 and document["predictions"][0]["classes"] == expected[number]


def test_embeddings_match_the_engine(site, predictor):
    status, document, _ = site.ask(
        "POST", "/v1/embed", encode_noise_image(3), {"Content-Type": "application/octet-stream"}
    )
    expected = predictor.engine.features(read_predictor_input(predictor, encode_noise_image(3))[None])[0]
    assert status == 200 and document["width"] == 32
    np.testing.assert_allclose(document["embeddings"][0]["embedding"], expected, rtol=1e-7)


def test_attention_returns_its_maps_and_the_input_box(site):
    status, document, _ = site.ask(
        "POST",
        "/v1/attention?kind=raw&layer=all&head=all&query=1,2",
        encode_noise_image(4),
        {"Content-Type": "image/png"},
    )
    weights = np.array(document["weights"])
    assert status == 200 and weights.shape == (2, 2, 4, 4) and document["query"] == [1, 2]
    np.testing.assert_allclose(weights.sum((2, 3)) + np.array(document["prefix_weights"]).sum(2), 1, atol=1e-4)
    assert document["box"] == pytest.approx([4 / 48, 0, 44 / 48, 1], abs=1e-6)
    status, png, headers = site.ask(
        "POST", "/v1/attention?format=png", encode_noise_image(4), {"Content-Type": "image/png"}
    )
    assert status == 200 and headers["Content-Type"] == "image/png" and png.startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("/v1/predict?top=0", "top"),
        ("/v1/predict?top=6", "from 1 to 5"),
        ("/v1/predict?top=%D9%A3", "top"),
        ("/v1/predict?threshold=nan", "threshold"),
        ("/v1/predict?tpo=3", "tpo"),
        ("/v1/predict?top=1&top=2", "duplicate parameter top"),
        ("/v1/predict?top", "query"),
        ("/v1/attention?layer=2", "layer"),
        ("/v1/attention?query=4,0", "query"),
        ("/v1/attention?format=gif", "format"),
        ("/v1/attention?format=png&layer=all", "layer"),
    ],
)
def test_invalid_query_parameters_are_named(site, path, word):
    status, document, _ = site.ask("POST", path, encode_noise_image(1), {"Content-Type": "image/png"})
    assert (
        status == 422
        and document["error"]["code"] == "bad_parameter"
        and word in document["error"]["message"] + document["error"]["hint"]
    )


def test_the_model_is_described(site, predictor):
    document = site.ask("GET", "/v1/model")[1]
    assert document["classes"] == list(CLASSES) and document["grid"] == [4, 4] and document["image_size"] == [32, 32]
    assert document["parameters"] == sum(p.numel() for p in predictor.bundle.model.parameters())
    assert document["capabilities"] == {
        "predict": True,
        "segment": False,
        "detect": False,
        "embed": True,
        "frames": False,
        "sample": False,
        "attention": True,
        "positions": True,
        "filters": True,
        "neighbours": False,
        "zero_shot": False,
    }
    assert document["limits"]["bytes"] == 20 * 2**20 and document["limits"]["queue"] >= 8


def test_a_headless_encoder_serves_embeddings_and_attention(tmp_path):
    folder = save_bundle(tmp_path / "encoder", classes=())
    (tmp_path / "photos").mkdir()
    for number in range(3):
        (tmp_path / "photos" / f"{number}.png").write_bytes(encode_noise_image(number))
    write_index(folder, tmp_path / "photos")
    encoder, headers = load(folder, headless=True), {"Content-Type": "image/png"}
    with serve_in_thread(encoder, run=folder) as server:
        site = ServerClient(server.address)
        document = site.ask("GET", "/v1/model")[1]
        assert (
            document["classes"] == []
            and document["capabilities"]["predict"] is False
            and document["capabilities"]["neighbours"] is True
        )
        status, document, _ = site.predict(encode_noise_image(1))
        assert (
            status == 404
            and "no head" in document["error"]["message"]
            and document["error"]["hint"] == "use POST /v1/embed"
        )
        embedding = site.ask("POST", "/v1/embed", encode_noise_image(1), headers)[1]["embeddings"][0]["embedding"]
        assert np.allclose(embedding, encoder.embed(encode_noise_image(1)), rtol=1e-6)
        assert site.ask("POST", "/v1/attention", encode_noise_image(1), headers)[0] == 200
        first = site.ask("POST", "/v1/neighbours?count=2", encode_noise_image(1), headers)[1]["neighbours"][0]
        assert (first["name"], first["label"]) == ("1.png", "")
        assert first["similarity"] == pytest.approx(1, abs=5e-4)  # the index stores float16


def test_positions_filters_and_neighbours_are_served(site, server, predictor, monkeypatch):
    document = site.ask("GET", "/v1/positions")[1]
    similar = np.array(document["similarity"])
    assert similar.shape == (16, 16) and np.allclose(np.diag(similar), 1, atol=1e-4)
    assert site.ask("GET", "/v1/filters")[1].startswith(b"\x89PNG")
    status, document, _ = site.ask("POST", "/v1/neighbours", encode_noise_image(1), {"Content-Type": "image/png"})
    assert status == 404 and document["error"]["code"] == "not_available"
    nearest_calls = []

    def record_nearest(features, count):
        nearest_calls.append((features, count))
        return [Neighbour("ant", "a.png", 0.5, b"jpeg"), Neighbour("cat", "c.png", 0.25, b"")]

    monkeypatch.setattr(server.service.served, "index", SimpleNamespace(nearest=record_nearest))
    document = site.ask("POST", "/v1/neighbours?count=2", encode_noise_image(1), {"Content-Type": "image/png"})[1]
    assert document["neighbours"] == [
        {"label": "ant", "name": "a.png", "similarity": 0.5, "thumbnail": "data:image/jpeg;base64,anBlZw=="},
        {"label": "cat", "name": "c.png", "similarity": 0.25, "thumbnail": None},
    ]
    np.testing.assert_array_equal(
        nearest_calls[0][0], predictor.engine.features(read_predictor_input(predictor, encode_noise_image(1))[None])[0]
    )


def test_metrics_count_requests_and_errors(site):
    before = site.ask("GET", "/metrics")[1].decode()
    site.predict(encode_noise_image(1))
    site.predict(b"nothing")
    after = site.ask("GET", "/metrics")[1].decode()

    def parse_metric(text: str, line: str) -> float:
        return next((float(row.split()[-1]) for row in text.splitlines() if row.startswith(line + " ")), 0.0)

    for line in (
        'vitreous_requests_total{route="predict",status="200"}',
        'vitreous_requests_total{route="predict",status="422"}',
    ):
        assert parse_metric(after, line) == parse_metric(before, line) + 1
    assert parse_metric(after, "vitreous_batch_images_count") == parse_metric(before, "vitreous_batch_images_count") + 1
    assert parse_metric(after, "vitreous_queue_images") == 0


def test_only_the_page_and_its_static_files_are_served(site):
    status, page, headers = site.ask("GET", "/")
    assert (
        status == 200
        and page.startswith(b"<!doctype html>")
        and "default-src 'none'" in headers["Content-Security-Policy"]
    )
    assert headers["X-Content-Type-Options"] == "nosniff"
    began = time.monotonic()
    assert site.ask("HEAD", "/static/style.css")[0] == 200
    assert time.monotonic() - began < 10  # the response ends without a timeout
    outside = (
        "/../pyproject.toml",
        "/%2e%2e/x",
        "/..%5cx",
        "/%00",
        "//etc/passwd",
        "/%252e%252e/x",
        "/index.html.gz",
        "/__init__.py",
        "/",
        "",
    )
    for path in (f"/static{end}" for end in outside):
        status, document, _ = site.ask("GET", path)
        assert status in (400, 404) and document["error"]["code"] in ("not_found", "bad_request")


def test_openapi_lists_every_endpoint(site):
    document = site.ask("GET", "/openapi.json")[1]
    assert document["openapi"].startswith("3.1") and set(document["paths"]) >= {
        "/v1/predict",
        "/v1/embed",
        "/v1/attention",
        "/v1/model",
        "/readyz",
    }
    used = set(_iterate_schema_references(document))
    assert used and all(name in document["components"]["schemas"] for name in used)


def _iterate_schema_references(tree):
    """Yield every schema reference."""
    if isinstance(tree, dict):
        yield from (tree["$ref"].rsplit("/", 1)[1],) if "$ref" in tree else ()
        tree = list(tree.values())
    for entry in tree if isinstance(tree, list) else ():
        yield from _iterate_schema_references(entry)


def test_attention_boxes_are_in_exif_upright_coordinates(site, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (80, 40), "red").save(tmp_path / "rotated.jpg", exif=exif)
    document = site.ask(
        "POST", "/v1/attention", (tmp_path / "rotated.jpg").read_bytes(), {"Content-Type": "image/jpeg"}
    )[1]
    assert json.dumps(document["box"]) == "[0.0, 0.25, 1.0, 0.75]"


def test_a_root_path_is_optional_in_requests(predictor):
    """A reverse proxy may remove or keep the path; every link of the page is below it."""
    with serve_in_thread(predictor, ServerSettings(port=0, quiet=True, root_path="/vit")) as server:
        site = ServerClient(server.address)
        page = site.ask("GET", "/vit/")
        assert page[0] == 200
        links = re.findall(r'(?:src|href)="([^"#]+)"', page[1].decode())
        assert links and not any(link.startswith(("/", "http")) for link in links)
        for root in ("", "/vit"):
            assert all(site.ask("GET", f"{root}/{link}")[0] == 200 for link in links)
            assert site.ask("GET", f"{root}/v1/model")[0] == 200 and site.ask("GET", f"{root}/healthz")[0] == 200
            body, headers = encode_multipart(("a", encode_noise_image(1)))
            assert site.ask("POST", f"{root}/v1/predict?top=1", body, headers)[0] == 200
            assert site.ask("GET", f"{root}/openapi.json")[1]["servers"] == [{"url": "/vit"}]
        status, _, headers = site.ask("GET", "/vit")
        assert status == 308 and headers["Location"] == "/vit/"
        assert site.ask("GET", "/vitreous/")[0] == 404 and site.ask("GET", "/vit/vit/")[0] == 404


def test_without_a_root_path_prefixed_paths_get_404(site):
    assert site.ask("GET", "/openapi.json")[1]["servers"] == [{"url": "/"}]
    assert site.ask("GET", "/vit/")[0] == 404


@pytest.mark.parametrize("path", ["vit", "/a//b", "/a?b", "/../x", "/ä"])
def test_invalid_root_paths_are_rejected(bundle, path):
    result = run_cli("serve", str(bundle), "--root-path", path)
    assert result.returncode == 2
    assert result.stderr == (
        f"error: --root-path {path} is not a path\n  use a path such as /vit: a slash, then letters, digits, - . _ ~\n"
    )
