"""The page in a browser shows Python's predictions, for mouse, keyboard and touch, on phone and desktop sizes."""

from __future__ import annotations

import base64
import io
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.browser import find_chromium, needs_chromium
from tests.conftest import make_folder, make_image
from tests.inference.small_models import read_predictor_input
from vitreous.apps.server.attention import AttentionRequest, attention_to_json, compute_position_similarity
from vitreous.apps.server.server import serve_in_thread
from vitreous.apps.server.settings import AccessControl, ServerLimits, ServerSettings
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.inference.engine import remove_head
from vitreous.inference.index import open_index, write_index
from vitreous.inference.predict import load
from vitreous.models.config import MlpConfig, ViTConfig
from vitreous.models.zoo import build_model
from vitreous.reports.pages.formats import format_breakable_name, format_share
from vitreous.tasks.classification import Classification
from vitreous.tasks.features import FeatureExtraction
from vitreous.weights.bundle import Bundle, load_bundle

playwright = pytest.importorskip("playwright.sync_api")
expect = playwright.expect

CLASSES = ("<b>ant</b>", "bee", "cat", "dog", "eel", "fox", "gnu")
QUIET_SETTINGS = replace(ServerSettings(), port=0, quiet=True, decoders=1, limits=ServerLimits(bytes=2**20))
CHROMIUM_FLAGS = ["--no-sandbox", "--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]
VIEWPORTS = {"phone": (390, 844), "desk": (1440, 900)}
TIMEOUT_MS = 30_000  # milliseconds
slow = pytest.mark.slow


pytestmark = needs_chromium


@pytest.fixture(scope="module")
def page_models(tmp_path_factory):
    """Return a bundle whose heads attend to different positions, with an index, and images."""
    root = tmp_path_factory.mktemp("page")
    torch.manual_seed(0)
    model = build_model(
        ViTConfig(
            image=(40, 40), patch=(8, 8), classes=len(CLASSES), width=32, depth=3, heads=2, mlp=MlpConfig(hidden=64)
        )
    ).eval()
    torch.nn.init.normal_(model.head.weight)
    for name, parameter in model.named_parameters():
        if "qkv.weight" in name:
            parameter.data *= 1.5
    Bundle(model, Classification(CLASSES), ImagePreprocess((40, 40), share=0.8)).save(root / "model")
    data = make_folder(root / "photos", {"train": 3, "val": 1}, size=(60, 90))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        write_index(root / "model", data)
    for number in range(2):
        make_image(number, (96, 64), number).save(root / f"{number}.png")
    (root / "<i>notes.jpg").write_text("not an image")
    (root / "large.png").write_bytes(bytes(2**20 + 1))
    return root


@pytest.fixture(scope="module")
def predictor(page_models):
    return load(page_models / "model")


@pytest.fixture(scope="module")
def server_address(page_models, predictor):
    with serve_in_thread(predictor, QUIET_SETTINGS, page_models / "model") as server:
        yield server.address


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=find_chromium(), args=CHROMIUM_FLAGS)
        yield chromium
        chromium.close()


class PageVisit:
    """An open page that records its requests and console messages."""

    def __init__(self, browser, server_address: str, size: str = "desk", theme: str = "light") -> None:
        wide, high = VIEWPORTS[size]
        self.address, self.console_messages, self.requested_urls, self.expects_failed_requests = (
            server_address,
            [],
            [],
            0,
        )
        phone = {"has_touch": True, "is_mobile": True} if size == "phone" else {}
        self.context = browser.new_context(
            viewport={"width": wide, "height": high},
            color_scheme=theme,
            reduced_motion="reduce",
            permissions=["camera"],
            **phone,
        )
        self.page = page = self.context.new_page()
        page.set_default_timeout(TIMEOUT_MS)
        page.on("console", lambda message: self.console_messages.append(message.text))
        page.on("pageerror", lambda error: self.console_messages.append(str(error)))
        page.on("request", lambda request: self.requested_urls.append(request.url))
        page.goto(server_address)

    def find(self, selector: str):
        return self.page.locator(selector)

    def see(self, selector: str, text, **options) -> None:
        expect(self.find(selector)).to_contain_text(text, timeout=TIMEOUT_MS, **options)

    def submit_files(self, *files: Path) -> None:
        """Select files; wait for their predictions and the attention of the last one."""
        self.see("#model", "classes")
        before = self.find("#history li").count()
        self.page.set_input_files("#file", files)
        expect(self.find("#history li")).to_have_count(before + len(files), timeout=TIMEOUT_MS)
        self.see("#history [aria-current]", files[-1].name)
        self.settle()

    def settle(self) -> None:
        self.see("#readout", re.compile("row", re.I))
        expect(self.find("#busy")).to_be_hidden(timeout=TIMEOUT_MS)
        self.page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def drawn(self) -> str:
        return self.page.evaluate("document.getElementById('picture').toDataURL()")

    def list_attention_requests(self) -> list[str]:
        return [url for url in self.requested_urls if "/v1/attention" in url]

    def set_slider(self, slider: str, value: int) -> None:
        self.find(f"#{slider}").fill(str(value))
        self.settle()

    def choose_option(self, name: str, value: str) -> None:
        self.find(f"input[name={name}][value={value}]").check(force=True)
        self.settle()

    def read_patch_lightness(self) -> np.ndarray:
        """Return the lightness (5, 5) of the canvas at the centre of every patch.

        The image must be wide and displayed in the central 0.8 of its height.
        """
        values = self.page.evaluate(
            """() => {
              const canvas = document.getElementById("picture"), copy = new OffscreenCanvas(canvas.width, canvas.height), found = [];
              const pen = copy.getContext("2d", {willReadFrequently: true});
              pen.drawImage(canvas, 0, 0);
              const share = Math.min(canvas.width / 96, canvas.height / 64), side = 0.8 * 64 * share;
              for (let row = 0; row < 5; row++) for (let column = 0; column < 5; column++) {
                const x = canvas.width / 2 + (column - 2) * side / 5, y = canvas.height / 2 + (row - 2) * side / 5;
                const [r, g, b] = pen.getImageData(x, y, 1, 1).data;
                found.push(0.2126 * (r / 255) ** 2.2 + 0.7152 * (g / 255) ** 2.2 + 0.0722 * (b / 255) ** 2.2);
              }
              return found;
            }"""
        )
        return np.array(values).reshape(5, 5)

    def patch_position(self, row: int, column: int) -> dict[str, float]:
        """Return the position of a patch on the canvas, in pixels of the page."""
        frame = self.find("#picture").bounding_box()
        share = min(frame["width"] / 96, frame["height"] / 64)
        side = 0.8 * 64 * share / 5
        return {"x": frame["width"] / 2 + (column - 2) * side, "y": frame["height"] / 2 + (row - 2) * side}

    def leave(self) -> None:
        """Close the page; assert that it logged nothing unexpected and requested nothing from other hosts."""
        self.context.close()
        unexpected = [
            text
            for text in self.console_messages
            if not (self.expects_failed_requests and text.startswith("Failed to load resource"))
        ]
        assert unexpected == []
        assert [
            url for url in self.requested_urls if not url.startswith((self.address + "/", "blob:", "data:image/"))
        ] == []


@pytest.fixture
def visit(request, browser, server_address):
    """Return a page visit by size and theme."""
    page_visit = PageVisit(browser, server_address, *getattr(request, "param", ("desk", "light")))
    yield page_visit
    page_visit.leave()


def compute_attention(predictor, file: Path, **query: str) -> dict:
    """Return Python's attention of a file."""
    return attention_to_json(
        predictor.bundle, read_predictor_input(predictor, file), AttentionRequest.parse(query, predictor.bundle.model)
    )


def brightness_follows_weights(lightness: np.ndarray, weights) -> bool:
    """Return whether lightness is monotonic in the weights, within the resolution of 8-bit colours."""
    weights = np.array(weights)
    ordered = lightness.ravel()[np.argsort(weights.ravel())]
    return lightness.argmax() == weights.argmax() and bool((np.diff(ordered) > -0.01).all()) and np.ptp(lightness) > 0.2


def test_an_encoder_without_a_head_shows_attention_and_neighbours(browser, page_models, tmp_path):
    shutil.copytree(page_models / "model", tmp_path / "encoder")
    bundle = load_bundle(page_models / "model")
    model = remove_head(bundle.model)
    Bundle(model, FeatureExtraction(), bundle.preprocess).save(tmp_path / "encoder")
    (tmp_path / "photos").mkdir()
    for number in range(2):
        shutil.copy(page_models / f"{number}.png", tmp_path / "photos")
    write_index(tmp_path / "encoder", tmp_path / "photos")
    with serve_in_thread(load(tmp_path / "encoder", headless=True), QUIET_SETTINGS, tmp_path / "encoder") as server:
        visit = PageVisit(browser, server.address)
        visit.submit_files(page_models / "1.png")
        visit.see("#model", "Feature extraction, no classes")
        expect(visit.find("#answer")).to_be_hidden()
        visit.see("#neighbours li:first-child", "1.png")
        assert visit.find("#neighbours li").count() == 2 and visit.list_attention_requests()
        assert visit.find("#history li p").all_text_contents() == ["1.png"]
        visit.leave()


@pytest.mark.parametrize("visit", [("desk", "light"), pytest.param(("phone", "dark"), marks=slow)], indirect=True)
def test_page_predictions_match_python(visit, page_models, predictor):
    visit.submit_files(page_models / "0.png")
    expected = predictor.predict([page_models / "0.png"], top=7)[0]
    names = visit.find("#answers .name").all_text_contents()
    shares = [text.replace("\u00a0", " ") for text in visit.find("#answers .share").all_text_contents()]
    assert names == list(expected.names[:5]) and visit.find("#answers b").count() == 0
    assert shares == [format_share(p) for p in expected.probabilities[:5]]
    bars = visit.page.eval_on_selector_all(
        "#answers i", "all => all.map(one => one.offsetWidth / one.parentElement.offsetWidth)"
    )
    assert np.allclose(bars, expected.probabilities[:5], atol=0.01)
    visit.find("#more").click()
    assert visit.find("#answers .name").all_text_contents() == list(expected.names)
    assert expected.names[0] in visit.find("#said").text_content()
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= visit.page.viewport_size["width"]


@pytest.mark.parametrize("visit", [("desk", "dark"), pytest.param(("phone", "light"), marks=slow)], indirect=True)
def test_sliders_show_every_block_and_head_with_one_request(visit, page_models, predictor):
    visit.submit_files(page_models / "0.png")
    visit.choose_option("kind", "raw")
    visit.choose_option("edges", "blocks")
    visit.set_slider("opacity", 100)
    num_requests = len(visit.list_attention_requests())
    every = np.array(
        compute_attention(predictor, page_models / "0.png", kind="raw", layer="all", head="all")["weights"]
    )
    drawings = set()
    for layer in (0, 2):
        for head, weights in (
            (0, every[layer].mean(0)),
            (1, every[layer].max(0)),
            (2, every[layer].min(0)),
            (4, every[layer][1]),
        ):
            visit.set_slider("layer", layer)
            visit.set_slider("head", head)
            assert brightness_follows_weights(visit.read_patch_lightness(), weights), (layer, head)
            drawings.add(visit.drawn())
    assert len(drawings) == 8 and len(visit.list_attention_requests()) == num_requests
    assert visit.find("#head").get_attribute("aria-valuetext") == "head 2 of 2"
    smooth = visit.drawn()
    visit.choose_option("edges", "smooth")
    assert visit.drawn() != smooth
    visit.choose_option("kind", "rollout")
    rolled = np.array(compute_attention(predictor, page_models / "0.png", layer="all")["weights"])
    visit.choose_option("edges", "blocks")
    for layer in (0, 2):
        visit.set_slider("layer", layer)
        assert brightness_follows_weights(visit.read_patch_lightness(), rolled[layer])
    visit.choose_option("view", "light")
    highlighted = visit.drawn()
    visit.set_slider("opacity", 0)
    assert visit.drawn() != highlighted


@pytest.mark.parametrize("visit", [pytest.param(("desk", "light"), marks=slow), ("phone", "light")], indirect=True)
def test_clicking_a_patch_shows_its_attention(visit, page_models, predictor):
    visit.submit_files(page_models / "0.png")
    visit.choose_option("kind", "raw")
    visit.choose_option("edges", "blocks")
    visit.set_slider("opacity", 100)
    visit.set_slider("head", 3)
    position = visit.patch_position(1, 3)
    (visit.find("#picture").tap if visit.page.viewport_size["width"] < 500 else visit.find("#picture").click)(
        position=position
    )
    visit.see("#meaning", "Raw attention of block 3, head 1, from the patch at row 2, column 4.")
    visit.settle()
    assert visit.list_attention_requests()[-1].endswith("query=1,3")
    visit.page.mouse.move(1, 1)
    visit.settle()
    assert brightness_follows_weights(
        visit.read_patch_lightness(),
        compute_attention(predictor, page_models / "0.png", kind="raw", head="0", query="1,3")["weights"],
    )
    visit.find("#back").click()
    visit.see("#meaning", "from the pooled output")
    visit.find("#back").wait_for(state="hidden")


def test_the_plain_image_is_shown_next_to_the_attention(visit, page_models):
    def read_plain() -> np.ndarray:
        url = visit.page.evaluate("document.getElementById('plain').toDataURL()")
        plain_image = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).convert("RGB")
        assert plain_image.height == 144 and plain_image.width == 216
        return np.asarray(plain_image.resize((96, 64), Image.Resampling.BOX), float)

    def average_blocks(pixels: np.ndarray) -> np.ndarray:
        return pixels.reshape(8, 8, 12, 8, 3).mean((1, 3))

    visit.see("#model", "classes")
    before = visit.find("#layer").bounding_box()
    visit.submit_files(page_models / "0.png")
    assert visit.find("#layer").bounding_box() == before
    plain_pixels = read_plain()
    photo = np.asarray(Image.open(page_models / "0.png").convert("RGB"), float)
    assert np.abs(average_blocks(plain_pixels) - average_blocks(photo)).max() < 10  # of 255
    visit.set_slider("opacity", 100)
    visit.set_slider("layer", 0)
    assert (read_plain() == plain_pixels).all()
    visit.find("#picture").click(position=visit.patch_position(1, 3))
    visit.see("#meaning", "the patch at row 2, column 4")
    visit.settle()
    rows, columns = np.nonzero(np.abs(read_plain() - plain_pixels).sum(-1) > 30)
    side = 0.8 * 64 / 5  # of a patch, which has a frame
    middle = 32 + (1 - 2) * side, 48 + (3 - 2) * side
    assert abs(rows - middle[0]).max() < side / 2 + 2 and abs(columns - middle[1]).max() < side / 2 + 2
    assert np.ptp(rows) > side - 2 and np.ptp(columns) > side - 2


def test_the_page_is_usable_with_the_keyboard(visit, page_models, predictor):
    visit.submit_files(page_models / "0.png")
    keys, focused = visit.page.keyboard, []
    visit.page.evaluate("document.activeElement.blur()")
    for _ in range(40):
        keys.press("Tab")
        focused.append(
            visit.page.evaluate(
                "document.activeElement.id || document.activeElement.name || document.activeElement.tagName"
            )
        )
        if focused[-1] == "SUMMARY":
            break
    controls = [
        "file",
        "camera",
        "picture",
        "zoom",
        "more",
        "kind",
        "view",
        "layer",
        "head",
        "opacity",
        "edges",
        "forget",
        "mosaic",
        "SUMMARY",
    ]
    assert [name for name in focused if name in controls] == controls
    visit.find("#picture").focus()
    keys.press("ArrowLeft")
    start = [int(number) - 1 for number in re.findall(r"\d+", visit.find("#said").text_content())[:2]]
    steps = [("ArrowUp", max(0, start[0] - 1), start[1]), ("ArrowRight", max(0, start[0] - 1), min(4, start[1] + 1))]
    weights = np.array(compute_attention(predictor, page_models / "0.png")["weights"])
    for key, row, column in steps:
        keys.press(key)
        visit.see(
            "#said",
            f"row {row + 1}, column {column + 1}: {format_share(weights[row, column])}".replace(" %", "\u00a0%"),
        )
    keys.press("Enter")
    visit.see("#meaning", f"the patch at row {row + 1}, column {column + 1}")
    visit.settle()
    keys.press("Escape")
    visit.see("#meaning", "Attention rollout over")
    visit.find("#layer").focus()
    keys.press("Home")
    assert visit.find("#layer-text").text_content() == "1 of 3"


def test_history_images_return_with_their_predictions(visit, page_models, predictor):
    visit.submit_files(page_models / "0.png", page_models / "1.png")
    first, second = (predictor.predict([page_models / f"{number}.png"])[0].names[0] for number in range(2))
    visit.see("#answers li:first-child .name", second)
    drawing, num_requests = visit.drawn(), len(visit.list_attention_requests())
    visit.page.get_by_role("button", name="0.png").click()
    visit.see("#history [aria-current]", "0.png")
    visit.see("#answers li:first-child .name", first)
    visit.settle()
    assert visit.drawn() != drawing
    visit.page.get_by_role("button", name="1.png").click()
    visit.see("#history [aria-current]", "1.png")
    visit.settle()
    assert visit.drawn() == drawing and len(visit.list_attention_requests()) <= num_requests + 1
    visit.find("#forget").click()
    expect(visit.find("#history li")).to_have_count(1)


def test_formats_unsupported_by_browsers_are_predicted(visit, page_models, predictor):
    make_image(5, (96, 64)).save(page_models / "drawn.tif")
    visit.submit_files(page_models / "drawn.tif")
    visit.see("#answers li:first-child .name", predictor.predict([page_models / "drawn.tif"])[0].names[0])
    visit.see("#readout", "this browser cannot display the image")
    assert visit.find("#zoom").is_hidden() and visit.find("#history img").count() == 0


def test_errors_show_a_fix_and_keep_the_last_prediction(visit, page_models, predictor):
    visit.submit_files(page_models / "0.png")
    best = visit.find("#answers li:first-child .name").text_content()
    visit.expects_failed_requests = True
    visit.page.set_input_files("#file", page_models / "<i>notes.jpg")
    visit.see("[role=alert]", "<i>notes.jpg: not an image of a known format")
    visit.see("[role=alert]", "Use one of JPEG")
    assert (
        visit.find("[role=alert] i").count() == 0 and visit.find("#answers li:first-child .name").text_content() == best
    )
    visit.page.get_by_role("button", name="Close").click()
    visit.page.set_input_files("#file", page_models / "large.png")
    visit.see("[role=alert]", "large.png is 1.0 MiB; this server accepts at most 1.0 MiB.")
    full = {"error": {"code": "queue_full", "message": "40 images are queued", "hint": "retry", "request_id": "x"}}
    visit.page.route(
        "**/v1/predict*", lambda route: route.fulfill(status=429, json=full, headers={"Retry-After": "3"}), times=1
    )
    visit.page.set_input_files("#file", page_models / "1.png")
    visit.see("[role=alert]", "40 images are queued")
    visit.see("[role=alert]", "Try again in 3 seconds.")
    visit.page.get_by_role("button", name="Try again").click()
    visit.see("#history [aria-current]", "1.png")
    assert visit.find("[role=alert]").text_content() == ""
    visit.settle()
    other_version = {"model": {"name": "x", "version": "another"}, "predictions": []}
    visit.page.route("**/v1/predict*", lambda route: route.fulfill(json=other_version), times=1)
    visit.page.set_input_files("#file", page_models / "0.png")
    visit.see("[role=alert]", "The served model has changed.")
    visit.see("#history [aria-current]", "1.png")


def test_positions_filters_and_neighbours_match_the_model(visit, page_models, predictor):
    visit.submit_files(page_models / "photos" / "train" / "bee" / "1.png")
    index = open_index(page_models / "model")
    pixels = read_predictor_input(predictor, page_models / "photos" / "train" / "bee" / "1.png")
    expected = index.nearest(predictor.engine.features(pixels[None])[0], 8)
    expect(visit.find("#neighbours li")).to_have_count(8)
    listed = visit.find("#neighbours li").all_text_contents()
    assert listed[0] == "bee1.png · cosine 1.000"
    assert listed == [
        f"{neighbour.label}{neighbour.name} · cosine {neighbour.similarity:.3f}" for neighbour in expected
    ]
    visit.find("#inside").scroll_into_view_if_needed()
    similar = np.array(compute_position_similarity(predictor.bundle)["similarity"])
    frame = visit.find("#mosaic").bounding_box()
    visit.see("#positions-text", "row 3, column 3")
    visit.find("#mosaic").click(position={"x": frame["width"] * 0.7, "y": frame["height"] * 0.1})
    other_similarities, pairs = np.delete(similar[3], 3), similar[~np.eye(25, dtype=bool)]
    least, most = (f"{end:.2f}".replace("-", "−") for end in (pairs.min(), pairs.max()))
    listed = (
        f"row 1, column 4 to all others: {other_similarities.min():.2f} to {other_similarities.max():.2f}.".replace(
            "-", "−"
        )
    )
    visit.see("#positions-text", f"{listed} Colour scale: {least} to {most}")
    assert (visit.find("#scale-least").text_content(), visit.find("#scale-most").text_content()) == (least, most)
    light = visit.page.evaluate(CANVAS_LIGHTNESS_JS)
    assert (
        brightness_follows_weights(np.array(light), np.where(np.arange(25) == 3, pairs.max(), similar[3]))
        and max(light) - min(light) > 0.3
    )
    expect(visit.find("#filters-image")).to_have_js_property("complete", True)
    assert visit.page.evaluate(
        "[document.images.length > 8, [...document.images].every(one => one.naturalWidth > 0)]"
    ) == [True, True]


@slow
def test_images_can_be_dropped_pasted_and_captured(visit, page_models):
    visit.see("#model", "classes")
    dropped_file = visit.page.evaluate_handle(
        """async () => {
          const canvas = Object.assign(document.createElement("canvas"), {width: 50, height: 40});
          canvas.getContext("2d").fillRect(5, 5, 20, 20);
          const carried = new DataTransfer();
          carried.items.add(new File([await new Promise(done => canvas.toBlob(done))], "dropped.png", {type: "image/png"}));
          return carried;
        }"""
    )
    visit.page.dispatch_event("#stage", "drop", {"dataTransfer": dropped_file})
    visit.see("#history [aria-current]", "dropped.png")
    visit.page.evaluate("carried => dispatchEvent(new ClipboardEvent('paste', {clipboardData: carried}))", dropped_file)
    expect(visit.find("#history li")).to_have_count(2)
    visit.find("#camera").click()
    expect(visit.find("#video")).to_have_js_property("readyState", 4, timeout=TIMEOUT_MS)
    visit.find("#take").click()
    visit.see("#history [aria-current]", "camera.jpg")
    expect(visit.find("#video")).to_have_js_property("srcObject", None)
    visit.settle()


CANVAS_LIGHTNESS_JS = """() => {
  const canvas = document.getElementById("one"), { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const light = (place) => [0.2126, 0.7152, 0.0722].reduce((sum, share, colour) => sum + share * data[4 * place + colour], 0) / 255;
  return Array.from({length: data.length / 4}, (_, place) => light(place));
}"""
LOW_CONTRAST_JS = """() => {
  const light = ([r, g, b]) => [r, g, b].map(v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const parts = text => text.match(/[\\d.]+/g).map(Number), bad = [];
  for (const one of document.querySelectorAll("body *")) {
    const own = [...one.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
    if (!own || !one.checkVisibility({visibilityProperty: true}) || one.closest(".unseen, .skip, .wait")) continue;
    let back = one;
    while (back.parentElement && (parts(getComputedStyle(back).backgroundColor)[3] ?? 1) < 1) back = back.parentElement;
    const pair = [light(parts(getComputedStyle(one).color)), light(parts(getComputedStyle(back).backgroundColor))].sort((a, b) => b - a);
    const ratio = (pair[0] + 0.05) / (pair[1] + 0.05);
    if (ratio < 4.5) bad.push([one.className, one.textContent.trim().slice(0, 30), ratio]);
  }
  return bad;
}"""
OVERFLOWING_ELEMENTS_JS = """() => [...document.querySelectorAll("body *")]
  .filter(one => one.checkVisibility() && !one.closest(".unseen, .skip, .long"))
  .filter(one => { const {left, right} = one.getBoundingClientRect(); return left < 0 || right > innerWidth; }).map(one => one.outerHTML)"""
TOUCH_TARGETS_JS = """() => [...document.querySelectorAll("button, .button, input[type=range], .choice span, summary, #mosaic")]
  .filter(one => one.checkVisibility()).map(one => [one.id || one.textContent, one.getBoundingClientRect().height])"""


SIZES_AND_THEMES = [
    pytest.param((size, theme), marks=[slow] * (size != "phone")) for size in VIEWPORTS for theme in ("light", "dark")
]


@pytest.mark.parametrize("visit", SIZES_AND_THEMES, indirect=True)
def test_contrast_and_touch_targets_in_every_size_and_theme(visit, page_models):
    visit.see("#model", "classes")
    frame = visit.find("#stage").bounding_box()
    visit.submit_files(page_models / "0.png")
    after = visit.find("#stage").bounding_box()
    assert frame == after
    visit.expects_failed_requests = True
    visit.page.set_input_files("#file", page_models / "<i>notes.jpg")
    visit.see("[role=alert]", "not an image")
    assert visit.page.evaluate(LOW_CONTRAST_JS) == []
    visit.find("#picture").click(position=visit.patch_position(4, 0))
    visit.find("#back").wait_for()
    assert visit.page.evaluate(OVERFLOWING_ELEMENTS_JS) == []
    small = [target for target in visit.page.evaluate(TOUCH_TARGETS_JS) if target[1] < 40]
    assert small == []
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= visit.page.viewport_size["width"]
    has_names = (
        "all => all.filter(one => !(one.labels?.length || one.ariaLabel || one.textContent.trim())).map(one => "
        "one.outerHTML)"
    )
    assert visit.page.eval_on_selector_all("button, input, canvas[tabindex]", has_names) == []


def test_an_unreachable_server_is_reported(browser, page_models, predictor):
    with serve_in_thread(predictor, QUIET_SETTINGS, page_models / "model") as server:
        visit = PageVisit(browser, server.address)
        visit.submit_files(page_models / "0.png")
    visit.expects_failed_requests = True
    visit.page.set_input_files("#file", page_models / "1.png")
    visit.see("[role=alert]", "No response from the server.")
    visit.leave()


@slow
def test_a_token_is_requested_and_kept_for_the_tab(browser, page_models, predictor):
    settings = replace(QUIET_SETTINGS, access=AccessControl(token=b"a-secret-of-this-test"))
    with serve_in_thread(predictor, settings, page_models / "model") as server:
        visit = PageVisit(browser, server.address)
        visit.expects_failed_requests = True
        visit.find("#token-value").fill("wrong")
        visit.page.keyboard.press("Enter")
        visit.see("#token-text", "Invalid token.")
        visit.find("#token-value").fill("a-secret-of-this-test")
        visit.page.keyboard.press("Enter")
        visit.submit_files(page_models / "0.png")
        visit.page.reload()
        visit.see("#model", "7 classes")
        visit.leave()


def test_page_files_make_no_external_requests():
    folder = Path(__file__).parents[3] / "vitreous" / "apps" / "server" / "page"
    files = [file for file in folder.iterdir() if file.suffix in (".html", ".css", ".js", ".svg")]
    assert {"index.html", "style.css", "app.js"} <= {file.name for file in files}
    for file in files:
        text = file.read_text("utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(
            r"https?:|//[a-z]+\.|innerHTML|outerHTML|insertAdjacentHTML|\beval\(|\bstyle=|\son[a-z]+=\"", text
        ), file


def test_upload_hints_match_the_device(browser, server_address):
    for size, expected, unexpected_text in (
        ("phone", "Tap to choose an image", "Drop"),
        ("desk", "Drop an image here", "Tap"),
    ):
        visit = PageVisit(browser, server_address, size)
        visit.see("#model", "classes")
        visit.page.evaluate(
            "document.getElementById('model').textContent = 'R50+ViT-B/16-with-a-very-long-name · 1000 classes'"
        )
        body_text = visit.find("body").inner_text()
        assert expected in body_text and unexpected_text not in body_text
        lines = (
            "one => "
            "{ const range = document.createRange(); range.selectNodeContents(one); return range.getClientRects().length; }"
        )
        assert visit.find("h1").evaluate(lines) == 1
        assert visit.page.evaluate("document.documentElement.scrollWidth") <= visit.page.viewport_size["width"]
        with visit.page.expect_file_chooser():
            visit.find("#empty").click()
        visit.leave()


def test_shares_and_names_are_written_as_in_the_reports(visit):
    visit.see("#model", "classes")
    shares = [
        0,
        1,
        0.9131,
        0.0124,
        0.000342,
        1.3e-7,
        0.0999,
        0.9949,
        0.9963,
        0.99972,
        0.9999993,
        *np.geomspace(1e-6, 0.99, 40),
    ]
    written = visit.page.evaluate(
        "async shares => { const { percent } = await import('/static/page.js'); return shares.map(percent); }", shares
    )
    assert [text.replace("\u00a0", " ") for text in written] == [format_share(share) for share in shares]
    script = (
        "async name => "
        "{ const { makeName } = await import('/static/page.js'); return makeName('p', 'dim', name).outerHTML; }"
    )
    name = "a/b_c-d.e:f\\g <i>.png"
    assert visit.page.evaluate(script, name) == f'<p class="dim">{format_breakable_name(name)}</p>'
