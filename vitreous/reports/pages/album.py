"""One page of figures that needs nothing but itself, in light and in dark, on a phone and on a desk."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from vitreous.disk import write_text


def write_album(folder: Path, document: dict[str, Any]) -> None:
    """Write FOLDER/index.html for the figures of `inspect`'s document; each picture is in the page."""
    from jinja2 import Environment, PackageLoader

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, loader=PackageLoader("vitreous", "reports/pages"))
    page = environment.get_template("album.html")
    pictures = {one["name"]: base64.b64encode((folder / one["png"]).read_bytes()).decode() for one in document["figures"]}
    write_text(folder / "index.html", page.render(**document, pictures=pictures))
