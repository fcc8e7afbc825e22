"""Build the documentation site: `python docs/site/build.py`, or `make docs`. Needs the extra `docs`.

The sources are written to build/docs/source: docs/*.md, the notebooks, the benchmarks, CONTRIBUTING.md and CHANGELOG.md
with links adapted to the site, and the reference, which is generated from docstrings and from the options of each verb.
zensical builds the site in build/docs/site. The script exits with 1 for a broken link, a missing anchor or reference, a
page that is not in the navigation, and a page that loads content from another server.
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
#: packages and modules of the Python reference: one page each, with the modules of a package
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
#: the end of a Markdown link; group 1 is the name of an object of the package, if the link text ends with one
LINK = re.compile(r"(?:(?<=`)(vitreous(?:\.\w+)+)`)?\]\(([^()\s]+)\)")
#: a Markdown link that is not an image: its text, and its target
TEXT_LINK = re.compile(r"(?<!!)\[([^\[\]]+)\]\(([^()\s]+)\)")
SOURCE = re.compile(r"Source code in <code>[^<]*</code> <pre>.*?</pre>", re.DOTALL)
FETCHED = {"img": "src", "script": "src", "link": "href", "iframe": "src", "source": "src"}


def page_map() -> dict[Path, str]:
    """Return file of the repository -> page or file of the site, for all files that are copied or generated."""
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
    """Write all sources of the site to `folder`: adapted pages, figures, notebooks, and the generated reference."""
    from notebooks import notebook_page

    pages = page_map()
    for path, page in pages.items():
        target = folder / page
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".ipynb":
            target.write_text(notebook_page(path), "utf-8")
            shutil.copyfile(path, target.with_suffix(".ipynb"))
        elif path.is_relative_to(PACKAGE):
            continue  # the reference is written below
        elif path.suffix != ".md":
            shutil.copyfile(path, target)
        elif path.name != "README.md" or path.parent != ROOT:
            target.write_text(relocate(spaced(path.read_text("utf-8")), path, page, pages), "utf-8")
    shutil.copyfile(HERE / "site.css", folder / "site.css")
    for page, text in {**python_pages(), **command_pages(), **reference_pages()}.items():
        (folder / page).parent.mkdir(parents=True, exist_ok=True)
        (folder / page).write_text(text, "utf-8")


def outside_code(text: str) -> Iterator[tuple[str, bool]]:
    """Yield (line, is prose) for each line of a Markdown text; ``` fences and the lines between them are not prose."""
    inside = False
    for line in text.splitlines():
        fence = line.lstrip().startswith("```")
        yield line, not (inside or fence)
        inside ^= fence


def spaced(text: str) -> str:
    """Insert an empty line before tables and lists that follow a paragraph: Python-Markdown needs it, GitHub does
    not."""
    output_lines: list[str] = []
    for line, is_prose in outside_code(text):
        previous_line = output_lines[-1] if output_lines else ""
        starts_block = (line.startswith("|") and not previous_line.startswith("|")) or (
            re.match(r"(?:- |\d+\. )", line) and not re.match(r"\s*(?:- |\d+\. )|\s", previous_line)
        )
        output_lines += ["", line] if is_prose and previous_line and starts_block else [line]
    return "\n".join(output_lines) + "\n"


def relocate(text: str, path: Path, page: str, pages: dict[Path, str]) -> str:
    """Adapt the links in the text of the file `path` of the repository to its `page` of the site.

    A link to a module of the package, whose text is the name of an object in it, becomes a link to the reference. A
    link to another file that is not on the site is replaced by its text.
    """

    def adapt_link(match: re.Match[str]) -> str:
        name, anchor = (match[2].split("#", 1) + [""])[:2]
        file = (path.parent / name).resolve() if name and "://" not in name else None
        if file in pages:
            target = pages[file] + (f"#{anchor}" if anchor and file != ROOT / "README.md" else "")
        elif file and file.suffix == ".py" and file.is_relative_to(PACKAGE) and match[1]:
            target = f"{PYTHON}/{room_of(file)}.md#{match[1]}"
        else:
            return match[0]
        return match[0].removesuffix(f"({match[2]})") + f"({os.path.relpath(target, os.path.dirname(page) or '.')})"

    def drop_outside_link(match: re.Match[str]) -> str:
        name = match[2].partition("#")[0]
        file = (path.parent / name).resolve() if name and "://" not in name else None
        is_outside = file is not None and file.exists() and file not in pages
        is_documented = match[1].startswith("`vitreous") and file is not None and file.is_relative_to(PACKAGE)
        return match[1] if is_outside and not is_documented else match[0]

    lines = (
        LINK.sub(adapt_link, TEXT_LINK.sub(drop_outside_link, line)) if prose else line
        for line, prose in outside_code(text)
    )
    return "\n".join(lines) + "\n"


def room_of(file: Path) -> str:
    """Return the name of the reference page that documents a file of the package."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return parts[0] if len(parts) == 1 else ".".join(parts[:-1])


def python_pages() -> dict[str, str]:
    """Return path -> content of the pages of the Python reference: the public functions, and one page per entry of
    `ROOMS`."""
    import vitreous

    names = [name for name in vitreous.__all__ if not name.startswith("_")]
    about = "The public functions and classes of `import vitreous`. The other pages document the modules."
    pages = {f"{PYTHON}/vitreous.md": "\n\n".join(["# vitreous", about, *(f"::: vitreous.{name}" for name in names)])}
    for room in ROOMS:
        source_path = PACKAGE.joinpath(*room.split("."))
        modules = (
            sorted(p.stem for p in source_path.glob("*.py") if p.stem != "__init__") if source_path.is_dir() else [""]
        )
        package_docstring = (
            ast.get_docstring(ast.parse((source_path / "__init__.py").read_text("utf-8")))
            if source_path.is_dir()
            else None
        )
        blocks = [f"::: vitreous.{'.'.join(filter(None, (room, module)))}" for module in modules]
        pages[f"{PYTHON}/{room}.md"] = (
            "\n\n".join([f"# vitreous.{room}", *([package_docstring] if package_docstring else []), *blocks]) + "\n"
        )
    return pages


def command_pages() -> dict[str, str]:
    """Return path -> content of the pages of the command line: an overview, and one page per verb."""
    from command_line import overview_page, page_name, verb_page

    from vitreous.cli.main import VERBS

    pages = {f"{COMMANDS}/index.md": overview_page()}
    return pages | {f"{COMMANDS}/{page_name(verb)}": verb_page(verb, about) for verb, (_, about) in VERBS.items()}


def reference_pages() -> dict[str, str]:
    """Return path -> content of the reference pages of recipes, config.yaml and the HTTP API."""
    from reference_pages import CONFIG, HTTP, config_page, http_page, recipe_pages

    return {**recipe_pages(), CONFIG: config_page(), HTTP: http_page()}


def title_of(page: Path) -> str:
    """Return the first heading of a Markdown page."""
    return next(line[2:].strip() for line in page.read_text("utf-8").splitlines() if line.startswith("# "))


def configuration(folder: Path) -> dict[str, Any]:
    """Return the configuration of the site for the sources in `folder`, with the complete navigation."""
    config = yaml.safe_load((HERE / "mkdocs.yml").read_text("utf-8"))
    python = config["plugins"][1]["mkdocstrings"]["handlers"]["python"]
    python["paths"] = [str(ROOT)]
    python["options"]["extensions"] = [f"{HERE / 'docstrings.py'}:PlainText"]
    config["nav"] = [expand(entry, folder) for entry in config["nav"]]
    return config


def expand(entry: Any, folder: Path) -> Any:
    """Expand an entry of the navigation: `folder/*` becomes the pages of that folder with their titles, index first."""
    ((title, value),) = entry.items()
    if isinstance(value, list):
        return {title: [expand(child, folder) for child in value]}
    if not value.endswith("/*"):
        return entry
    order = {f"{room}.md": position for position, room in enumerate(("vitreous", *ROOMS))}
    files = sorted((folder / value[:-2]).glob("*.md"), key=lambda p: (p.stem != "index", order.get(p.name, 0), p.name))
    relative = [path.relative_to(folder).as_posix() for path in files]
    return {title: [page if page.endswith("/index.md") else {title_of(folder / page): page} for page in relative]}


def listed(nav: Any) -> set[str]:
    """Return the paths of all pages of a navigation."""
    if isinstance(nav, str):
        return {nav}
    return set().union(*(listed(child) for child in (nav.values() if isinstance(nav, dict) else nav)))


class Page(HTMLParser):
    """Parses an HTML page of the site: its anchors, its links, and the URLs that a browser loads with it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record the anchors of a tag, its link, and the URL that it loads."""
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag in FETCHED and FETCHED[tag] in values and values.get("rel") not in ("canonical", "next", "prev"):
            self.fetched.append(values[FETCHED[tag]])


def site_faults(site: Path) -> list[str]:
    """Return the faults of a built site: broken links, missing anchors, and content loaded from other servers."""
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
                faults.append(f"{where}: links to {link}, which does not exist")
            elif anchor and target in pages and unquote(anchor) not in pages[target].anchors:
                faults.append(f"{where}: links to {link}, whose anchor does not exist")
    return sorted(set(faults))


def build(out_folder: Path) -> list[str]:
    """Build the site in `out_folder`/site. Returns its faults, one line each; an empty list if there are none."""
    shutil.rmtree(out_folder, ignore_errors=True)
    source = out_folder / "source"
    stage(source)
    config = configuration(source)
    (out_folder / "mkdocs.yml").write_text(yaml.safe_dump(config, sort_keys=False, allow_unicode=True), "utf-8")
    missing = {path.relative_to(source).as_posix() for path in source.rglob("*.md")} ^ listed(config["nav"])
    if missing:
        return [
            f"{page}: is missing in the navigation (docs/site/mkdocs.yml), or exists only there"
            for page in sorted(missing)
        ]
    command = [
        sys.executable,
        "-m",
        "zensical",
        "build",
        "--strict",
        "--clean",
        "--config-file",
        str(out_folder / "mkdocs.yml"),
    ]
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))  # finds docstrings.py
    environment = {**os.environ, "NO_COLOR": "1", "PYTHONPATH": path}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    if result.returncode:
        return [line for line in (result.stdout + result.stderr).splitlines() if line.strip()]
    trim_search(out_folder / "site" / "search.json")
    return site_faults(out_folder / "site")


def trim_search(file: Path) -> None:
    """Remove items that would rank above guides from the search index, and source code from the other items."""
    index = json.loads(file.read_text("utf-8"))
    index["items"] = [item for item in index["items"] if is_searchable(item["location"])]
    for item in index["items"]:
        item["text"] = SOURCE.sub("", item["text"])
    file.write_text(json.dumps(index, ensure_ascii=False), "utf-8")


def is_searchable(location: str) -> bool:
    """Return whether a section of the site is in the search index.

    Omitted are the log, the changelog, single benchmarks, the sections of single recipes, and the objects of the Python
    reference other than modules and public functions.
    """
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
