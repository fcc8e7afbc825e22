"""Draw the figures of the guides on images and texts: `retrieval.webp` and `zero-shot.webp`.

Both use the model that `benchmarks/contrastive.py` trains in three minutes on drawn digits with captions. `retrieval`
shows the validation images that are most similar to a text; those with exactly this caption are marked. `zero-shot` is
a screenshot of the page of `vitreous serve` with one of these images, enlarged, and typed labels.
"""

from __future__ import annotations

import csv
import html
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from playwright.sync_api import sync_playwright
from rendering import data_uri, find_chromium, save_webp, screenshot

OUTPUTS = ("retrieval.webp", "zero-shot.webp")
DATASETS = ()

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "contrastive.py"
QUERIES = (
    "a blue seven in the centre",
    "a red two in the top left",
    "a white four in the top right",
    "a purple four in the bottom left",
    "a yellow nine in the bottom right",
)
LABELS = ("a blue seven in the centre", "a blue one in the centre", "a red seven in the centre", "a blue seven")
COUNT = 8  # images per query
STYLE = """
body { margin: 0; padding: 12px 16px; background: #fff; color: #1a1a1a; font: 15px/1.3 system-ui, sans-serif; }
table { border-spacing: 4px; } th { text-align: left; font-weight: 400; padding-right: 14px; white-space: nowrap; }
img { display: block; width: 64px; height: 64px; image-rendering: pixelated; border: 3px solid transparent; }
img.match { border-color: #1b8a5a; }
"""


def build(context: Any) -> None:
    """Train the model if it is missing, then write both figures.

    Args:
        context: the `Context` of build.py.
    """
    folder = context.work / "captions"
    if not list(folder.glob("run-siglip-*/summary.json")):
        subprocess.run([sys.executable, str(BENCHMARK), str(folder)], check=True)
    run = sorted(folder.glob("run-siglip-*/summary.json"))[0].parent
    with (folder / "pairs.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["split"] == "val"]
    draw_retrieval(run, folder, rows, context.out / "retrieval.webp")
    image = next(folder / row["path"] for row in rows if row["caption"] == QUERIES[0])
    draw_zero_shot_page(run, image, context)


def draw_retrieval(run: Path, folder: Path, rows: list[dict[str, str]], out: Path) -> None:
    """Write the figure of the images that are most similar to each query."""
    import vitreous

    model = vitreous.load(str(run), headless=True)
    images = model.embed([folder / row["path"] for row in rows])
    images /= np.linalg.norm(images, axis=1, keepdims=True)
    lines = []
    for query, similarities in zip(QUERIES, model.embed_texts(list(QUERIES)) @ images.T, strict=True):
        cells = [
            f'<td><img class="{"match" * (rows[index]["caption"] == query)}" '
            f'src="{data_uri(Image.open(folder / rows[index]["path"]))}"></td>'
            for index in np.argsort(-similarities)[:COUNT]
        ]
        lines.append(f"<tr><th>{html.escape(query)}</th>{''.join(cells)}</tr>")
    page = f"<style>{STYLE}</style><table>{''.join(lines)}</table>"
    save_webp(screenshot(page, width=920).convert("RGB"), out)


def draw_zero_shot_page(run: Path, image: Path, context: Any) -> None:
    """Write the screenshot of the page with typed labels."""
    from vitreous import load
    from vitreous.apps.server.server import serve_in_thread
    from vitreous.apps.server.settings import ServerSettings

    photo = context.work / "digit.png"
    Image.open(image).resize((256, 256), Image.Resampling.NEAREST).save(photo)
    settings = replace(ServerSettings(), port=0, quiet=True)
    with sync_playwright() as playwright, serve_in_thread(load(str(run), headless=True), settings) as server:
        chromium = playwright.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        page = chromium.new_page(viewport={"width": 1000, "height": 790}, color_scheme="light")
        page.goto(server.address)
        page.locator("#labels").fill("\n".join(LABELS))
        page.locator("#templates").select_option("none")
        page.set_input_files("input[type=file]", str(photo))
        page.locator("#answers", has_text="%").wait_for(timeout=60_000)
        page.locator("#opacity").fill("0")  # the map of attention would hide the small digit
        page.locator("#labels").scroll_into_view_if_needed()
        page.mouse.wheel(0, -10_000)
        page.wait_for_timeout(1_000)
        page.screenshot(path=str(context.work / "zero-shot.png"))
        chromium.close()
    save_webp(Image.open(context.work / "zero-shot.png").convert("RGB"), context.out / "zero-shot.webp")
