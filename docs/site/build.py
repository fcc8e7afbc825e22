"""Build the documentation site: `python docs/site/build.py`, or `make docs`. Needs the extra `docs`.

docs/*.md, the notebooks, the benchmarks and the pages beside README.md are laid out below build/docs/source, with links
as the site has them; the reference is written beside them, from docstrings and from the parser of each verb. zensical
makes the site in build/docs/site. Errors, with exit code 1, are a broken link, a missing anchor or reference, a page
that is not in the navigation, and anything that a reader's browser would fetch from elsewhere.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import yaml

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PACKAGE = ROOT / "vitreous"
#: rooms of the reference, a page each; of a folder, the modules in it
ROOMS = (
    "nn",
    "models",
    "models.configs",
    "objectives",
    "generation",
    "data",
    "data.augmentation",
    "data.layouts",
    "inference",
    "evaluation",
    "inspection",
    "weights",
    "training",
    "training.trackers",
    "recipes",
    "system",
    "jobs",
    "apps.studies",
    "apps.bench",
    "apps.export",
    "apps.hub",
    "apps.server",
    "sklearn",
    "errors",
)
PYTHON, COMMANDS = "reference/python", "reference/command-line"
#: the end of a link, with the name of something in the package where the link's text ends in one
LINK = re.compile(r"(?:(?<=`)(vitreous(?:\.\w+)+)`)?\]\(([^()\s]+)\)")
TEXT_LINK = re.compile(r"(?<!!)\[([^\[\]]+)\]\(([^()\s]+)\)")
SOURCE = re.compile(r"Source code in <code>[^<]*</code> <pre>.*?</pre>", re.DOTALL)
FETCHED = {"img": "src", "script": "src", "link": "href", "iframe": "src", "source": "src"}


def page_map() -> dict[Path, str]:
    """{file of the repository: its page or file in the site}."""
    pages = {ROOT / name: f"{Path(name).stem.lower()}.md" for name in ("CONTRIBUTING.md", "CHANGELOG.md")}
    pages[ROOT / "README.md"] = "index.md"
    pages[PACKAGE / "__init__.py"] = f"{PYTHON}/vitreous.md"
    pages[PACKAGE / "cli" / "main.py"] = f"{COMMANDS}/index.md"
    docs = ROOT / "docs"
    pages |= {path: path.relative_to(docs).as_posix() for path in sorted(docs.rglob("*.md"))}
    figures = (
        path for path in sorted((ROOT / "docs" / "figures").iterdir()) if path.is_file() and path.suffix != ".py"
    )
    pages |= {path: f"figures/{path.name}" for path in figures}
    pages |= {path: f"notebooks/{path.stem}.md" for path in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))}
    pages |= {path: f"benchmarks/{path.name}" for path in sorted((ROOT / "benchmarks" / "results").glob("*.md"))}
    pages[ROOT / "benchmarks" / "README.md"] = "benchmarks/index.md"
    return pages


def stage(folder: Path) -> None:
    """Write all that the site is made of to `folder`."""
    from notebooks import notebook_page

    pages = page_map()
    for path, page in pages.items():
        target = folder / page
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".ipynb":
            target.write_text(notebook_page(path), "utf-8")
            shutil.copyfile(path, target.with_suffix(".ipynb"))
        elif path.is_relative_to(PACKAGE):
            continue  # written below
        elif path.suffix != ".md":
            shutil.copyfile(path, target)
        elif path.name != "README.md" or path.parent != ROOT:
            target.write_text(relocate(spaced(path.read_text("utf-8")), path, page, pages), "utf-8")
    shutil.copyfile(HERE / "site.css", folder / "site.css")
    for page, text in {**python_pages(), **command_pages(), **reference_pages()}.items():
        (folder / page).parent.mkdir(parents=True, exist_ok=True)
        (folder / page).write_text(text, "utf-8")


def outside_code(text: str) -> Iterator[tuple[str, bool]]:
    """Lines, and whether each is prose: neither within ``` fences nor one of them."""
    inside = False
    for line in text.splitlines():
        fence = line.lstrip().startswith("```")
        yield line, not (inside or fence)
        inside ^= fence


def spaced(text: str) -> str:
    """Put an empty line before tables and lists that follow a paragraph: GitHub needs none, Python-Markdown does."""
    out: list[str] = []
    for line, prose in outside_code(text):
        before = out[-1] if out else ""
        opens = (line.startswith("|") and not before.startswith("|")) or (
            re.match(r"(?:- |\d+\. )", line) and not re.match(r"\s*(?:- |\d+\. )|\s", before)
        )
        out += ["", line] if prose and before and opens else [line]
    return "\n".join(out) + "\n"


def relocate(text: str, path: Path, page: str, pages: dict[Path, str]) -> str:
    """`text` of the repository's file `path` with its links as `page` of the site has them.

    A link to a file of the package whose text is the name of something in it becomes one to the reference. Of a link
    to another file outside the site only the text is left.
    """

    def moved(match: re.Match[str]) -> str:
        name, anchor = (match[2].split("#", 1) + [""])[:2]
        file = (path.parent / name).resolve() if name and "://" not in name else None
        if file in pages:
            target = pages[file] + (f"#{anchor}" if anchor and file != ROOT / "README.md" else "")
        elif file and file.suffix == ".py" and file.is_relative_to(PACKAGE) and match[1]:
            target = f"{PYTHON}/{room_of(file)}.md#{match[1]}"
        else:
            return match[0]
        return match[0].removesuffix(f"({match[2]})") + f"({os.path.relpath(target, os.path.dirname(page) or '.')})"

    def without_outside_links(match: re.Match[str]) -> str:
        name = match[2].partition("#")[0]
        file = (path.parent / name).resolve() if name and "://" not in name else None
        is_outside = file is not None and file.exists() and file not in pages
        is_documented = match[1].startswith("`vitreous") and file is not None and file.is_relative_to(PACKAGE)
        return match[1] if is_outside and not is_documented else match[0]

    lines = (
        LINK.sub(moved, TEXT_LINK.sub(without_outside_links, line)) if prose else line
        for line, prose in outside_code(text)
    )
    return "\n".join(lines) + "\n"


def room_of(file: Path) -> str:
    """The page of the reference that a file of the package is on."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return parts[0] if len(parts) == 1 else ".".join(parts[:-1])


def python_pages() -> dict[str, str]:
    """Pages of the reference, from docstrings: the public functions, then a page for each room."""
    import vitreous

    names = [name for name in vitreous.__all__ if not name.startswith("_")]
    about = "What `import vitreous` gives; the modules that these come from are on the pages of the rooms."
    pages = {f"{PYTHON}/vitreous.md": "\n\n".join(["# vitreous", about, *(f"::: vitreous.{name}" for name in names)])}
    for room in ROOMS:
        place = PACKAGE.joinpath(*room.split("."))
        modules = sorted(p.stem for p in place.glob("*.py") if p.stem != "__init__") if place.is_dir() else [""]
        head = ast.get_docstring(ast.parse((place / "__init__.py").read_text("utf-8"))) if place.is_dir() else None
        blocks = [f"::: vitreous.{'.'.join(filter(None, (room, module)))}" for module in modules]
        pages[f"{PYTHON}/{room}.md"] = "\n\n".join([f"# vitreous.{room}", *([head] if head else []), *blocks]) + "\n"
    return pages


def command_pages() -> dict[str, str]:
    """Pages of the command line: one of all verbs, and one for each."""
    from command_line import overview_page, page_name, verb_page

    from vitreous.cli.main import VERBS

    pages = {f"{COMMANDS}/index.md": overview_page()}
    return pages | {f"{COMMANDS}/{page_name(verb)}": verb_page(verb, about) for verb, (_, about) in VERBS.items()}


def reference_pages() -> dict[str, str]:
    """Pages of recipes, config.yaml and the HTTP API."""
    from reference_pages import CONFIG, HTTP, config_page, http_page, recipe_pages

    return {**recipe_pages(), CONFIG: config_page(), HTTP: http_page()}


def title_of(page: Path) -> str:
    """The first heading of a page."""
    return next(line[2:].strip() for line in page.read_text("utf-8").splitlines() if line.startswith("# "))


def configuration(folder: Path) -> dict[str, Any]:
    """The configuration for what lies in `folder`, its navigation filled in."""
    config = yaml.safe_load((HERE / "mkdocs.yml").read_text("utf-8"))
    python = config["plugins"][1]["mkdocstrings"]["handlers"]["python"]
    python["paths"] = [str(ROOT)]
    python["options"]["extensions"] = [f"{HERE / 'docstrings.py'}:PlainText"]
    config["nav"] = [expand(entry, folder) for entry in config["nav"]]
    return config


def expand(entry: Any, folder: Path) -> Any:
    """An entry of the navigation with `folder/*` as the pages of that folder, its index first, and their titles."""
    ((title, value),) = entry.items()
    if isinstance(value, list):
        return {title: [expand(part, folder) for part in value]}
    if not value.endswith("/*"):
        return entry
    order = {f"{room}.md": place for place, room in enumerate(("vitreous", *ROOMS))}
    files = sorted((folder / value[:-2]).glob("*.md"), key=lambda p: (p.stem != "index", order.get(p.name, 0), p.name))
    relative = [path.relative_to(folder).as_posix() for path in files]
    return {title: [page if page.endswith("/index.md") else {title_of(folder / page): page} for page in relative]}


def listed(nav: Any) -> set[str]:
    """The pages of a navigation."""
    if isinstance(nav, str):
        return {nav}
    return set().union(*(listed(part) for part in (nav.values() if isinstance(nav, dict) else nav)))


class Page(HTMLParser):
    """Of a page of the site: anchors, links, and what a browser fetches with it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what the tag names, links to or fetches."""
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag in FETCHED and FETCHED[tag] in values and values.get("rel") not in ("canonical", "next", "prev"):
            self.fetched.append(values[FETCHED[tag]])


def site_faults(site: Path) -> list[str]:
    """What is wrong with a built site: links to nothing, and what would be fetched from elsewhere."""
    pages = {path.resolve(): Page(path.read_text("utf-8")) for path in sorted(site.rglob("*.html"))}
    faults = []
    for path, page in pages.items():
        where = path.relative_to(site.resolve())
        faults += [f"{where}: fetches {url}" for url in page.fetched if re.match(r"(https?:)?//", url)]
        for link in page.links:
            if re.match(r"(https?|mailto):", link) or path.name == "404.html":
                continue
            name, anchor = (link.split("#", 1) + [""])[:2]
            target = (path.parent / unquote(name)).resolve() if name else path
            if not target.exists():
                faults.append(f"{where}: links to {link}, which is not there")
            elif anchor and target in pages and unquote(anchor) not in pages[target].anchors:
                faults.append(f"{where}: links to {link}, an anchor which is not there")
    return sorted(set(faults))


def build(place: Path) -> list[str]:
    """Build the site in `place`/site. Returns what is wrong with it, a line each; nothing if all is well."""
    shutil.rmtree(place, ignore_errors=True)
    source = place / "source"
    stage(source)
    config = configuration(source)
    (place / "mkdocs.yml").write_text(yaml.safe_dump(config, sort_keys=False, allow_unicode=True), "utf-8")
    missing = {path.relative_to(source).as_posix() for path in source.rglob("*.md")} ^ listed(config["nav"])
    if missing:
        return [f"{page}: is not in the navigation, or is only there: docs/site/mkdocs.yml" for page in sorted(missing)]
    command = [
        sys.executable,
        "-m",
        "zensical",
        "build",
        "--strict",
        "--clean",
        "--config-file",
        str(place / "mkdocs.yml"),
    ]
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))  # of docstrings.py
    environment = {**os.environ, "NO_COLOR": "1", "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        return [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    trim_search(place / "site" / "search.json")
    return site_faults(place / "site")


def trim_search(file: Path) -> None:
    """Remove items from the search index that would rank above guides, and source code from the text of the others."""
    index = json.loads(file.read_text("utf-8"))
    index["items"] = [item for item in index["items"] if is_searchable(item["location"])]
    for item in index["items"]:
        item["text"] = SOURCE.sub("", item["text"])
    file.write_text(json.dumps(index, ensure_ascii=False), "utf-8")


def is_searchable(location: str) -> bool:
    """Whether the search finds a section: not those of logs, single benchmarks and settings of single recipes, and of
    the modules of the package only their names."""
    page, _, anchor = location.partition("#")
    if page.startswith(("log/", "changelog", "benchmarks/")):
        return page == "benchmarks/index.html"
    if page.startswith("reference/recipes/"):
        return not anchor
    if page.startswith("reference/python/") and page != "reference/python/vitreous.html":
        module = PACKAGE.joinpath(*anchor.split(".")[1:])
        return module.is_dir() or module.with_suffix(".py").is_file()
    return True


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    faults = build(ROOT / "build" / "docs")
    print("\n".join(faults) if faults else f"the site is in {ROOT / 'build' / 'docs' / 'site'}", file=sys.stderr)
    sys.exit(bool(faults))
