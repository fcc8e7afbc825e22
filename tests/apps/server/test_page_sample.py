"""The page of a generative model, in a browser."""

import io
import time
from base64 import b64decode

import numpy as np
import pytest
from PIL import Image

from tests.apps.server.test_page import QUIET_SETTINGS, PageVisit, browser, expect  # noqa: F401
from tests.browser import needs_chromium
from tests.inference.generators import CLASSES, predictor_in, save_generator
from tests.inference.server_client import wait_until
from vitreous.apps.server.server import serve_in_thread
from vitreous.generation.process import Flow
from vitreous.inference.samples import sample

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def generator_folder(tmp_path_factory):
    return save_generator(tmp_path_factory.mktemp("generator") / "model")


@pytest.fixture(scope="module")
def server(generator_folder):
    with serve_in_thread(predictor_in(generator_folder), QUIET_SETTINGS) as server:
        yield server


def read_page_images(visit) -> list[np.ndarray]:
    sources = visit.page.eval_on_selector_all("#images img", "all => all.map(one => one.src)")
    return [np.asarray(Image.open(io.BytesIO(b64decode(uri.partition(",")[2])))).astype(int) for uri in sources]


def expect_outcome(visit, text: str) -> None:
    expect(visit.find("#save")).to_be_visible()
    visit.see("#outcome", text)


@pytest.mark.parametrize(("size", "theme"), [("desk", "light"), ("phone", "dark")])
def test_images_are_requested_shown_and_saved(server, generator_folder, browser, tmp_path, size, theme):  # noqa: F811
    visit = PageVisit(browser, server.address, size, theme)
    visit.see("#model", "Image generation, 3 classes")
    expect(visit.find("#look")).to_be_hidden()
    expect(visit.find("#no-images")).to_be_visible()
    assert visit.find("#class option").all_text_contents() == ["All classes", *CLASSES]
    assert visit.find("#images-count").input_value() == "18" and visit.find("#steps").input_value() == "50"
    visit.find("#class").select_option("cat")
    visit.find("#images-count").fill("4")
    visit.find("#guidance").fill("2.5")
    visit.see("#guidance-text", "2.5")
    visit.find("#steps").fill("6")
    visit.find("#seed").fill("11")
    visit.find("#seed").press("Enter")
    expect_outcome(visit, "4 images of cat, seed 11, ddim, 6 steps, guidance 2.5")
    options = {"classes": ("cat",), "count": 4, "guidance": 2.5, "steps": 6, "seed": 11, "precision": "fp32"}
    sample(generator_folder, tmp_path / "cats", progress=False, **options)
    expected = [np.asarray(Image.open(path)).astype(int) for path in sorted((tmp_path / "cats").glob("*.png"))]
    images = read_page_images(visit)
    assert len(images) == 4 and all(np.abs(a - b).max() <= 1 for a, b in zip(images, expected, strict=True))
    alts = visit.page.eval_on_selector_all("#images img", "all => all.map(one => one.alt)")
    assert alts == [f"cat, image {number}" for number in range(1, 5)]
    with visit.page.expect_download() as download:
        visit.find("#save").click()
    assert download.value.suggested_filename == "cat-seed-11.png"
    saved = np.asarray(Image.open(download.value.path()).convert("RGB")).astype(int)
    times = saved.shape[0] // 18
    assert saved.shape == (18 * times, 18 * times, 3) and saved.shape[0] >= 512
    grid = saved[times // 2 :: times, times // 2 :: times]
    assert np.abs(grid[10:, :8] - expected[2]).max() <= 1 and (grid[8:10] == 255).all()
    visit.find("#images li").nth(1).hover()
    visit.see("#outcome", "cat, image 2")
    visit.page.mouse.move(1, 1)
    visit.see("#outcome", "4 images of cat")
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= visit.page.viewport_size["width"]
    visit.leave()


def test_classes_alternate_and_a_seed_is_reproducible(server, browser):  # noqa: F811
    visit = PageVisit(browser, server.address)
    visit.find("#images-count").fill("6")
    visit.find("#steps").fill("4")
    visit.find("#make").click()
    expect_outcome(visit, "6 images, seed 0, ddim, 4 steps")
    alts = visit.page.eval_on_selector_all("#images img", "all => all.map(one => one.alt)")
    assert alts == [f"{name}, image {number}" for number in (1, 2) for name in CLASSES]
    assert visit.find("#images b").count() == 0  # names are escaped
    first = read_page_images(visit)
    visit.find("#new-seed").click()
    assert visit.find("#seed").input_value() != "0"
    visit.find("#make").click()
    expect_outcome(visit, f"seed {visit.find('#seed').input_value()},")
    assert any(np.abs(a - b).max() > 10 for a, b in zip(first, read_page_images(visit), strict=True))
    visit.find("#seed").fill("0")
    visit.find("#make").click()
    expect_outcome(visit, "seed 0,")
    assert all((a == b).all() for a, b in zip(first, read_page_images(visit), strict=True))
    visit.leave()


def test_invalid_inputs_are_not_submitted(server, browser):  # noqa: F811
    visit = PageVisit(browser, server.address)
    visit.see("#model", "Image generation")
    for steps in ("0", "1001", ""):
        visit.find("#steps").fill(steps)
        visit.find("#make").click()
        assert not visit.page.evaluate("document.getElementById('request').checkValidity()")
    visit.find("#images-count").fill("64")
    visit.find("#steps").fill("251")
    visit.find("#make").click()
    assert (
        visit.page.evaluate("document.getElementById('steps').validationMessage")
        == "Use at most 250 steps for 64 images."
    )
    visit.find("#sampler").select_option("ddpm")
    assert visit.find("#steps").input_value() == "250"
    assert visit.page.evaluate("document.getElementById('request').checkValidity()")
    assert not any("/v1/sample" in url for url in visit.requested_urls)
    visit.leave()


def test_previews_are_shown_and_enter_stops_sampling(generator_folder, browser, monkeypatch):  # noqa: F811
    predictor = predictor_in(generator_folder)
    sampler = predictor.engine.generator.sampler
    predict = sampler.predict
    with serve_in_thread(predictor, QUIET_SETTINGS) as server:
        monkeypatch.setattr(sampler, "predict", lambda *arguments: (time.sleep(0.02), predict(*arguments))[1])
        visit = PageVisit(browser, server.address, "phone")
        visit.find("#images-count").fill("3")
        visit.find("#steps").fill("1000")
        visit.find("#make").focus()
        visit.page.keyboard.press("Enter")
        visit.see("#outcome", "left")
        expect(visit.find("#images")).to_have_attribute("aria-busy", "true")
        expect(visit.find("#images img").first).to_be_visible()
        expect(visit.find("#make")).to_be_disabled()
        expect(visit.find("#save")).to_be_hidden()
        before = read_page_images(visit)
        wait_until(lambda: any((a != b).any() for a, b in zip(before, read_page_images(visit), strict=True)))
        expect(visit.find("#stop")).to_be_focused()
        visit.page.keyboard.press("Enter")
        visit.see("#outcome", "Stopped at")
        expect(visit.find("#stop")).to_be_hidden()
        expect(visit.find("#make")).to_be_focused()
        wait_until(lambda: not server.service.images_in_flight and server.service.batcher.batch_start_time is None, 5)
        visit.leave()


def test_a_sampling_failure_is_reported(generator_folder, browser, monkeypatch):  # noqa: F811
    predictor = predictor_in(generator_folder)
    sampler = predictor.engine.generator.sampler
    predict, broken = sampler.predict, []

    def fail_later(*arguments):
        time.sleep(0.02)
        if broken:
            raise RuntimeError("no more")
        return predict(*arguments)

    with serve_in_thread(predictor, QUIET_SETTINGS) as server:
        monkeypatch.setattr(sampler, "predict", fail_later)
        visit = PageVisit(browser, server.address)
        visit.find("#images-count").fill("3")
        visit.find("#steps").fill("1000")
        visit.find("#make").click()
        visit.see("#outcome", "left")
        broken.append(True)
        visit.see("#trouble", "the model failed on this request")
        visit.see("#outcome", "Failed at")
        broken.clear()
        visit.find("#steps").fill("2")
        visit.find("#make").click()
        expect_outcome(visit, "2 steps")
        assert visit.find("#trouble").text_content() == ""
        visit.leave()


def test_an_unconditional_model_has_no_class_menu(tmp_path, browser):  # noqa: F811
    with serve_in_thread(predictor_in(save_generator(tmp_path / "model", (), 1, Flow())), QUIET_SETTINGS) as server:
        visit = PageVisit(browser, server.address, "phone")
        visit.see("#model", "Image generation")
        expect(visit.find("#class-row")).to_be_hidden()
        expect(visit.find("#guidance-row")).to_be_hidden()
        visit.find("#images-count").fill("1")
        visit.find("#make").click()
        expect_outcome(visit, "1 image, seed 0, heun, 25 steps")
        assert read_page_images(visit)[0].shape == (8, 8)
        assert visit.page.get_attribute("#images img", "alt") == "Image 1"
        visit.leave()
