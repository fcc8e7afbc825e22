"""The report page of a run: complete, self-contained, and usable in a browser on phone and desktop sizes."""

from __future__ import annotations

import json
import os
import re
import shutil
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.browser import find_chromium, needs_chromium
from tests.conftest import TINY_RUN, make_folder, make_image
from vitreous.apps.server.watch import PANELS
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.data.split import ArraySplit, Data
from vitreous.jobs.train import train
from vitreous.models.zoo import create_untrained_model
from vitreous.progress import NullListener
from vitreous.reports.answers import SplitPredictions
from vitreous.reports.evaluate import EvaluateOptions, evaluate
from vitreous.reports.pages import cards
from vitreous.reports.pages.cards import MAX_CARD_IMAGES
from vitreous.reports.pages.formats import (
    format_breakable_name,
    format_flops,
    format_interval,
    format_metric_value,
    format_share,
)
from vitreous.reports.pages.loss_curves import build_loss_panel, describe_overfitting
from vitreous.reports.pages.metric_terms import MetricTerms, explain_metric
from vitreous.reports.pages.plots import (
    CELL_FONTS,
    DIGIT_WIDTH,
    FINE_CELL_INCHES,
    LINE_COLOURS,
    draw_confusion_plot,
    format_compact_count,
)
from vitreous.reports.pages.report import MAX_CLASS_MATRIX_SIZE, MAX_CLASS_ROWS, write_report
from vitreous.reports.pages.thumbnails import overlay_heat_map, scale_attention_map
from vitreous.reports.pages.unlabelled import CURVE_TITLES, draw_logged_curves, get_rankme_scale
from vitreous.tasks.classification import Classification
from vitreous.tasks.classification_metrics import evaluate_classification, score_images
from vitreous.tasks.metrics import METRICS
from vitreous.training.folder import RunFolder
from vitreous.weights.bundle import Bundle

pytestmark = pytest.mark.drawn


class NoteListener(NullListener):
    """A listener that stores notes."""

    def __init__(self):
        self.notes = []

    def note(self, text):
        self.notes.append(text)


def evaluate_noise(classes: int, images: int, multilabel: bool = False, names=None, unreadable=frozenset()):
    """Return an evaluation of random predictions."""
    draw = np.random.default_rng(0)
    model = create_untrained_model("ViT-16x2/8", image_size=16, num_classes=classes, heads=2).eval()
    labels = draw.integers(0, classes, images)
    if multilabel:
        labels = (draw.random((images, classes)) < 0.3).astype(np.float32)
    logits = draw.normal(size=(images, classes)).astype(np.float32)
    split = ArraySplit(draw.integers(0, 255, (images, 16, 16, 3), dtype=np.uint8), labels)
    names = names or tuple(f"class {index}" for index in range(classes))
    bundle = Bundle(
        model, Classification(names, multilabel, "sigmoid" if multilabel else "softmax"), ImagePreprocess((16, 16))
    )
    predictions = SplitPredictions(
        "x", bundle, "noise", Data("noise", names, {"test": split}), "test", split, logits, frozenset(unreadable), 0.0
    )
    return predictions, evaluate_classification(logits, labels, names, predictions.readable)


@pytest.fixture(scope="module")
def reported_run(tmp_path_factory):
    """Return a short run with a test evaluation and its page."""
    root = tmp_path_factory.mktemp("report")
    photos = make_folder(root / "photos", {"train": 12, "val": 4, "test": 4})
    train(str(photos), out=str(root / "run"), workers=0, **TINY_RUN)
    return root / "run"


def test_train_writes_a_complete_page(reported_run):
    page, summary = (reported_run / "report.html").read_text(), json.loads((reported_run / "summary.json").read_text())
    assert f"{100 * summary['test']['top1']:.2f} %" in page
    verdict = r'<p class="verdict"><b>[\d.]+ % top-1</b> on \d+ test images\s\([\d.]+ % to [\d.]+ %\); weakest class:'
    assert re.search(verdict + r"\s<b>\w+</b>\s\(F1 [\d.]+ %\)\.</p>", page)
    for heading in (
        "Training curves",
        "Metrics per class",
        "Confusion matrix",
        "Calibration",
        "Least certain images",
        "Data",
        "Compute",
        "Environment",
        "Commands to reproduce",
    ):
        assert f"<h2>{heading}</h2>" in page
    assert json.loads((reported_run / "data.json").read_text())["fingerprint"] in page
    assert json.loads((reported_run / "environment.json").read_text())["torch"] in page
    assert re.search(r"<td>\d[\d.,]* (M|G|T)FLOPs</td>", page) and "exaFLOPs" not in page and "device-hours" not in page
    assert page.count("data:image/") - page.count("attention rollout over") >= min(MAX_CARD_IMAGES, 12)
    assert page.count("attention rollout over") >= min(MAX_CARD_IMAGES, 12)
    chart_labels = re.findall(r'<svg role="img" aria-label="([^"]*)"', page)
    assert chart_labels[:3] == ["loss: training and validation (NLL)", "Validation top-1", "Learning rate"]


def make_loss_lines(*validation: float, falls: float = 0.5) -> list[dict[str, float]]:
    """Return metric lines with one evaluation per epoch; training loss is multiplied by `falls` in each."""
    lines, train = [], 2.0
    for epoch, loss in enumerate(validation, 1):
        lines += [{"epoch": epoch - 0.5, "train/loss": train}, {"epoch": float(epoch), "val/nll": loss}]
        train *= falls
    return lines


def test_overfitting_is_reported_only_by_its_rule():
    text = describe_overfitting(make_loss_lines(1.0, 0.8, 0.86, 0.9))
    assert text.startswith(
        "validation loss was lowest at epoch 2 (0.8) and rose by 12 % to 0.9 at epoch 4, while training loss "
        "fell from 1 to 0.25."
    )
    assert describe_overfitting(make_loss_lines(1.0, 0.8, 0.83, 0.9)) == ""  # one evaluation is less than 5 % above
    assert describe_overfitting(make_loss_lines(1.0, 0.8, 0.9, 0.83)) == ""
    assert describe_overfitting(make_loss_lines(1.0, 0.9, 0.8, 0.9)) == ""  # the minimum is among the last two
    # training loss decreased too little
    assert describe_overfitting(make_loss_lines(1.0, 0.8, 0.86, 0.9, falls=0.98)) == ""
    assert describe_overfitting(make_loss_lines(1.0, 2.0)) == describe_overfitting([]) == ""
    assert describe_overfitting([{"epoch": 1.0, "val/nll": 1.0}] * 4) == ""  # no training loss


def test_the_losses_are_two_series_of_one_chart():
    panel = build_loss_panel(make_loss_lines(1.0, 0.8, 0.86, 0.9))
    assert panel["title"] == "Loss" and panel["overfitting"].startswith("validation loss")
    assert ">training</text>" in panel["drawing"] and ">validation (NLL)</text>" in panel["drawing"]
    for colour in LINE_COLOURS[:2]:
        assert (
            len(re.findall(rf'<path d="[^"]+" clip-path="[^"]+" style="[^"]*stroke: {colour}', panel["drawing"])) == 1
        )
    training_only = build_loss_panel([{"epoch": 1.0, "train/loss": 1.0}])
    assert (
        training_only["title"] == "Training loss"
        and "validation" not in training_only["drawing"]
        and build_loss_panel([]) is None
    )


def test_rankme_is_drawn_from_zero_to_the_feature_width():
    lines = [{"step": step, "epoch": step / 4, "val/rankme": rank} for step, rank in ((4, 12.0), (8, 9.0))]
    run: Any = SimpleNamespace(model=SimpleNamespace(num_features=64))
    assert get_rankme_scale(lines, "val/rankme", run) == {
        "limits": (0.0, 1.04 * 64), "references": {"feature width, 64": 64.0}
    }  # fmt: skip
    before = {"step": 0, "epoch": 0.0, "val/rankme": 30.25}
    references = get_rankme_scale([before, *lines], "val/rankme", run)["references"]
    assert references == {"feature width, 64": 64.0, "untrained encoder, 30.2": 30.25}
    panel = next(
        candidate
        for candidate in draw_logged_curves([before, *lines], run)
        if candidate["title"] == "Validation RankMe"
    )
    assert ">untrained encoder, 30.2</text>" in panel["drawing"] and ">feature width, 64</text>" in panel["drawing"]
    assert panel["text"] == explain_metric("rankme")


def test_flops_are_formatted_with_a_suitable_unit():
    written = {
        2.454e-6: "2.45 TFLOPs",
        3.1e-9: "3.1 GFLOPs",
        0.0312: "31.2 PFLOPs",
        31.2: "31.2 exaFLOPs",
        4e3: "4,000 exaFLOPs",
    }
    assert {value: format_flops(value) for value in written} == written


@pytest.mark.parametrize(
    "key", sorted({*METRICS, *CURVE_TITLES, *(key for panel in PANELS for key in panel["series"])})
)
def test_every_metric_of_a_page_is_explained(key):
    text = explain_metric(key)
    assert text.endswith(".") and len(text) < 220


def test_metric_terms_have_unique_ids_and_escape_labels():
    term = MetricTerms()
    first, second = term("<b>", "top1"), term("top-1", "val/top1")
    assert "&lt;b&gt;" in first and "<b>" not in first and explain_metric("top1") in second
    ids = [
        re.search(r'aria-describedby="([^"]+)">.*role="tooltip" id="([^"]+)"', markup).groups()
        for markup in (first, second)
    ]
    assert ids[0] == ("term-1",) * 2 and ids[1] == ("term-2",) * 2
    assert term("<i>", "no metric") == "&lt;i&gt;"


def test_counts_of_sixty_classes_fit_their_cells():
    counts = np.full((60, 60), 10_000)
    drawing = draw_confusion_plot(counts, [f"class {class_index}" for class_index in range(60)])
    sizes = [float(size) for size in re.findall(r'<g class="count">\s*<text style="font-size: ([\d.]+)px', drawing)]
    assert len(sizes) == 3600 and [format_compact_count(count) for count in (9999, 10_000, 999_499, 999_500, 12_345_678)] == [
        "9999", "10k", "999k", "1.0M", "12M",
    ]  # fmt: skip
    assert drawing.count("<title>label class 3, predicted class 4: 10,000 (1.7 % of 600,000)</title>") == 1
    assert max(sizes) <= CELL_FONTS[1] and max(sizes) * 3 * DIGIT_WIDTH <= 72 * FINE_CELL_INCHES
    assert "class 7, predicted &lt;b&gt;" in draw_confusion_plot(np.eye(2, dtype=int)[::-1], ["class 7", "<b>"])


def test_attention_maps_span_their_percentiles():
    scaled = scale_attention_map(np.concatenate([np.linspace(0, 1, 1000), [50.0]]))
    assert scaled.min() == 0 and scaled.max() == 1 and scaled[500] == pytest.approx(0.5, abs=0.01)
    assert scale_attention_map(np.full((4, 4), 3.0)).max() == 0  # uniform attention has no contrast
    assert scale_attention_map(np.array([[1.0, 1.001]])).max() < 0.02
    light = np.asarray(overlay_heat_map(Image.new("RGB", (8, 8), "white"), np.zeros((2, 2))))
    assert light.mean() > 150  # the image stays visible where attention is low


def test_shares_have_two_significant_digits_and_never_round_to_100():
    written = {
        0: "0 %",
        1: "100 %",
        0.9131: "91 %",
        0.0124: "1.2 %",
        0.000342: "0.034 %",
        0.01: "1.0 %",
        0.0996: "10 %",
    }
    written |= {
        0.9949: "99 %",
        0.9963: "99.6 %",
        0.99972: "99.97 %",
        0.99999: "99.999 %",
        0.9999993: ">99.9999 %",
        1.34e-7: "1.3e-5 %",
    }
    assert {share: format_share(share) for share in written} == written
    assert (
        format_interval("top1", [0.91314, 0.94]) == "91.3 % to 94.0 %"
        and format_metric_value("nll", 0.12345) == "0.123"
    )


def test_names_break_at_separators_and_are_escaped():
    assert format_breakable_name("a/b_c-d.e:f\\g") == "a/<wbr>b_<wbr>c-<wbr>d.<wbr>e:<wbr>f\\<wbr>g"
    assert (
        format_breakable_name("<i>_&") == "&lt;i&gt;_<wbr>&amp;"
        and format_breakable_name("ant") == "ant"
        and format_breakable_name("ant_") == "ant_"
    )


def test_class_tables_scroll_by_keyboard_and_break_long_names(tmp_path):
    write_report(tmp_path / "page.html", None, *evaluate_noise(3, 9, names=("red_fox", "grey-wolf", "ant")))
    page = (tmp_path / "page.html").read_text()
    assert '<div class="wide" role="region" aria-label="classes" tabindex="0">' in page
    assert "<td>red_<wbr>fox</td>" in page and "<td>grey-<wbr>wolf</td>" in page
    assert re.search(r"<figcaption>[^%]*\d\u00a0%", page) and not re.search(r"<figcaption>[^%]*\.\d\d.%", page)


def test_an_unwritable_page_does_not_affect_the_metrics(reported_run, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(reported_run, out, ignore=shutil.ignore_patterns("checkpoints"))
    listener = NoteListener()
    document = evaluate(
        out, settings=EvaluateOptions(report=str(tmp_path / "no" / "page.html")), workers=0, listener=listener
    )
    assert document["report"] is None and document["test"]["images"] == 12
    assert any("no page at" in note for note in listener.notes)


def test_every_evaluation_has_a_separate_page(reported_run, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(reported_run, out, ignore=shutil.ignore_patterns("checkpoints"))
    (out / "report.html").unlink()
    photos = reported_run.parent / "photos"
    for data, split, name in ((None, "test", "report"), (None, "val", "report-val"), (photos, "test", "report-photos")):
        document = evaluate(out, data, split, workers=0)
        page = (out / f"{name}.html").read_text()
        assert document["report"] == str(out / f"{name}.html")
        assert f"vitreous evaluate {out}" in page and f"Evaluated on the {split} split" in page


def test_every_evaluation_is_listed_on_the_page(reported_run, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    out = tmp_path / "run"
    shutil.copytree(reported_run, out, ignore=shutil.ignore_patterns("checkpoints"))
    document = evaluate(out, workers=0, protocol="knn")
    assert document["report"] == str(out / "report-knn.html")
    page = (out / "report-knn.html").read_text()
    rows = re.search(r"<h2>Evaluations</h2>.*?</table>", page, re.DOTALL)[0]
    assert rows.count("<tr>") == 3 and "head" in rows and "knn" in rows
    assert rows.count(f"top-1 {100 * document['test']['top1']:.2f} %") >= 1 and "<h2>Training curves</h2>" in page


def test_a_page_needs_nothing_but_itself(reported_run):
    page = (reported_run / "report.html").read_text()
    assert not re.search(r'(?:src|href)="(?!data:|#)|@import|url\(\s*["\']?http|<script |<link(?! rel="icon")', page)
    assert page.count("<script>") == 1 and "fetch(" not in page


def test_names_are_text_and_never_markup(reported_run, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(reported_run, out, ignore=shutil.ignore_patterns("checkpoints"))
    config = (out / "config.yaml").read_text()
    (out / "config.yaml").write_text(re.sub("source: .*", "source: <script>x</script>", config))
    names = ("<b>$\\frac$</b>", "&amp;", "ant")
    write_report(out / "report.html", RunFolder(out), *evaluate_noise(3, 9, names=names), "evaluate <i>")
    page = (out / "report.html").read_text()
    assert "<script>x" not in page and "&lt;script&gt;x" in page and "<b>$" not in page and "<i>" not in page
    assert "&lt;b&gt;$\\frac$&lt;/b&gt;" in page and "&amp;amp;" in page


def test_ten_thousand_classes_are_sampled(tmp_path):
    write_report(tmp_path / "page.html", None, *evaluate_noise(10_000, 40))
    page = (tmp_path / "page.html").read_text()
    assert len(page) < 1_500_000 and page.count("<tr><td>class") <= MAX_CLASS_ROWS and "classes not shown" in page
    assert f"The {MAX_CLASS_MATRIX_SIZE} classes with the most errors" in page


def test_pages_for_multilabel_data_and_for_one_image(tmp_path):
    write_report(tmp_path / "several.html", None, *evaluate_noise(4, 12, multilabel=True))
    page = (tmp_path / "several.html").read_text()
    assert "mAP" in page and "<h2>Confusion matrix</h2>" not in page and ">AP</button>" in page
    write_report(tmp_path / "one.html", None, *evaluate_noise(3, 1))
    assert "noise: 1 image." in (tmp_path / "one.html").read_text()


def test_unreadable_images_are_counted_and_never_shown(tmp_path):
    predictions, report = evaluate_noise(3, 12, unreadable=range(6))
    image_cards = cards.build_image_cards(
        predictions.bundle, predictions.split, predictions.logits, predictions.unreadable
    )
    assert {card["name"] for card in image_cards["unsure"]} == {f"sample {sample}" for sample in range(6, 12)}
    write_report(tmp_path / "page.html", None, predictions, report)
    assert "6 are unreadable" in (tmp_path / "page.html").read_text()


def test_example_scores_match_a_naive_loop():
    draw = np.random.default_rng(3)
    logits, labels = draw.normal(size=(50, 5)).astype(np.float32) * 3, draw.integers(0, 5, 50)
    loss, margin, is_wrong = score_images(logits, labels)
    for row in range(50):
        p = torch.tensor(logits[row]).double().softmax(0)
        best = p.sort(descending=True).values
        assert loss[row] == pytest.approx(-float(p[labels[row]].log()))
        assert margin[row] == pytest.approx(float(best[0] - best[1])) and is_wrong[row] == (
            int(p.argmax()) != labels[row]
        )


def test_a_model_without_attention_shows_only_its_images():
    model = create_untrained_model("BiT-R50x1", image_size=32, num_classes=3, blocks=(1,), width=16).eval()
    bundle = Bundle(model, Classification(("a", "b", "c")), ImagePreprocess((32, 32)))
    split = ArraySplit(np.stack([np.asarray(make_image(seed, (32, 32))) for seed in range(3)]), np.arange(3))
    image_cards = cards.build_image_cards(bundle, split, np.eye(3, dtype=np.float32)[[1, 1, 1]], frozenset())
    assert [card["attention"] for card in image_cards["worst"]] == [None, None]


SCROLL_STATE_JS = """table => {
  table.focus();
  const shadow = getComputedStyle(table).backgroundAttachment;
  return {overflow: table.scrollWidth > table.clientWidth, focused: document.activeElement === table, shadow};
}"""


@needs_chromium
@pytest.mark.parametrize("width", [390, 1440])
def test_the_page_has_no_browser_errors_or_requests(reported_run, width):
    playwright = pytest.importorskip("playwright.sync_api")
    messages, requests = [], []
    with playwright.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": 900})
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(f"file://{os.path.abspath(reported_run / 'report.html')}")
        images = page.eval_on_selector_all(
            "img", "all => all.map(one => one.complete && one.naturalWidth > 0 && one.offsetWidth > 0)"
        )
        drawings = page.eval_on_selector_all("svg", "all => all.map(one => one.getBoundingClientRect().width)")
        wide = page.evaluate("document.documentElement.scrollWidth")
        sides = page.eval_on_selector_all(".cards img", "all => all.map(one => one.getBoundingClientRect().width)")
        scrolls = page.eval_on_selector(".wide[aria-label=classes]", SCROLL_STATE_JS)
        browser.close()
    assert not messages and [url for url in requests if not url.startswith(("file:", "data:"))] == []
    assert len(images) >= MAX_CARD_IMAGES and all(images)
    assert len(drawings) >= 5 and all(100 < drawing_width <= width for drawing_width in drawings)
    assert wide <= width
    small = [side for side in sides if side < (150 if width == 390 else 110)]
    assert len(sides) >= MAX_CARD_IMAGES and small == []
    assert (
        scrolls["overflow"] == (width == 390)
        and scrolls["focused"]
        and scrolls["shadow"] == "local, local, scroll, scroll"
    )
