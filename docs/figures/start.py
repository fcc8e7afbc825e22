"""Draw the screenshots of docs/tutorials/ and the tiles of docs/index.md.

The runs are those of the commands of the first two tutorials; runs that are in the folder of `--work` are reused. The
screenshots are taken in headless Chromium with the light colour scheme.

Datasets:

- `trash`: photos of trash in 6 classes, MIT licence, https://github.com/garythung/trashnet. The figures were made with
  647 of the photos (396 train, 72 val, 179 test), reduced to 213 x 160 pixels.
- `blood-cells` and `nuclei`: the datasets of hero.py, whose detector and segmenter are reused.

Some tiles are crops of figures of docs/guides/inspection.md and docs/guides/generation.md.
"""

from __future__ import annotations

import colorsys
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from hero import link_nuclei
from PIL import Image, ImageDraw, ImageFont, ImageOps
from playwright.sync_api import Page, sync_playwright
from rendering import find_chromium

OUTPUTS = (
    "start-report.webp",
    "start-rollout.webp",
    "start-errors.webp",
    "start-page.webp",
    "task-classification.webp",
    "task-detection.webp",
    "task-instances.webp",
    "task-segmentation.webp",
    "task-video.webp",
    "task-volumes.webp",
    "task-generation.webp",
    "task-search.webp",
    "task-attention.webp",
    "task-serving.webp",
)
DATASETS = ("trash", "blood-cells", "nuclei")

#: run folder -> dataset, and options of `vitreous train`
TRAININGS = {
    "digits": ("digits", ()),
    "photos": ("trash", ("--init", "none")),
    "detector": ("blood-cells", ("--init", "none", "--recipe", "detect", "--steps", "555", "--seed", "0")),
    "instances": ("nuclei", ("--init", "none", "--recipe", "detect", "--steps", "220", "--seed", "0")),
    "segmenter": (
        "nuclei",
        (
            *("--init", "none", "--recipe", "segment", "--model", "Conv+ViT-128x4/8", "--image-size", "256"),
            *("--steps", "223", "--seed", "0"),
        ),
    ),
}
PHOTO = "test/metal/metal114.jpg"
DETECTED = "JPEGImages/BloodImage_00007.jpg"
TILE = (360, 216)  # width and height of a tile in pixels
#: figure of the docs -> region that a tile shows, (left, top, right, bottom) in pixels
CROPS = {
    "features.png": (30, 0, 1112, 649),
    "generated-cifar10.png": (0, 0, 338, 203),
    "nearest.png": (0, 0, 1204, 722),
    "attention.png": (0, 0, 700, 420),
}
QUALITY = 80  # quality of the WebP files, 0 to 100


def build(context: Any) -> None:
    """Train the runs that are missing, then write every screenshot and every tile.

    Args:
        context: the `Context` of build.py.

    Raises:
        SystemExit: Chromium is not installed, or the trash dataset does not contain `PHOTO`.
    """
    photo = context.datasets["trash"] / PHOTO
    if not photo.is_file():
        raise SystemExit(f"no file {photo}\n  name the folder that contains train/, val/ and test/")
    splits = link_nuclei(context.datasets["nuclei"], context.work / "nuclei-split")
    context = replace(context, datasets=context.datasets | {"nuclei": splits})
    runs = {name: train_run(context, name) for name in TRAININGS}
    draw_screenshots(context, runs, photo)
    draw_tiles(context, runs)


def train_run(context: Any, name: str) -> Path:
    """Return the folder of the run `name` of `TRAININGS`; if it is missing, train it first."""
    data, options = TRAININGS[name]
    run = context.work / name
    if not (run / "summary.json").is_file():
        run_vitreous("train", str(context.datasets.get(data, data)), *options, "--out", str(run))
    return run


def run_vitreous(*words: str) -> str:
    """Run a vitreous command, and return its standard output."""
    command = [sys.executable, "-m", "vitreous", *words]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ}).stdout


def draw_screenshots(context: Any, runs: dict[str, Path], photo: Path) -> None:
    """Write the screenshots of docs/tutorials/first-model.md."""
    from vitreous import load
    from vitreous.apps.server.server import serve_in_thread
    from vitreous.apps.server.settings import ServerSettings

    digits, photos = runs["digits"], runs["photos"]
    run_vitreous("inspect", str(photos), str(photo), "--figures", "rollout", "--out", str(context.work / "rollout"))
    fit_image(context.work / "rollout" / "rollout.png", context.out / "start-rollout.webp")
    shutil.rmtree(context.work / "rollout")
    browser = find_chromium()
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        page = chromium.new_page(viewport={"width": 900, "height": 760}, color_scheme="light")
        page.goto((digits / "report.html").resolve().as_uri())
        save_screenshot(page, context.out / "start-report.webp", until="learning rate")
        page.goto((photos / "report.html").resolve().as_uri())
        save_screenshot(page, context.out / "start-errors.webp", "Highest-loss images", height=505)
        with serve_in_thread(load(str(photos)), replace(ServerSettings(), port=0, quiet=True), photos) as server:
            page.set_viewport_size({"width": 1000, "height": 760})
            page.goto(server.address)
            page.set_input_files("input[type=file]", str(photo))
            page.locator("body", has_text="%").wait_for(timeout=60_000)
            page.wait_for_timeout(2_000)
            save_webp(page.screenshot(), context.out / "start-page.webp")
        chromium.close()


def save_screenshot(
    page: Page, out: Path, start: str | None = None, until: str | None = None, height: float | None = None
) -> None:
    """Save a screenshot of the part of a report between two headings.

    Args:
        page: the opened report.
        out: the WebP file.
        start: text of the heading at which the part starts (default: the top of the page).
        until: text of the heading before which the part ends (default: the end of the page).
        height: height of the part in CSS pixels, instead of `until`.
    """
    top, bottom = (
        page.locator("h2, h3", has_text=name).first.bounding_box() if name else None for name in (start, until)
    )
    y = max(top["y"] - 8, 0) if top else 0
    if height is None:
        height = (bottom["y"] if bottom else page.evaluate("document.body.scrollHeight")) - y - 8
    clip = {"x": 0, "y": y, "width": page.viewport_size["width"], "height": height}  # pyright: ignore[reportOptionalSubscript]
    save_webp(page.screenshot(full_page=True, clip=clip), out)  # pyright: ignore[reportArgumentType]


def save_webp(content: bytes, out: Path) -> None:
    """Convert the content of a PNG file to a WebP file."""
    Image.open(io.BytesIO(content)).convert("RGB").save(out, quality=QUALITY, method=6)


def fit_image(file: Path, out: Path, width: int = 760) -> None:
    """Save an image as WebP, at most `width` pixels wide."""
    image = Image.open(file).convert("RGB")
    image.thumbnail((width, 10_000), Image.Resampling.LANCZOS)
    image.save(out, quality=QUALITY, method=6)


def draw_tiles(context: Any, runs: dict[str, Path]) -> None:
    """Write the tiles of docs/index.md."""
    drawings: dict[str, Callable[[], Image.Image]] = {
        "classification": lambda: draw_classified(context, runs["photos"]),
        "detection": lambda: draw_overlay(context, runs["detector"], context.datasets["blood-cells"] / DETECTED),
        "instances": lambda: draw_instances(context, runs["instances"], find_nuclei(context)),
        "segmentation": lambda: draw_overlay(context, runs["segmenter"], find_nuclei(context), class_maps=True),
        "video": draw_frames,
        "volumes": draw_volume,
        "generation": lambda: crop_figure(context, "generated-cifar10.png"),
        "search": lambda: crop_figure(context, "nearest.png"),
        "attention": lambda: crop_figure(context, "attention.png"),
        "serving": lambda: Image.open(context.out / "start-page.webp").convert("RGB"),
    }
    for name, draw in drawings.items():
        cover_tile(draw()).save(context.out / f"task-{name}.webp", quality=QUALITY, method=6)


def cover_tile(image: Image.Image) -> Image.Image:
    """Scale an image to fill a tile, and crop it: equally at left and right, and at the bottom."""
    scale = max(TILE[0] / image.width, TILE[1] / image.height)
    size = (round(image.width * scale), round(image.height * scale))
    image = image.convert("RGB").resize(size, Image.Resampling.LANCZOS)
    left = (image.width - TILE[0]) // 2
    return image.crop((left, 0, left + TILE[0], TILE[1]))


def crop_figure(context: Any, name: str) -> Image.Image:
    """Return the region of a figure of the docs that `CROPS` defines."""
    return Image.open(context.out / name).convert("RGB").crop(CROPS[name])


def find_nuclei(context: Any) -> Path:
    """Return the path of the first test image with at least 25 nuclei."""
    folders = sorted(path.parent.parent for path in context.datasets["nuclei"].glob("test/*/images/*.png"))
    folder = next(path for path in folders if len(list((path / "masks").glob("*.png"))) >= 25)
    return next((folder / "images").glob("*.png"))


def draw_overlay(context: Any, run: Path, image: Path, class_maps: bool = False) -> Image.Image:
    """Return an image overlaid with the predictions of a run: boxes and masks, or the class map if `class_maps`."""
    with tempfile.TemporaryDirectory(dir=context.work) as folder:
        out = Path(folder) / "overlay"
        maps = ("--out", f"{folder}/maps") if class_maps else ()
        run_vitreous("predict", str(run), str(image), "--overlay", str(out), *maps)
        (drawn,) = (path for path in out.rglob("*") if path.is_file())
        return Image.open(drawn).convert("RGB")


def draw_instances(context: Any, run: Path, image: Path) -> Image.Image:
    """Return an image overlaid with the predicted masks of a run, each in a different colour."""
    with tempfile.TemporaryDirectory(dir=context.work) as folder:
        run_vitreous("predict", str(run), str(image), "--out", f"{folder}/masks")
        (file,) = Path(folder).glob("masks/**/*.png")
        indices = np.array(Image.open(file))
    pixels = np.array(Image.open(image).convert("RGB")).astype(np.float32)
    for index in np.unique(indices[indices > 0]):
        colour = np.array(colorsys.hsv_to_rgb(index * 0.618 % 1, 0.9, 1.0)) * 255
        pixels[indices == index] = 0.45 * pixels[indices == index] + 0.55 * colour
    return Image.fromarray(pixels.astype(np.uint8))


def draw_classified(context: Any, run: Path) -> Image.Image:
    """Return a grid of the first correctly classified test photo of each class, with class and probability below."""
    root = context.datasets["trash"] / "test"
    document = json.loads(run_vitreous("predict", str(run), str(root), "--json"))
    correct: dict[str, tuple[Path, float]] = {}
    for row in document["predictions"]:
        best, file = row["classes"][0], Path(row["path"])
        if best["class"] == file.parent.name:
            correct.setdefault(best["class"], (file, best["probability"]))
    canvas = Image.new("RGB", TILE, "white")
    draw, font = ImageDraw.Draw(canvas), ImageFont.load_default(14)
    for number, (name, (file, probability)) in enumerate(sorted(correct.items())):
        x, y = number % 3 * 120, number // 3 * 108
        photo = ImageOps.fit(Image.open(file).convert("RGB"), (116, 86), Image.Resampling.LANCZOS)
        canvas.paste(photo, (x + 2, y + 2))
        draw.text((x + 60, y + 97), f"{name} {100 * probability:.0f} %", "black", font, anchor="mm")
    return canvas


def draw_frames() -> Image.Image:
    """Return four frames of a synthetic clip, in which a digit of the dataset `digits` moves to the right."""
    from vitreous.data.sources import open_data

    digit = Image.fromarray(np.asarray(open_data("digits").splits["test"].raw(3))).convert("L").resize((64, 64), 0)
    canvas = Image.new("RGB", TILE, "white")
    for number in range(4):
        frame = Image.new("L", (172, 100), 0)
        frame.paste(digit, (4 + 33 * number, 30 - 6 * number))
        canvas.paste(frame.convert("RGB"), (5 + 178 * (number % 2), 6 + 104 * (number // 2)))
    return canvas


def draw_volume() -> Image.Image:
    """Return five slices of a synthetic volume of four spheres, each partly covered by the next."""
    axes = np.mgrid[0:64, 0:64, 0:64].astype(np.float32)
    volume = np.zeros((64, 64, 64), np.float32)
    for radius, *centre in ((22, 30, 34, 30), (11, 22, 12, 48), (9, 44, 50, 54), (8, 36, 12, 12)):
        distance = np.sqrt(sum((axis - depth) ** 2 for axis, depth in zip(axes, centre, strict=True)))
        volume = np.maximum(volume, np.clip((radius - distance) / 4, 0, 1) * (0.55 + radius / 50))
    canvas = Image.new("RGB", TILE, "white")
    draw = ImageDraw.Draw(canvas)
    for number, depth in enumerate((12, 22, 30, 38, 48)):
        x, y = 6 + 60 * number, 6 + 24 * number
        slice_image = Image.fromarray((30 + 215 * volume[depth]).clip(0, 255).astype(np.uint8)).resize((108, 108))
        canvas.paste(slice_image.convert("RGB"), (x, y))
        draw.rectangle((x, y, x + 108, y + 108), outline="white", width=2)
    return canvas
