"""Add a built documentation site to the folder of all versions: `python docs/site/versions.py SITE PAGES VERSION`.

PAGES gets a folder for the version, `versions.json` for the version selector of the theme, and an `index.html` that
redirects to the newest version. An existing folder of the same version is replaced.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path

REDIRECT = (
    '<!doctype html><meta charset="utf-8"><title>vitreous</title><meta http-equiv="refresh" content="0; url={}/">\n'
)


def add_version(site: Path, pages: Path, version: str) -> list[str]:
    """Copy `site` to the folder `version` of `pages`, and return all versions, newest first.

    Raises ValueError for a version that is not three numbers.
    """
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise ValueError(f"the version {version!r} is not three numbers such as 1.2.0")
    shutil.rmtree(pages / version, ignore_errors=True)
    shutil.copytree(site, pages / version)
    names = [path.name for path in pages.iterdir() if re.fullmatch(r"\d+\.\d+\.\d+", path.name)]
    versions = sorted(names, key=lambda name: tuple(map(int, name.split("."))), reverse=True)
    entries = [
        {"version": name, "title": name, "aliases": ["latest"] if name == versions[0] else []} for name in versions
    ]
    (pages / "versions.json").write_text(json.dumps(entries, indent=1) + "\n", "utf-8")
    (pages / "index.html").write_text(REDIRECT.format(versions[0]), "utf-8")
    (pages / ".nojekyll").touch()
    return versions


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path, help="the built site")
    parser.add_argument("pages", type=Path, help="the folder of all versions")
    parser.add_argument("version", help="X.Y.Z")
    arguments = parser.parse_args()
    print("\n".join(add_version(arguments.site, arguments.pages, arguments.version)))
