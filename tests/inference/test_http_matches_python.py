"""HTTP and Python give the same predictions and errors for the hostile corpus, except for images above the server's
size limit."""

from __future__ import annotations

import numpy as np

from tests.data.hostile import build_corpus
from tests.inference.server_client import ServerClient, encode_noise_image, save_bundle
from tests.inference.small_models import read_predictor_input
from tests.precision import are_predictions_close, parse_predictions
from vitreous.apps.server.server import serve_in_thread
from vitreous.apps.server.settings import MAX_IMAGE_PIXELS
from vitreous.data.decoding.decode import read_upright_size
from vitreous.errors import DataError
from vitreous.inference.options import InferenceOptions
from vitreous.inference.predict import load


def exceeds_server_limit(content: bytes) -> bool:
    """Whether the server, whose limit is lower than Python's, rejects the file by its header."""
    try:
        read_upright_size(content, "image", MAX_IMAGE_PIXELS)
    except DataError:
        return True
    return False


def test_http_predictions_match_python(tmp_path, processor):
    """With different chunk sizes: within 1e-5 in float32, and within the precision's tolerance by default."""
    folder = save_bundle(tmp_path / "model")
    files = [encode_noise_image(seed, (40 + seed, 48)) for seed in range(6)]
    for how, precision in ((InferenceOptions("cpu"), processor), (InferenceOptions("cpu", "fp32"), "fp32")):
        with serve_in_thread(load(folder, how, quick=True)) as server:
            site = ServerClient(server.address)
            assert site.ask("GET", "/v1/model")[1]["precision"] == precision
            http = parse_predictions([site.predict(content)[1]["predictions"][0] for content in files])
        for options, limit in ((InferenceOptions("cpu"), processor), (InferenceOptions("cpu", "fp32"), precision)):
            predictor = load(folder, options)
            pixels = np.stack([read_predictor_input(predictor, content) for content in files])
            python = [predictor.prediction_format(5).predict(p, "") for p in predictor.activations(pixels)]
            assert are_predictions_close(http, python, limit)


def test_http_and_python_agree_on_hostile_files(tmp_path):
    predictor = load(save_bundle(tmp_path / "model"))
    accepted = refused = 0
    with serve_in_thread(predictor) as server:
        site = ServerClient(server.address)
        children = {child.process.pid for child in server.service.decoders.children}
        for case in build_corpus():
            status, response, _ = site.predict(case.content)
            pixels = read_predictor_input(predictor, case.content)
            if isinstance(pixels, DataError) or exceeds_server_limit(case.content):
                refused += 1
                assert status in (400, 422), case.name  # 400: the body is empty
                if isinstance(pixels, DataError) and case.content and not exceeds_server_limit(case.content):
                    assert response["error"]["message"] == pixels.message, case.name
                continue
            accepted += 1
            expected = predictor.prediction_format(5).predict(predictor.activations(pixels[None])[0], "")
            probabilities = {row["class"]: row["probability"] for row in response["predictions"][0]["classes"]}
            assert status == 200 and probabilities == dict(zip(expected.names, expected.probabilities, strict=True)), (
                case.name
            )
        # no decoder process was replaced
        assert {child.process.pid for child in server.service.decoders.children} == children
    assert accepted > 50 and refused > 50
