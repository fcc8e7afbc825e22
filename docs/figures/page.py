"""Draw `page.webp` and `page-dark.webp`: the page of `vitreous serve` with a photo, its prediction and its attention.

The script serves a trained classifier, controls the page in headless Chromium, and uses its screenshots as frames. It
adds three elements to the page: a pointer, the dropped photo under it, and the caption at the bottom. The attention
request is delayed until a screenshot of the prediction has been taken.

Dataset `leaf-symptoms`: 5 classes of photographed coffee leaves (leaf miner, rust, phoma, cercospora, healthy), from
the folder classification/dataset/symptom of https://github.com/esgario/lara2018, MIT licence. Cite: Esgario, Krohling,
Ventura, "Deep learning for classification and severity estimation of coffee leaf biotic stress", Computers and
Electronics in Agriculture 169, 2020. The figure was made with a subset of the photos at reduced size: 70 / 15 / 35 per
class of the official train / val / test folders. The classifier is trained from scratch with `TRAINING`, which takes
8.5 minutes of CPU time. Its test top-1 accuracy is 90.3 % (95 % interval 85.0 % to 93.8 %, 175 photos).

`PHOTO` was chosen by hand among 48 test photos for the clear attention maps of its large lesion. It is classified
correctly.
"""

from __future__ import annotations

import base64
import io
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Page, sync_playwright
from rendering import find_chromium

OUTPUTS = ("page.webp", "page-dark.webp")
DATASETS = ("leaf-symptoms",)

TRAINING = (
    *("--init", "none", "--model", "ViT-192x6/8", "--image-size", "128", "--views.crop", "0.4", "1"),
    *("--epochs", "100", "--batch-size", "32", "--lr", "0.0005", "--device", "cpu", "--seed", "0"),
)
PHOTO = "test/rust/1347_*.jpg"
#: clicked patches, (row, column) from 0 in a grid of 16 x 16: the lesion, the vein above it, the healthy leaf
PATCHES = ((8, 8), (2, 12), (12, 3))

VIEWPORT = {"width": 1148, "height": 886}  # in CSS pixels; the last `CAPTION_HEIGHT` rows show the caption
CAPTION_HEIGHT = 76
WIDTH = 1000  # width of the figure in pixels
MOVE_STEPS, MOVE_MS = 5, 55  # frames per movement of the pointer, and milliseconds per frame
QUALITY = 80  # quality of the WebP file, 0 to 100

ADDITIONS = """(photo) => {
  const add = (id, style, html = "") => {
    const element = Object.assign(document.createElement("div"), { id, innerHTML: html });
    element.style.cssText = `position: fixed; z-index: 9; pointer-events: none; ${style}`;
    document.body.append(element);
  };
  add("figure-caption", `left: 0; right: 0; bottom: 0; height: HEIGHTpx; display: grid; place-items: center;
    background: #10363a; color: #fff; font: 600 35px/1 system-ui, sans-serif; white-space: nowrap;`);
  add("figure-photo", "left: -200px; top: 0;", `<img src="${photo}">`);
  const image = document.querySelector("#figure-photo img"); // the security policy of the page forbids style attributes
  image.style.cssText = `display: block; width: 130px; border-radius: 8px; border: 3px solid #fff;
    box-shadow: 0 4px 16px #0008;`;
  add("figure-pointer", "left: -200px; top: 0; width: 44px; filter: drop-shadow(0 2px 2px #0008);",
    `<svg viewBox="0 0 22 30"><path d="M2 2v22l5.5-5 3.6 8.4 4-1.7-3.5-8.2H19z" fill="#fff"
      stroke="#000" stroke-width="1.8" stroke-linejoin="round"/></svg>`);
}""".replace("HEIGHT", str(CAPTION_HEIGHT))
#: script that dispatches a drag event with the photo to the element `stage`
DRAG = """([kind, data, name]) => {
  const transfer = new DataTransfer(), bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
  transfer.items.add(new File([bytes], name, { type: "image/jpeg" }));
  const drag = new DragEvent(kind, { dataTransfer: transfer, bubbles: true, cancelable: true });
  document.getElementById("stage").dispatchEvent(drag);
}"""


def build(context: Any) -> None:
    """Train the classifier, if there is no run yet, and record its page in the light and the dark colour scheme.

    Args:
        context: the `Context` of build.py.

    Raises:
        SystemExit: the dataset does not contain `PHOTO`, or Chromium is not installed.
    """
    data, run = context.datasets["leaf-symptoms"], context.work / "leaf-symptoms"
    photo = next(iter(sorted(data.glob(PHOTO))), None)
    if photo is None:
        raise SystemExit(f"{data} has no photo {PHOTO}\n  name the folder that contains train/, val/ and test/")
    if not (run / "model").is_dir():
        command = [sys.executable, "-m", "vitreous", "train", str(data), *TRAINING, "--out", str(run)]
        subprocess.run(command, check=True)
    with serve_run(run) as address:
        for output, scheme in zip(OUTPUTS, ("light", "dark"), strict=True):
            write_animation(context.out / output, record_page(address, photo, scheme))


@contextmanager
def serve_run(run: Path) -> Iterator[str]:
    """Serve a run at a free port within the `with` block; the context is the address."""
    from vitreous import load
    from vitreous.apps.server.server import serve_in_thread
    from vitreous.apps.server.settings import ServerSettings

    with serve_in_thread(load(run), replace(ServerSettings(), port=0, quiet=True), run) as server:
        yield server.address


class Recorder:
    """Moves a visible pointer over a page and records screenshots.

    Args:
        page: the page, to which `ADDITIONS` has added pointer, photo and caption.

    Attributes:
        frames: (content of a PNG file, milliseconds for which it is shown).
    """

    def __init__(self, page: Page) -> None:
        self.page, self.frames = page, []
        self.position = (VIEWPORT["width"] * 0.62, VIEWPORT["height"] - CAPTION_HEIGHT - 150.0)
        self.carried = False
        self.place_pointer()

    def capture(self, milliseconds: int) -> None:
        """Wait until the page has been drawn, and record a frame of this duration."""
        self.page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        self.frames.append((self.page.screenshot(), milliseconds))

    def place_pointer(self) -> None:
        """Draw the pointer at the current position, with the photo under it while it is dragged."""
        script = """([x, y, carried]) => {
          const [pointer, photo] = ["pointer", "photo"].map((name) => document.getElementById(`figure-${name}`).style);
          Object.assign(pointer, { left: `${x - 4}px`, top: `${y - 4}px` });
          Object.assign(photo, { left: carried ? `${x - 65}px` : "-200px", top: `${y - 65}px` });
        }"""
        self.page.evaluate(script, [*self.position, self.carried])

    def move_to(self, x: float, y: float, hover: bool = True) -> None:
        """Move the pointer to a point in CSS pixels, slower at both ends, and record the movement."""
        left, top = self.position
        for step in range(1, MOVE_STEPS + 1):
            share = step / MOVE_STEPS
            share = share * share * (3 - 2 * share)
            self.position = (left + (x - left) * share, top + (y - top) * share)
            if hover:
                self.page.mouse.move(*self.position)
            self.place_pointer()
            self.capture(MOVE_MS)

    def click(self, hold: int) -> None:
        """Click at the pointer, and record the result for `hold` milliseconds."""
        self.page.mouse.down()
        self.page.mouse.up()
        self.settle()
        self.capture(hold)

    def settle(self) -> None:
        """Wait until the page shows the attention map."""
        self.page.wait_for_timeout(50)
        self.page.wait_for_selector("#busy", state="hidden")

    def caption(self, text: str) -> None:
        """Set the text of the caption."""
        self.page.evaluate("text => { document.getElementById('figure-caption').textContent = text; }", text)

    def middle_of(self, selector: str) -> tuple[float, float]:
        """Return the centre of an element in CSS pixels."""
        box = self.page.locator(selector).bounding_box()
        assert box is not None, selector
        return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def record_page(address: str, photo: Path, scheme: str) -> list[tuple[bytes, int]]:
    """Record the page: drop a photo, click patches, move the controls. Returns PNG frames with their milliseconds.

    The first frame shows the prediction and its rollout, because viewers without animation show only that frame.

    Raises:
        SystemExit: Chromium is not installed.
    """
    chromium = find_chromium()
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--force-color-profile=srgb"])
        context = browser.new_context(
            viewport=VIEWPORT,  # type: ignore[arg-type]
            color_scheme=scheme,  # type: ignore[arg-type]
            device_scale_factor=2,
            reduced_motion="reduce",
        )
        page = context.new_page()
        page.goto(address)
        page.wait_for_function("document.getElementById('model').textContent.includes('classes')")
        data = base64.b64encode(photo.read_bytes()).decode()
        page.evaluate(ADDITIONS, f"data:image/jpeg;base64,{data}")
        recorder = Recorder(page)
        drop_photo(recorder, data)
        cover = recorder.frames[-1][0]
        click_patches(recorder)
        move_controls(recorder)
        browser.close()
    return [(cover, 1000), *recorder.frames]


def drop_photo(recorder: Recorder, data: str) -> None:
    """Drop the photo, which is `data` in base64, on the page; record the prediction, then the attention rollout."""
    page, attention_requests = recorder.page, []
    page.route("**/v1/attention*", lambda route: attention_requests.append(route), times=1)
    recorder.carried = True
    recorder.place_pointer()
    recorder.caption("Drop a photo")
    recorder.capture(500)
    page.evaluate(DRAG, ["dragover", data, "leaf.jpg"])
    recorder.move_to(*recorder.middle_of("#stage"), hover=False)
    page.evaluate(DRAG, ["drop", data, "leaf.jpg"])
    recorder.carried = False
    recorder.place_pointer()
    page.wait_for_selector("#history li")
    while not attention_requests:
        page.wait_for_timeout(20)
    recorder.caption("Classes with probabilities")
    recorder.capture(1000)
    attention_requests[0].continue_()
    recorder.settle()
    recorder.caption("Attention rollout of the prediction")
    recorder.capture(1200)


def click_patches(recorder: Recorder) -> None:
    """Select raw attention, then click the patches of `PATCHES`."""
    recorder.caption("Click a patch: what it attends to")
    recorder.move_to(*recorder.middle_of("input[name=kind][value=raw]"))
    recorder.click(300)
    for patch in PATCHES:
        x, y = locate_patch(recorder.page, patch)
        recorder.move_to(x, y)
        recorder.click(850)


def locate_patch(page: Page, patch: tuple[int, int]) -> tuple[float, float]:
    """Return the centre of a patch, (row, column) from 0, on the page in CSS pixels."""
    script = """async ([row, column]) => {
      const canvas = document.getElementById("picture"), frame = canvas.getBoundingClientRect();
      const { naturalWidth: wide, naturalHeight: high } = document.querySelector("#figure-photo img");
      // the input of the model is the central square
      const side = Math.min(wide, high) * Math.min(frame.width / wide, frame.height / high) / 16;
      return [frame.left + frame.width / 2 + (column - 7.5) * side, frame.top + frame.height / 2 + (row - 7.5) * side];
    }"""
    x, y = page.evaluate(script, list(patch))
    return x, y


def move_controls(recorder: Recorder) -> None:
    """Select several heads of the last block, then earlier blocks."""
    page = recorder.page
    recorder.caption("Every head …")
    for number in (1, 2, 3):
        drag_slider(recorder, "head", number + 2, 600)
    recorder.caption("… of every block")
    for block in (3, 1):
        drag_slider(recorder, "layer", block, 700)
    recorder.capture(500)
    assert page.locator("[role=alert]").text_content() == ""


def drag_slider(recorder: Recorder, name: str, value: int, hold: int) -> None:
    """Move the pointer to the position of a value on a slider, set the value, and record it for `hold` milliseconds."""
    page = recorder.page
    box = page.locator(f"#{name}").bounding_box()
    assert box is not None
    max_value, thumb_width = float(page.locator(f"#{name}").get_attribute("max") or 1), 16.0
    x = box["x"] + thumb_width / 2 + (box["width"] - thumb_width) * value / max_value
    recorder.move_to(x, box["y"] + box["height"] / 2)
    page.locator(f"#{name}").fill(str(value))
    recorder.settle()
    recorder.capture(hold)


def write_animation(file: Path, frames: list[tuple[bytes, int]]) -> None:
    """Scale frames down to `WIDTH`, and write them as an animated WebP that repeats forever."""
    height = round(VIEWPORT["height"] * WIDTH / VIEWPORT["width"])
    images = [
        Image.open(io.BytesIO(png)).convert("RGB").resize((WIDTH, height), Image.Resampling.LANCZOS)
        for png, _ in frames
    ]
    images[0].save(
        file,
        save_all=True,
        append_images=images[1:],
        duration=[milliseconds for _, milliseconds in frames],
        loop=0,
        quality=QUALITY,
        method=5,
        minimize_size=True,
        allow_mixed=True,
    )
