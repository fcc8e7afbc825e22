"""Predictions for clips: files, folders and arrays, over HTTP and on the page."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitreous
from tests.apps.server.test_page import PageVisit, browser, expect  # noqa: F401
from tests.browser import needs_chromium
from tests.data.films import make_moving_square, write_moves
from tests.inference.server_client import ServerClient, encode_multipart
from vitreous.apps.server.attention import AttentionRequest, attention_to_json
from vitreous.apps.server.server import serve_in_thread
from vitreous.apps.server.settings import ServerLimits, ServerSettings
from vitreous.cli.main import main
from vitreous.data.modalities.clips import ClipPreprocess
from vitreous.errors import DataError, UsageError
from vitreous.inference.predict import load
from vitreous.inference.sources import resolve_image_source
from vitreous.models.names import config_from_name
from vitreous.models.zoo import build_model
from vitreous.tasks.classification import Classification
from vitreous.weights.bundle import Bundle

QUIET_SETTINGS = replace(ServerSettings(), port=0, quiet=True, decoders=1)


def save_video_model(folder: Path, name: str) -> Path:
    """Save a bundle of a video model whose predictions differ between clips of four frames."""
    torch.manual_seed(0)
    config = replace(config_from_name(name), image=(4, 16, 16), classes=2)
    model = build_model(config).eval()
    torch.nn.init.normal_(model.head.weight)
    for key, parameter in model.named_parameters():
        parameter.data *= 2 if "qkv.weight" in key else 1
    Bundle(model, Classification(("left", "right")), ClipPreprocess((4, 16, 16))).save(folder)
    return folder


@pytest.fixture(scope="module")
def video_models(tmp_path_factory):
    """Two bundles, and clips of three formats below `clips`."""
    root = tmp_path_factory.mktemp("asked")
    save_video_model(root / "joint", "ViViT-32x2/4x2")
    save_video_model(root / "factorised", "ViViT-32x2/4x2-factorised-attention")
    write_moves(root / "clips", 3)
    return root


@pytest.fixture(scope="module")
def clip_predictor(video_models):
    return load(video_models / "joint", device="cpu", precision="fp32")


@pytest.fixture(scope="module")
def client(video_models, clip_predictor):
    with serve_in_thread(clip_predictor, QUIET_SETTINGS, video_models / "joint") as server:
        yield ServerClient(server.address)


def test_folder_of_clips_predicts_each_clip_as_its_frames(video_models, clip_predictor):
    items = list(resolve_image_source([str(video_models / "clips")], preprocess=ClipPreprocess))
    assert [Path(item.name).relative_to(video_models / "clips").as_posix() for item in items] == [
        f"{side}/{name}" for side in ("left", "right") for name in ("clip0.mp4", "clip1.gif", "clip2")
    ]
    predictions = clip_predictor.predict([item.name for item in items])
    frames = make_moving_square(2, False)  # clip1.gif and clip2 were written from these frames
    folder = make_moving_square(4, False)
    assert predictions[2] == replace(clip_predictor.predict(folder), path=predictions[2].path)
    as_tensor = torch.from_numpy(folder).permute(3, 0, 1, 2)
    assert clip_predictor.predict(as_tensor).probabilities == predictions[2].probabilities
    assert clip_predictor.predict(folder.astype(np.float32) / 255).probabilities == predictions[2].probabilities
    content = (video_models / "clips/left/clip1.gif").read_bytes()
    assert clip_predictor.predict(content).probabilities == predictions[1].probabilities
    assert clip_predictor.predict(frames).probabilities == pytest.approx(
        predictions[1].probabilities, abs=0.1
    )  # a palette
    grey = clip_predictor.predict(folder[..., 0])
    assert grey.probabilities == clip_predictor.predict(np.repeat(folder[..., :1], 3, 3)).probabilities
    assert len({prediction.probabilities for prediction in predictions}) == len(predictions)


def test_invalid_clips_are_rejected_with_a_message(video_models, clip_predictor, tmp_path):
    Image.new("RGB", (16, 16)).save(tmp_path / "picture.png")
    with pytest.raises(DataError, match=r"no clips in .*\n.*folders of numbered frames"):
        resolve_image_source([str(tmp_path)], preprocess=ClipPreprocess)
    with pytest.raises(DataError, match=r"picture\.png: not a clip of a known format"):
        clip_predictor.predict(tmp_path / "picture.png")
    with pytest.raises(DataError, match=r"an array of 4 x 16 is not \(T, H, W\) or \(T, H, W, C\)"):
        clip_predictor.predict(np.zeros((4, 16), np.uint8))
    with pytest.raises(UsageError, match="is a batch"):
        clip_predictor.predict(np.zeros((1, 4, 16, 16, 3), np.uint8))


def test_predict_and_embed_commands_accept_clips(video_models, tmp_path, capsys):
    run, clips = str(video_models / "joint"), str(video_models / "clips")
    (tmp_path / "broken.mp4").write_bytes((video_models / "clips/left/clip0.mp4").read_bytes()[:400])
    options = ["--device", "cpu", "--precision", "fp32"]
    with pytest.raises(SystemExit, match="3"):
        main(["predict", run, clips, str(tmp_path), "--out", str(tmp_path / "out.jsonl"), *options])
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [bool(row["error"]) for row in rows] == [False] * 6 + [True] and "broken.mp4" in rows[-1]["error"]
    with pytest.raises(SystemExit, match="0"):
        main(["embed", run, clips, "--out", str(tmp_path / "out.npz"), *options])
    features = np.load(tmp_path / "out.npz")["embeddings"]
    assert features.shape == (6, 32) and np.isfinite(features).all()
    capsys.readouterr()


def test_http_predictions_of_clips_match_python(video_models, clip_predictor, client):
    for path in sorted((video_models / "clips/left").glob("*.*")):
        body, headers = encode_multipart((path.name, path.read_bytes()))
        status, document, _ = client.ask("POST", "/v1/predict", body, headers)
        prediction = clip_predictor.predict(path)
        probabilities = {row["class"]: row["probability"] for row in document["predictions"][0]["classes"]}
        assert status == 200 and probabilities == pytest.approx(
            dict(zip(prediction.names, prediction.probabilities, strict=True))
        )
        pixels = clip_predictor.card.preprocess.to_array(clip_predictor.card.preprocess.decode(path))
        for query in ("prediction", "1,2,3"):
            status, document, _ = client.ask("POST", f"/v1/attention?layer=1&query={query}", body, headers)
            parsed = AttentionRequest.parse({"layer": "1", "query": query}, clip_predictor.bundle.model)
            expected = attention_to_json(clip_predictor.bundle, pixels, parsed)
            assert status == 200 and document["grid"] == [2, 4, 4] and document["box"] == [0, 0, 1, 1]
            assert np.shape(document["weights"]) == (2, 4, 4)
            np.testing.assert_allclose(document["weights"], expected["weights"], atol=1e-6)
            assert np.sum(document["weights"]) + np.sum(document["prefix_weights"]) == pytest.approx(1, abs=1e-4)
        strip = Image.open(io.BytesIO(client.ask("POST", "/v1/frames", body, headers)[1]))
        np.testing.assert_array_equal(np.asarray(strip).reshape(4, 16, 16, 3).transpose(3, 0, 1, 2), pixels)
        moving_map = Image.open(io.BytesIO(client.ask("POST", "/v1/attention?format=gif", body, headers)[1]))
        assert moving_map.format == "GIF" and moving_map.n_frames == 4 and min(moving_map.size) >= 448
    status, document, _ = client.ask("POST", "/v1/predict", path.read_bytes(), {"Content-Type": "video/mp4"})
    assert status == 200 and document["predictions"][0]["classes"]


@pytest.mark.parametrize(
    ("path", "content", "status", "message"),
    [
        ("/v1/predict", b"GIF89a" + bytes(20), 422, "cut short"),
        ("/v1/predict", b"no clip", 422, "not a clip of a known format"),
        ("/v1/attention?query=1,2", None, 422, "invalid query=1,2"),
        ("/v1/attention?query=2,0,0", None, 422, "invalid query=2,0,0"),
        ("/v1/attention?format=png", None, 422, "invalid format=png"),
        ("/v1/attention?format=gif&layer=all", None, 422, "a GIF cannot contain several maps"),
    ],
)
def test_invalid_clip_requests_get_one_error_message(video_models, client, path, content, status, message):
    content = (video_models / "clips/left/clip1.gif").read_bytes() if content is None else content
    answered, document, _ = client.ask("POST", path, *encode_multipart(("clip", content)))
    assert answered == status and message in document["error"]["message"]


def test_clip_pixel_limit_is_per_frame(video_models):
    predictor = load(video_models / "factorised", device="cpu", precision="fp32")
    settings = replace(QUIET_SETTINGS, limits=ServerLimits(pixels=255))
    body, headers = encode_multipart(("clip", (video_models / "clips/left/clip1.gif").read_bytes()))
    with serve_in_thread(predictor, settings, video_models / "factorised") as server:
        limited_client = ServerClient(server.address)
        can = limited_client.ask("GET", "/v1/model")[1]["capabilities"]
        assert can["frames"] and can["predict"] and not can["attention"]
        status, document, _ = limited_client.ask("POST", "/v1/predict", body, headers)
        assert status == 422 and "frames of 16 x 16 pixels" in document["error"]["message"]


def test_image_server_rejects_clips(video_models, tmp_path):
    vitreous.save(vitreous.create("ViT-32x1/8", 16, 2), tmp_path / "flat")
    body, headers = encode_multipart(("clip", (video_models / "clips/left/clip0.mp4").read_bytes()))
    with serve_in_thread(load(tmp_path / "flat", headless=True), QUIET_SETTINGS, tmp_path / "flat") as server:
        image_client = ServerClient(server.address)
        assert image_client.ask("POST", "/v1/frames", body, headers)[0] == 404
        assert image_client.ask("POST", "/v1/embed", body, headers)[0] == 422


@needs_chromium
@pytest.mark.parametrize("size", ["desk", "phone"])
def test_page_plays_the_frames_with_attention(browser, video_models, clip_predictor, client, size):  # noqa: F811
    path = video_models / "clips/left/clip0.mp4"
    visit = PageVisit(browser, client.address, size)
    expect(visit.find("label[for=file].button")).to_have_text("Choose a clip")
    visit.page.set_input_files("#file", path)
    visit.see("#frame-text", "1 of 4")  # reduced motion is set: nothing plays automatically
    expect(visit.find("#play")).to_have_text("Play")
    prediction = clip_predictor.predict(path)
    visit.see("#answers", prediction.names[0])
    pixels = clip_predictor.card.preprocess.to_array(clip_predictor.card.preprocess.decode(path))
    shown = attention_to_json(clip_predictor.bundle, pixels, AttentionRequest.parse({}, clip_predictor.bundle.model))[
        "weights"
    ]
    drawings = []
    for frame in range(4):
        visit.find("#frame").fill(str(frame))
        row, column = np.unravel_index(np.argmax(shown[frame // 2]), (4, 4))
        visit.see("#readout", f"Maximum at row {row + 1}, column {column + 1}")
        visit.page.wait_for_timeout(100)
        drawings.append(visit.drawn())
    assert len(set(drawings)) == 4
    frame = visit.find("#picture").bounding_box()
    visit.find("#picture").click(position={"x": frame["width"] / 2 + 3, "y": frame["height"] / 2 + 3})
    visit.see("#meaning", "the patch at row 3, column 3 of time slot 2")
    visit.find("#play").click()
    expect(visit.find("#play")).to_have_text("Pause")
    expect(visit.find("#frame-text")).to_have_text("2 of 4", timeout=5000)
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= visit.page.viewport_size["width"]
    visit.leave()
