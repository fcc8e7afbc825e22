"""Image generation over HTTP: the images of `sample`, rejected requests, and disconnecting clients."""

from __future__ import annotations

import io
import json
import time
from base64 import b64decode
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import vitreous
from tests.inference.generators import CLASSES, predictor_in, save_autoencoder, save_generator
from tests.inference.server_client import ServerClient, encode_noise_image, save_bundle, wait_until
from vitreous.apps.server.model import warm_up_predictor
from vitreous.apps.server.server import serve_in_thread
from vitreous.apps.server.settings import ServerLimits, ServerSettings
from vitreous.apps.server.start import load_served_predictor
from vitreous.errors import UsageError, WeightsError
from vitreous.generation.process import Diffusion, Flow
from vitreous.inference.generators import build_generator_predictor
from vitreous.inference.options import InferenceOptions
from vitreous.inference.samples import sample
from vitreous.weights.bundle import load_bundle

JSON_HEADERS = {"Content-Type": "application/json"}
NDJSON_HEADERS = JSON_HEADERS | {"Accept": "application/x-ndjson"}


@pytest.fixture(scope="module")
def generator_folder(tmp_path_factory):
    return save_generator(tmp_path_factory.mktemp("generator") / "model")


@pytest.fixture(scope="module")
def server(generator_folder):
    with serve_in_thread(predictor_in(generator_folder)) as server:
        yield server


@pytest.fixture(scope="module")
def site(server):
    return ServerClient(server.address)


def post_sample(site, document, headers=JSON_HEADERS, query=""):
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    return site.ask("POST", f"/v1/sample{query}", body, dict(headers))


def decode_data_uri(uri: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(b64decode(uri.removeprefix("data:image/png;base64,"))))).astype(int)


def test_http_images_match_sample(site, generator_folder, tmp_path):
    settings = {"class": "cat", "count": 3, "guidance": 2.5, "steps": 6, "seed": 11, "sampler": "ddim"}
    status, document, headers = post_sample(site, settings)
    assert status == 200 and headers["Cache-Control"] == "no-store"
    options = {"classes": ("cat",), "count": 3, "guidance": 2.5, "steps": 6, "seed": 11, "precision": "fp32"}
    sample(generator_folder, tmp_path / "cats", progress=False, **options)
    expected = [np.asarray(Image.open(path)).astype(int) for path in sorted((tmp_path / "cats").glob("*.png"))]
    assert len(document["images"]) == len(expected) == 3
    for number, image in enumerate(document["images"]):
        assert (image["class"], image["number"]) == ("cat", number)
        assert np.abs(decode_data_uri(image["image"]) - expected[number]).max() <= 1
    assert np.abs(expected[0] - expected[1]).max() > 10
    assert document["settings"].pop("precision") == "fp32" and document["settings"] == settings | {"to_seed": None}
    assert document["size"] == [8, 8] and document["seconds"] > 0 and document["columns"] == 2
    status, png, headers = post_sample(site, settings, JSON_HEADERS | {"Accept": "text/html, image/png;q=0.9"})
    sample(generator_folder, tmp_path / "cats.png", progress=False, **options)
    assert status == 200 and headers["Content-Type"] == "image/png"
    grids = [np.asarray(Image.open(image)).astype(int) for image in (io.BytesIO(png), tmp_path / "cats.png")]
    assert grids[0].shape == grids[1].shape == (286, 258, 3) and np.abs(grids[0] - grids[1]).max() <= 1


def test_classes_alternate_when_none_is_requested(site):
    _, document, _ = post_sample(site, {"count": 5, "steps": 3, "class": None, "seed": None})
    images = document["images"]
    assert [(image["class"], image["number"]) for image in images] == [
        ("ant", 0), ("<b>bee</b>", 0), ("cat", 0), ("ant", 1), ("<b>bee</b>", 1)
    ]  # fmt: skip
    assert document["columns"] == 3 and document["settings"]["class"] is None and document["settings"]["seed"] == 0
    bee_images = post_sample(site, {"class": "<b>bee</b>", "count": 2, "steps": 3})[1]["images"]
    assert np.abs(decode_data_uri(bee_images[1]["image"]) - decode_data_uri(images[4]["image"])).max() <= 1
    assert post_sample(site, {})[1]["settings"]["steps"] == 50
    for sampler in ("ddim", "ddpm"):
        assert post_sample(site, {"steps": 2, "sampler": sampler})[0] == 200


def test_seed_interpolation_matches_sample(site, generator_folder, tmp_path):
    settings = {"class": "cat", "count": 4, "steps": 4, "seed": 1, "to_seed": 2}
    status, document, _ = post_sample(site, settings)
    assert status == 200 and document["settings"]["to_seed"] == 2
    options = {"classes": ("cat",), "count": 4, "steps": 4, "seed": 1, "to_seed": 2, "precision": "fp32"}
    sample(generator_folder, tmp_path / "way", progress=False, **options)
    for number, image in enumerate(document["images"]):
        expected = np.asarray(Image.open(tmp_path / "way" / f"cat-0000{number}.png")).astype(int)
        assert np.abs(decode_data_uri(image["image"]) - expected).max() <= 1
    ends = [post_sample(site, {"class": "cat", "steps": 4, "seed": seed})[1]["images"][0]["image"] for seed in (1, 2)]
    for end, number in zip(ends, (0, 3), strict=True):
        assert np.abs(decode_data_uri(end) - decode_data_uri(document["images"][number]["image"])).max() <= 1


def encode_form(**fields) -> tuple[bytes, dict[str, str]]:
    """Return an encoded form and its headers.

    A bytes value is a file and a string is text; a list repeats the field.
    """
    body = b""
    for name, values in fields.items():
        for value in values if isinstance(values, list) else [values]:
            file_name = "" if isinstance(value, str) else f'; filename="{name}.png"'
            content = value.encode() if isinstance(value, str) else value
            body += (
                f'--x\r\nContent-Disposition: form-data; name="{name}"{file_name}\r\n\r\n'.encode() + content + b"\r\n"
            )
    return body + b"--x--\r\n", {"Content-Type": "multipart/form-data; boundary=x"}


def encode_png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


PHOTO_PIXELS = np.random.default_rng(0).integers(0, 256, (8, 8, 3)).astype(np.uint8)
INPAINT_MASK = np.where(np.arange(8) < 4, 0, 255).astype(np.uint8)[None].repeat(8, 0)


def test_inpainting_matches_sample(site, generator_folder, tmp_path):
    settings = {"class": CLASSES[0], "count": 2, "steps": 5, "seed": 4}
    status, document, _ = post_sample(
        site, *encode_form(image=encode_png(PHOTO_PIXELS), mask=encode_png(INPAINT_MASK), settings=json.dumps(settings))
    )
    assert status == 200 and len(document["images"]) == 2, document
    (tmp_path / "photo.png").write_bytes(encode_png(PHOTO_PIXELS))
    (tmp_path / "mask.png").write_bytes(encode_png(INPAINT_MASK))
    options = {"inpaint": str(tmp_path / "photo.png"), "mask": str(tmp_path / "mask.png"), "precision": "fp32"}
    evaluate_options = {"classes": (settings["class"],), "count": 2, "steps": 5, "seed": 4}
    files = sample(generator_folder, tmp_path / "out", progress=False, **options, **evaluate_options)["files"]
    for image, path in zip(document["images"], files, strict=True):
        pixels = decode_data_uri(image["image"])
        assert (
            np.abs(pixels[:, :4] - PHOTO_PIXELS[:, :4]).max() <= 1
            and np.abs(pixels[:, 4:] - PHOTO_PIXELS[:, 4:]).max() > 10
        )
        assert np.abs(pixels - np.asarray(Image.open(path)).astype(int)).max() <= 1
    body, headers = encode_form(image=encode_png(PHOTO_PIXELS), mask=encode_png(INPAINT_MASK))
    status, lines, _ = post_sample(site, body, headers | {"Accept": "application/x-ndjson"})
    assert status == 200 and json.loads(lines.splitlines()[-1])["event"] == "result"
    status, grid, _ = post_sample(site, body, headers | {"Accept": "image/png"})
    assert status == 200
    enlarged = np.asarray(Image.open(io.BytesIO(grid)).convert("RGB")).astype(int)[:128, :128]
    assert np.abs(enlarged[8::16, 8::16][:, :4] - PHOTO_PIXELS[:, :4]).max() <= 1
    assert site.ask("GET", "/v1/model")[1]["sampling"]["inpaint"] is True


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"image": encode_png(PHOTO_PIXELS)}, 400, "an image and a mask"),
        ({"settings": "{}"}, 400, "an image and a mask"),
        ({"image": encode_png(PHOTO_PIXELS), "mask": "black"}, 400, "an image and a mask"),
        ({"image": [encode_png(PHOTO_PIXELS)] * 2, "mask": encode_png(INPAINT_MASK)}, 400, "duplicate field image"),
        ({"image": encode_png(PHOTO_PIXELS), "mask": encode_png(INPAINT_MASK), "other": "1"}, 400, "unknown field other"),
        ({"image": encode_png(PHOTO_PIXELS), "mask": encode_png(INPAINT_MASK[:, :6])}, 422, "image 8 x 8 and mask 6 x 8 differ in size"),
        ({"image": b"no image", "mask": encode_png(INPAINT_MASK)}, 422, "image"),
        ({"image": encode_png(PHOTO_PIXELS), "mask": b"GIF8"}, 422, "image"),
        ({"image": encode_png(PHOTO_PIXELS), "mask": encode_png(INPAINT_MASK), "settings": "{"}, 400, "not JSON"),
        ({"image": encode_png(PHOTO_PIXELS), "mask": encode_png(INPAINT_MASK), "settings": '{"count": 65}'}, 422, "count=65"),
        ({"image": encode_png(PHOTO_PIXELS), "mask": encode_png(INPAINT_MASK), "settings": " " * 2**15}, 413, "the body is too large"),
    ],
)  # fmt: skip
def test_each_form_error_gets_one_message(site, fields, status, message):
    got, document, _ = post_sample(site, *encode_form(**fields))
    error = document["error"]
    assert got == status and message in f"{error['message']}; {error['hint']}" and len(json.dumps(error)) < 400
    assert site.metric("vitreous_queue_images") == 0


@pytest.mark.parametrize(
    ("document", "status", "message"),
    [
        ({"class": "cow"}, 422, "unknown class cow"),
        ({"class": "x" * 9000}, 422, "unknown class xxx"),
        ({"class": 3}, 422, "use a name or null"),
        ({"class": ["cat"]}, 422, "use a name or null"),
        ({"count": 0}, 422, "use an integer from 1 to 64"),
        ({"count": 65}, 422, "use an integer from 1 to 64"),
        ({"count": "2"}, 422, 'count="2"'),
        ({"count": True}, 422, "count=true"),
        ({"count": 2.0}, 422, "count=2.0"),
        ({"steps": 0}, 422, "use an integer from 1 to 1000"),
        ({"steps": 1001}, 422, "use an integer from 1 to 1000"),
        ({"guidance": -1}, 422, "use a number from 0 to 1000"),
        ({"guidance": 1001}, 422, "guidance=1001"),
        ({"guidance": "high"}, 422, 'guidance="high"'),
        (b'{"guidance": NaN}', 422, "guidance=NaN"),
        (b'{"guidance": 1e999}', 422, "guidance=Infinity"),
        ({"seed": -1}, 422, "use an integer from 0 to"),
        ({"seed": 2**53}, 422, "seed="),
        ({"sampler": "heun"}, 422, "unknown sampler heun for diffusion"),
        ({"sampler": {}}, 422, "unknown sampler"),
        ({"number": 3}, 422, "unknown key number"),
        ({"class": "cat", "count": 2, "to_seed": -1}, 422, "use an integer from 0 to"),
        ({"class": "cat", "count": 2, "to_seed": "1"}, 422, 'to_seed="1"'),
        ({"class": "cat", "to_seed": 1}, 422, "set count to 2 or more"),
        ({"count": 2, "to_seed": 1}, 422, "set class"),
        (b'{"count": 1, "count": 2}', 422, "duplicate key count"),
        ({"count": 64, "steps": 251}, 413, "at most 63 images, or at most 250 steps"),
        (b'{"class": "' + b"x" * 2**14 + b'"}', 413, "the body is too large"),
        (b"", 400, "not JSON"),
        (b"[1]", 400, "not an object"),
        (b"\xff{}", 400, "not JSON"),
        (b"[" * 9000, 400, "not JSON"),
        (b'{"seed": ' + b"9" * 9000 + b"}", 400, "not JSON"),
    ],
)
def test_each_request_error_gets_one_message(site, document, status, message):
    for headers in (JSON_HEADERS, NDJSON_HEADERS):
        got, response, _ = post_sample(site, document, headers)
        error = response["error"]
        assert got == status and message in f"{error['message']}; {error['hint']}" and len(json.dumps(error)) < 400


def test_other_bodies_and_methods_are_rejected(site):
    assert (
        post_sample(site, {}, {"Content-Type": "multipart/form-data; boundary=x"})[1]["error"]["code"]
        == "bad_multipart"
    )
    for content_type in ("image/png", "text/plain", ""):
        status, document, _ = post_sample(site, {}, {"Content-Type": content_type})
        assert status == 415 and "application/json" in document["error"]["hint"]
    assert post_sample(site, {"steps": 2}, {"Content-Type": "application/json; charset=utf-8"})[0] == 200
    assert post_sample(site, {}, query="?count=3")[0] == 422
    assert site.ask("GET", "/v1/sample")[0] == 405
    status, document, _ = post_sample(site, {}, JSON_HEADERS | {"Content-Length": str(2**40)})
    assert status == 413 and document["error"]["code"] == "too_large"


def test_ndjson_streams_previews_and_ends_with_the_json_result(site):
    document = {"class": "ant", "count": 5, "steps": 334, "seed": 3, "guidance": 1.5}
    status, body, headers = post_sample(site, document, NDJSON_HEADERS | {"X-Request-Id": "mine"})
    lines = [json.loads(line) for line in body.splitlines()]
    previews, last = lines[:-1], lines[-1]
    assert status == 200 and headers["Content-Type"] == "application/x-ndjson"
    assert last.pop("event") == "result" and last["request_id"] == "mine"
    assert 1 <= len(previews) <= 24 and {event["event"] for event in previews} == {"preview"}
    steps_done = [event["done"] for event in previews]
    assert steps_done == sorted(steps_done) and 0 < steps_done[0] <= steps_done[-1] <= 1
    for event in previews:
        assert len(event["images"]) == 5 and event["columns"] == 3 and any(event["images"])
        assert all(image is None or decode_data_uri(image).shape == (8, 8, 3) for image in event["images"])
    response = post_sample(site, document)[1]
    assert last.keys() == response.keys() and last["images"] == response["images"]


def test_the_model_endpoint_describes_sampling(site):
    _, model, _ = site.ask("GET", "/v1/model")
    assert model["classes"] == list(CLASSES) and model["name"] == "DiT-32x1/2" and model["precision"]
    assert [name for name, is_supported in model["capabilities"].items() if is_supported] == ["sample"]
    sampling = model["sampling"]
    assert list(sampling["samplers"])[:2] == ["ddim", "ddpm"] and sampling["samplers"]["ddim"] == 50
    assert (
        sampling["limits"]["count"] == 64 and sampling["limits"]["steps"] == 1000 and sampling["process"] == "diffusion"
    )
    assert sampling["defaults"] == {"count": 1, "guidance": 1.0, "seed": 0, "sampler": "ddim"}
    _, document, _ = site.ask("GET", "/openapi.json")
    post = document["paths"]["/v1/sample"]["post"]
    schema = post["requestBody"]["content"]["application/json"]["schema"]
    assert set(schema["properties"]) == {"class", "count", "guidance", "steps", "seed", "to_seed", "sampler"}
    assert set(post["requestBody"]["content"]) == {"application/json", "multipart/form-data"}
    assert set(post["responses"]["200"]["content"]) == {"application/json", "image/png", "application/x-ndjson"}
    assert document["components"]["schemas"]["Samples"]["properties"]["settings"]["$ref"].endswith("/Settings")


def test_generators_and_image_models_reject_each_others_requests(site, tmp_path):
    for address in ("predict", "embed", "segment", "detect"):
        status, document, _ = site.ask("POST", f"/v1/{address}", encode_noise_image(1), {"Content-Type": "image/png"})
        assert status == 404 and document["error"]["hint"] == "POST /v1/sample", address
    for method, address in (("POST", "attention"), ("POST", "neighbours"), ("GET", "positions"), ("GET", "filters")):
        body = encode_noise_image(1) if method == "POST" else None
        assert site.ask(method, f"/v1/{address}", body, {"Content-Type": "image/png"})[0] == 404, address
    with serve_in_thread(vitreous.load(save_bundle(tmp_path / "model"))) as server:
        image_site = ServerClient(server.address)
        status, document, _ = post_sample(image_site, {})
        assert status == 404 and document["error"]["hint"] == "POST /v1/predict"
        model = image_site.ask("GET", "/v1/model")[1]
        assert model["sampling"] is None and model["capabilities"]["sample"] is False


def test_sample_requests_are_counted(site):
    assert post_sample(site, {"steps": 2})[0] == 200
    text = site.ask("GET", "/metrics")[1].decode()
    assert 'vitreous_requests_total{route="sample",status="200"}' in text
    assert site.metric("vitreous_queue_images") == 0


def test_an_unconditional_model_rejects_class_options(tmp_path):
    with serve_in_thread(predictor_in(save_generator(tmp_path / "model", (), 1, Flow()))) as server:
        site = ServerClient(server.address)
        status, response, _ = post_sample(site, {"count": 2})
        assert status == 200 and [image["class"] for image in response["images"]] == [None, None]
        assert response["settings"]["sampler"] == "heun" and decode_data_uri(response["images"][0]["image"]).shape == (
            8,
            8,
        )
        for document, message in (({"class": "cat"}, "no classes"), ({"guidance": 2}, "the model has none")):
            status, response, _ = post_sample(site, document)
            assert status == 422 and message in response["error"]["message"]
        assert site.ask("GET", "/v1/model")[1]["sampling"]["limits"]["guidance"] == 1


def test_steps_are_limited_by_the_process(tmp_path):
    with serve_in_thread(predictor_in(save_generator(tmp_path / "model", process=Diffusion(40)))) as server:
        site = ServerClient(server.address)
        assert post_sample(site, {})[1]["settings"]["steps"] == 40
        status, document, _ = post_sample(site, {"steps": 41})
        assert status == 422 and document["error"]["hint"] == "use an integer from 1 to 40"


@pytest.fixture
def slow_server(generator_folder, monkeypatch):
    """Start a server with a generator that takes at least 20 ms per step, for up to 8 images at a time."""
    predictor = predictor_in(generator_folder)
    sampler = predictor.engine.generator.sampler
    predict = sampler.predict
    with serve_in_thread(predictor, ServerSettings(port=0, quiet=True, limits=ServerLimits(queue=8))) as server:
        monkeypatch.setattr(sampler, "predict", lambda *arguments: (time.sleep(0.02), predict(*arguments))[1])
        yield server, ServerClient(server.address)


def is_busy(server) -> bool:
    return server.service.batcher.batch_start_time is not None or server.service.images_in_flight > 0


@pytest.mark.parametrize("headers", [JSON_HEADERS, NDJSON_HEADERS])
def test_requests_of_disconnected_clients_are_not_computed(slow_server, headers):
    server, site = slow_server
    body = json.dumps({"class": "cat", "steps": 1000}).encode()
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    with site.connect() as link:
        link.sendall(
            f"POST /v1/sample HTTP/1.1\r\nHost: localhost\r\n{head}Content-Length: {len(body)}\r\n\r\n".encode()
        )
        link.sendall(body)
        wait_until(lambda: server.service.batcher.batch_start_time is not None)
        if headers is NDJSON_HEADERS:
            assert b"preview" in link.recv(65536)
    wait_until(lambda: not is_busy(server), 5)
    assert post_sample(site, {"steps": 2})[0] == 200 and server.service.batcher.failures == 0


def test_a_full_queue_is_rejected_and_deadlines_hold(slow_server):
    server, site = slow_server
    body = json.dumps({"class": "cat", "count": 8, "steps": 1000}).encode()
    with site.connect() as link:
        link.sendall(b"POST /v1/sample HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
        link.sendall(f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_until(lambda: is_busy(server))
        status, document, headers = post_sample(site, {"count": 1, "steps": 50})
        assert status == 429 and document["error"]["code"] == "queue_full" and int(headers["Retry-After"]) > 0
    wait_until(lambda: not is_busy(server), 5)
    status, document, _ = post_sample(site, {"steps": 1000}, JSON_HEADERS | {"X-Deadline-Ms": "300"})
    assert status == 504 and document["error"]["code"] == "deadline"
    status, body, _ = post_sample(site, {"steps": 1000}, NDJSON_HEADERS | {"X-Deadline-Ms": "1500"})
    last = json.loads(body.splitlines()[-1])
    assert status == 200 and last["event"] == "error" and last["error"]["code"] == "deadline"
    wait_until(lambda: not is_busy(server), 5)
    assert server.service.batcher.failures == 0 and site.ask("GET", "/readyz")[0] == 200


def test_long_sampling_in_progress_is_not_treated_as_hung(slow_server, monkeypatch):
    server, site = slow_server
    sampler, steps = server.service.served.generator.sampler, []
    predict = sampler.predict
    monkeypatch.setattr(sampler, "predict", lambda *arguments: (steps.append(0), predict(*arguments))[1])
    clock = SimpleNamespace(monotonic=lambda: float(len(steps)))  # each step takes one second of this clock
    monkeypatch.setattr("vitreous.apps.server.batcher.time", clock)
    server.service.batcher.batch_seconds, server.service.batcher.alive = 0.0, 0.0
    assert post_sample(site, {"steps": 40})[0] == 200 and server.service.batcher.get_failure_reason == ""
    lost, body = [], json.dumps({"steps": 63}).encode()
    with site.connect() as link:
        link.sendall(b"POST /v1/sample HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
        link.sendall(f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_until(lambda: is_busy(server))
        wait_until(lambda: lost.append(server.service.batcher.get_failure_reason) or not is_busy(server))
    assert set(lost) == {""} and len(lost) > 10 and len(steps) >= 100


def test_unsupported_generators_are_rejected_at_startup(tmp_path):
    with pytest.raises(UsageError, match="4 channels"):
        load_served_predictor(save_generator(tmp_path / "latents", channels=4))
    with pytest.raises(UsageError, match="openvino"):
        load_served_predictor(save_generator(tmp_path / "model"), InferenceOptions(engine="openvino"))


def test_a_latent_model_serves_decoded_images(tmp_path):
    save_autoencoder(tmp_path / "vae")
    served = load_served_predictor(save_generator(tmp_path / "model", channels=4), vae=str(tmp_path / "vae"))
    with serve_in_thread(served) as server:
        status, body, _ = post_sample(ServerClient(server.address), {"class": "cat", "steps": 2}, NDJSON_HEADERS)
        rejected, document, _ = post_sample(
            ServerClient(server.address), *encode_form(image=encode_png(PHOTO_PIXELS), mask=encode_png(INPAINT_MASK))
        )
        assert rejected == 422 and "latents" in document["error"]["message"]
        assert ServerClient(server.address).ask("GET", "/v1/model")[1]["sampling"]["inpaint"] is False
    last = json.loads(body.splitlines()[-1])
    assert status == 200 and decode_data_uri(last["images"][0]["image"]).shape == (16, 16, 3)
    with pytest.raises(UsageError, match=r"vae needs a generative model, but .*classifier is not one"):
        load_served_predictor(save_bundle(tmp_path / "classifier"), vae=str(tmp_path / "vae"))


def test_a_generator_with_nan_weights_is_rejected(generator_folder):
    bundle = load_bundle(generator_folder)
    torch.nn.init.constant_(next(bundle.model.parameters()), float("nan"))
    with pytest.raises(WeightsError, match="not finite"):
        warm_up_predictor(build_generator_predictor(bundle), ServerLimits())


def test_models_are_loaded_by_their_task(generator_folder, tmp_path):
    assert load_served_predictor(generator_folder).card.task.endpoint == "sample"
    assert load_served_predictor(save_bundle(tmp_path / "model")).card.classes
    assert load_served_predictor(save_bundle(tmp_path / "features", classes=())).card.classes == ()
    with pytest.raises(UsageError, match="no run"):
        load_served_predictor(Path(tmp_path / "nothing"))
