"""Render HTML in headless Chromium and save images for the documentation."""

from __future__ import annotations

import base64
import io
import shutil
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


def find_chromium() -> str:
    """Return the path of an installed Chromium.

    Raises:
        SystemExit: none of `BROWSERS` is installed.
    """
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise SystemExit(f"no Chromium found\n  install one of {', '.join(BROWSERS)}")
    return browser


def data_uri(image: Image.Image) -> str:
    """Encode an image as a PNG in a data URI."""
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"


def screenshot(html: str, width: int, scale: float = 1.5) -> Image.Image:
    """Render HTML as an RGBA image of the whole page, transparent where the page has no background.

    The page is `width` CSS pixels wide; a CSS pixel has `scale` pixels of the image.
    """
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        page = chromium.new_page(viewport={"width": width, "height": 100}, device_scale_factor=scale)
        page.set_content(html)
        pixels = page.screenshot(full_page=True, omit_background=True)
        chromium.close()
    return Image.open(io.BytesIO(pixels)).convert("RGBA")


def save_webp(image: Image.Image, place: Path, quality: int = 82) -> None:
    """Write an image as WebP."""
    image.save(place, "WEBP", quality=quality, method=6)
