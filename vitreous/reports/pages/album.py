"""The page of `inspect`'s figures, which needs no other file."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from vitreous.disk import write_text
from vitreous.reports.pages.formats import render
from vitreous.reports.pages.thumbnails import SMALL, data_uri, shrink


def write_album(folder: Path, document: dict[str, Any], shown: Sequence[tuple[Image.Image, str]] = ()) -> None:
    """Write FOLDER/index.html for the figures of `inspect`'s document; each picture is in the page.

    `shown` are the images named, as the model sees them, with their names: they come first, with their answers.
    """
    pictures = {
        one["name"]: base64.b64encode((folder / one["png"]).read_bytes()).decode() for one in document["figures"]
    }
    named = [
        {"name": Path(name).name, "picture": data_uri(shrink(image)), "small": max(image.size) < SMALL, **answer}
        for (image, name), answer in zip(shown, document["answers"], strict=True)
    ]
    write_text(folder / "index.html", render("album.html", **document, pictures=pictures, named=named))
