"""Report pages in a browser: dark theme, legible counts, explanations by mouse, keyboard and touch."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest
import torch

from tests.browser import find_chromium, needs_chromium
from tests.conftest import TINY_RUN, make_folder
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.data.split import ArraySplit, Data
from vitreous.jobs.train import train
from vitreous.models.zoo import create_untrained_model
from vitreous.reports.answers import SplitPredictions
from vitreous.reports.inspect import InspectOptions, inspect
from vitreous.reports.pages.report import write_report
from vitreous.tasks.classification import Classification
from vitreous.tasks.classification_metrics import evaluate_classification
from vitreous.weights.bundle import Bundle

pytestmark = [pytest.mark.drawn, needs_chromium]

#: elements of at least 20 x 20 pixels with a background lighter than mid-grey, except tooltips
LIGHT_ELEMENTS_JS = """all => all.filter(one => {
  const box = one.getBoundingClientRect(), colour = getComputedStyle(one).backgroundColor.match(/[\\d.]+/g).map(Number);
  const opaque = colour.length < 4 || colour[3] > 0.5;
  return box.width >= 20 && box.height >= 20 && opaque && (colour[0] + colour[1] + colour[2]) / 3 > 128;
}).map(one => one.outerHTML.slice(0, 80))"""
#: light opaque shapes of at least 20 x 20 pixels in a drawing
LIGHT_SHAPES_JS = """all => all.filter(one => {
  const box = one.getBoundingClientRect(), fill = getComputedStyle(one).fill.match(/[\\d.]+/g)?.map(Number) ?? [0];
  const solid = getComputedStyle(one).opacity * getComputedStyle(one).fillOpacity > 0.6;
  return box.width >= 20 && box.height >= 20 && solid && fill[0] + fill[1] + fill[2] > 600;
}).length"""
FILL_COLOURS_JS = "all => [...new Set(all.map(one => getComputedStyle(one).fill))]"


@pytest.fixture(scope="module")
def report_pages(tmp_path_factory):
    """Return the pages of a short run, and the report of 10,000 images with sixty classes."""
    root = tmp_path_factory.mktemp("look")
    photos = make_folder(root / "photos", {"train": 12, "val": 4, "test": 4})
    train(str(photos), out=str(root / "run"), workers=0, **TINY_RUN)
    inspect(
        str(root / "run"),
        out=root / "inside",
        settings=InspectOptions(figures=("rollout", "distance", "positions", "similarity")),
    )
    torch.manual_seed(0)
    names, labels = tuple(f"kind {class_index}" for class_index in range(60)), np.arange(60)
    logits = np.eye(60, dtype=np.float32)[np.roll(labels, 1)]
    model = create_untrained_model("ViT-16x2/8", image_size=16, num_classes=60, heads=2).eval()
    split = ArraySplit(np.zeros((60, 16, 16, 3), np.uint8), labels)
    bundle = Bundle(model, Classification(names, False, "softmax"), ImagePreprocess((16, 16)))
    predictions = SplitPredictions(
        "x", bundle, "sixty", Data("sixty", names, {"test": split}), "test", split, logits, frozenset(), 0.0
    )
    report = evaluate_classification(logits, labels, names, predictions.readable)
    report.confusion_cells[:, 2] = 10_000
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vitreous.reports.pages.report.MAX_CLASS_MATRIX_SIZE", 60)
        write_report(root / "sixty.html", None, predictions, report)
    return {"run": root / "run/report.html", "inside": root / "inside/index.html", "sixty": root / "sixty.html"}


@contextmanager
def open_page(path, width=1440, scheme="light", **options):
    """Yield a page in a browser; assert that it logs no errors and makes no external requests."""
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as player:
        browser = player.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme, **options)
        page, messages, requests = context.new_page(), [], []
        page.on("console", lambda message: messages.append(message.text))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(f"file://{path}")
        yield page
        assert not messages and [url for url in requests if not url.startswith(("file:", "data:"))] == []
        browser.close()


@pytest.mark.parametrize("name", ["run", "inside", "sixty"])
def test_dark_pages_have_no_white_panel_and_ink_follows_the_theme(report_pages, name):
    inks = {}
    for scheme in ("dark", "light"):
        with open_page(report_pages[name], scheme=scheme) as page:
            if scheme == "dark":
                assert page.eval_on_selector_all("html, body, body *", LIGHT_ELEMENTS_JS) == []
                assert page.eval_on_selector_all("svg path, svg rect", LIGHT_SHAPES_JS) == 0
            inks[scheme] = page.eval_on_selector_all("svg text", FILL_COLOURS_JS)
            assert inks[scheme] == [page.evaluate("getComputedStyle(document.body).color")]
    assert inks["dark"] != inks["light"]


@pytest.mark.parametrize("name", ["run", "inside", "sixty"])
def test_pages_on_a_phone_scroll_only_vertically(report_pages, name):
    with open_page(report_pages[name], 390) as page:
        assert page.evaluate("document.documentElement.scrollWidth") == 390


@pytest.mark.parametrize("width", [390, 1440])
def test_counts_of_ten_thousand_fit_their_cells(report_pages, width):
    with open_page(report_pages["sixty"], width) as page:
        cells = page.eval_on_selector_all(
            ".matrix .cell", "all => all.map(one => one.getBoundingClientRect().toJSON())"
        )
        counts = page.eval_on_selector_all(
            ".matrix .count", "all => all.map(one => one.getBoundingClientRect().toJSON())"
        )
        texts = page.eval_on_selector_all(".matrix .count", "all => all.map(one => one.textContent.trim())")
        titles = page.eval_on_selector_all(".matrix .cell title", "all => all.map(one => one.textContent)")
    assert len(cells) == len(counts) == 60 and set(texts) == {"10k"}
    assert titles[0] == "label kind 0, predicted kind 59: 10,000 (100.0 % of 10,000)"
    for cell, count in zip(cells, counts, strict=True):
        assert cell["left"] <= count["left"] and count["right"] <= cell["right"]
        assert count["height"] >= 5  # pixels: legible


def test_metrics_are_explained_by_mouse_keyboard_and_touch(report_pages):
    visible_texts = "all => all.filter(one => one.checkVisibility()).map(one => one.textContent)"
    nll = "Negative log-likelihood"
    with open_page(report_pages["run"]) as page:
        term = page.locator(".figures .term button", has_text="NLL")
        assert page.eval_on_selector_all("[role=tooltip]", visible_texts) == []
        term.hover()
        (text,) = page.eval_on_selector_all("[role=tooltip]", visible_texts)
        assert text.startswith(nll)
        page.mouse.move(0, 0)
        reached = []
        for _ in range(8):
            page.keyboard.press("Tab")
            reached += page.eval_on_selector_all("[role=tooltip]", visible_texts)
        assert any(explanation.startswith(nll) for explanation in reached) and len(set(reached)) >= 5
        tooltip_id = term.get_attribute("aria-describedby")
        assert page.locator(f"#{tooltip_id}").text_content().startswith(nll)
    with open_page(report_pages["run"], 390, has_touch=True, is_mobile=True) as page:
        for label in ("recall", "F1"):
            button = page.locator(".wide .term button", has_text=label).first
            button.scroll_into_view_if_needed()
            button.tap()
            (box,) = page.eval_on_selector_all(
                "[role=tooltip]",
                "all => all.filter(one => one.checkVisibility()).map(one => one.getBoundingClientRect().toJSON())",
            )
            assert box["left"] >= 0 and box["right"] <= 390 and box["height"] > 20


def test_losses_are_two_curves_of_one_chart(report_pages):
    with open_page(report_pages["run"]) as page:
        chart = page.get_by_role("img", name="loss: training and validation (NLL)")
        assert chart.count() == 1
        colours = chart.locator("path").evaluate_all("all => all.map(one => getComputedStyle(one).stroke)")
    assert "rgb(59, 142, 208)" in colours and "rgb(209, 130, 59)" in colours


@pytest.mark.parametrize("width", [390, 1440])
def test_charts_show_values_on_hover_touch_and_arrow_keys(report_pages, width):
    playwright = pytest.importorskip("playwright.sync_api")
    with open_page(report_pages["run"], width, has_touch=True) as page:
        chart = page.get_by_role("img", name="Learning rate")
        tooltip = chart.locator("xpath=../div[@class='hover']")
        playwright.expect(tooltip).to_be_hidden()
        chart.hover()
        playwright.expect(tooltip).to_contain_text("epoch")
        page.mouse.move(0, 0)
        playwright.expect(tooltip).to_be_hidden()
        chart.focus()
        page.keyboard.press("ArrowLeft")
        last = tooltip.text_content()
        page.keyboard.press("ArrowLeft")
        assert tooltip.text_content() != last
        page.keyboard.press("Escape")
        playwright.expect(tooltip).to_be_hidden()
        chart.tap()
        playwright.expect(tooltip).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
