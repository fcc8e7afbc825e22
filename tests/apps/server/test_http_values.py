"""Serving a regression model: the values of Python, the model description, and the page in a browser."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from dataclasses import replace

import pytest

from tests.browser import find_chromium, needs_chromium
from tests.conftest import make_image
from tests.inference.small_models import save_value_model
from vitreous.apps.server.server import serve_in_thread
from vitreous.apps.server.settings import ServerSettings
from vitreous.inference.predict import load
from vitreous.tasks.regression import Regression

QUIET_SETTINGS = replace(ServerSettings(), port=0, quiet=True, decoders=1)
TASK = Regression(("age <b>", "height"), (40.0, 1.5), (10.0, 0.25))


@pytest.fixture(scope="module")
def value_model(tmp_path_factory):
    """Return a bundle with two targets, and two images."""
    root = tmp_path_factory.mktemp("values")
    save_value_model(root / "model", TASK)
    for number in range(2):
        make_image(number).save(root / f"{number}.png")
    (root / "notes.txt").write_text("not an image")
    return root


@pytest.fixture(scope="module")
def server_address(value_model):
    with serve_in_thread(load(value_model / "model", device="cpu"), QUIET_SETTINGS) as server:
        yield server.address


def post_form(server_address, path, *files):
    """Return the response to a form of files."""
    fields = [
        f'--x\r\nContent-Disposition: form-data; name="image"; filename="{file.name}"\r\n\r\n'.encode()
        + file.read_bytes()
        + b"\r\n"
        for file in files
    ]
    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    request = urllib.request.Request(f"{server_address}/{path}", b"".join(fields) + b"--x--\r\n", headers)
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def get_json(server_address, path):
    """Return the JSON document at a path."""
    with urllib.request.urlopen(f"{server_address}/{path}") as response:
        return json.load(response)


def test_http_values_match_python(value_model, server_address):
    names = [value_model / "0.png", value_model / "notes.txt", value_model / "1.png"]
    predictions = post_form(server_address, "v1/predict", *names)["predictions"]
    expected = load(value_model / "model", device="cpu").predict([names[0], names[2]])
    for row, prediction in zip((predictions[0], predictions[2]), expected, strict=True):
        assert row["values"] == dict(zip(TASK.targets, prediction.values, strict=True)) and row["error"] is None
    assert predictions[1]["values"] == {} and predictions[1]["error"]["message"]


def test_the_model_is_described(server_address):
    described = get_json(server_address, "v1/model")
    assert (described["task"], described["targets"], described["classes"]) == ("regression", list(TASK.targets), [])
    assert (
        described["capabilities"]["predict"]
        and described["capabilities"]["embed"]
        and not described["capabilities"]["detect"]
    )
    schemas = get_json(server_address, "openapi.json")["components"]["schemas"]
    prediction_schemas = schemas["Predictions"]["properties"]["predictions"]["items"]["anyOf"]
    assert {"$ref": "#/components/schemas/ValuePrediction"} in prediction_schemas
    assert "values" in schemas["ValuePrediction"]["required"] and "targets" in schemas["Model"]["required"]


@pytest.mark.parametrize("query", ["top=1", "threshold=0.5"])
def test_classifier_options_are_rejected(value_model, server_address, query):
    with pytest.raises(urllib.error.HTTPError) as error:
        post_form(server_address, f"v1/predict?{query}", value_model / "0.png")
    error_document = json.load(error.value)["error"]
    assert error.value.code == 422 and error_document["message"].startswith(
        f"{query.partition('=')[0]} is for image classifiers"
    )


@needs_chromium
def test_the_page_shows_the_values(value_model, server_address):
    """The browser shows a line for each target without bars, and the same values in the history."""
    playwright = pytest.importorskip("playwright.sync_api")
    prediction = load(value_model / "model", device="cpu").predict(value_model / "0.png")
    texts = [f"{value:.5g}" for value in prediction.values]
    with playwright.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        page, messages = browser.new_page(), []
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.goto(server_address)
        page.set_input_files("#file", str(value_model / "0.png"))
        expect = playwright.expect
        expect(page.locator("#model")).to_contain_text("Regression, age <b>, height")
        expect(page.locator("#answers li")).to_have_count(2)
        for line, name, text in zip(page.locator("#answers li").all(), TASK.targets, texts, strict=True):
            expect(line).to_contain_text(name)
            expect(line).to_contain_text(text)
        expect(page.locator("#answers .bar")).to_have_count(0)
        expect(page.locator("#history li")).to_contain_text(f"height {texts[1]}")
        browser.close()
    assert not messages
