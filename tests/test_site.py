"""The documentation site: all pages are reachable, all names on the equations page exist, and the strict build
succeeds."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from vitreous.apps.server.openapi import GET_ENDPOINTS, POST_ENDPOINTS
from vitreous.cli.help import list_options
from vitreous.cli.main import VERBS
from vitreous.recipes.options import TrainOptions
from vitreous.recipes.registry import RECIPES
from vitreous.training.run import Run

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
EQUATIONS_PAGE = (DOCS / "explanation" / "equations.md").read_text("utf-8")
#: `vitreous.nn.grid.resize_position_table` as a link to its file
NAME_LINKS = re.findall(r"\[`(vitreous(?:\.\w+)+)`\]\(\.\./\.\./(vitreous/[\w/]+\.py)\)", EQUATIONS_PAGE)
pytestmark = pytest.mark.skipif(not (ROOT / ".ci" / "run").exists(), reason="not a checkout")


def load_script(name: str):
    """Load a script of docs/site as a module."""
    spec = importlib.util.spec_from_file_location(name, DOCS / "site" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site_builder():
    """The script that builds the site and imports the scripts in its folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DOCS / "site"))
        yield load_script("build")


@pytest.fixture(scope="module")
def cli_reference(site_builder):
    """The script that writes the command-line reference."""
    return load_script("command_line")


@pytest.fixture(scope="module")
def reference_pages(site_builder):
    """The script that writes the pages of recipes, config.yaml and the HTTP API."""
    return load_script("reference_pages")


def test_every_page_of_docs_is_in_the_navigation(site_builder, reference_pages):
    listed = site_builder.listed(yaml.safe_load((DOCS / "site" / "mkdocs.yml").read_text("utf-8"))["nav"])
    pages = {
        page for path, page in site_builder.page_map().items() if path.is_relative_to(DOCS) and page.endswith(".md")
    }
    assert pages <= listed
    generated = {reference_pages.CONFIG, reference_pages.HTTP}
    assert {page for page in listed if not page.endswith("*")} <= {*site_builder.page_map().values(), *generated}


def test_names_on_the_equations_page_exist():
    assert len(NAME_LINKS) > 100 and EQUATIONS_PAGE.count("[`vitreous.") == len(NAME_LINKS)
    for name, file in NAME_LINKS:
        module = file.removesuffix(".py").replace("/", ".")
        value = importlib.import_module(module)
        assert name == module or name.startswith(module + "."), name
        for attribute in name[len(module) + 1 :].split(".") if name != module else ():
            value = getattr(value, attribute)  # an AttributeError shows the missing name
        assert name == module or getattr(value, "__module__", module) == module, f"{name} is from {value.__module__}"


def test_the_equations_page_covers_the_paper():
    assert re.findall(r"^### Eq\. (\d): ", EQUATIONS_PAGE, re.MULTILINE) == list("12345678")
    for title, last in (("Tables", 9), ("Figures", 14)):
        rows = EQUATIONS_PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
        equations = {
            int(equation)
            for row in re.findall(r"^\| (\d[^|]*) \|", rows, re.MULTILINE)
            for equation in re.findall(r"\d+", row)
        }
        assert equations == set(range(1, last + 1))
    assert all(
        f"({section}" in EQUATIONS_PAGE for section in ("section 3.1)", "section 4.6, B.1.2)", "D.3)", "D.6)", "D.8)")
    )


def test_repository_links_become_site_links(site_builder):
    pages = site_builder.page_map()
    text = "see\n- [it](../../benchmarks/README.md#answers)\n\n```text\n[x](data.md)\n```\n[`vitreous.nn.grid.resize_position_table`](../../vitreous/nn/grid.py)"
    moved = site_builder.relocate(
        site_builder.spaced(text), DOCS / "guides" / "inspection.md", "guides/inspection.md", pages
    )
    assert moved.splitlines() == [
        "see",
        "",
        "- [it](../benchmarks/index.md#answers)",
        "",
        "```text",
        "[x](data.md)",
        "```",
        "[`vitreous.nn.grid.resize_position_table`](../reference/python/nn.md#vitreous.nn.grid.resize_position_table)",
    ]


def test_site_faults_are_reported(site_builder, tmp_path):
    (tmp_path / "a.html").write_text(
        '<h1 id="top">A</h1><a href="b.html#here">b</a><a href="#top">up</a><img src="https://x.org/y.png">'
    )
    (tmp_path / "b.html").write_text('<a href="c.html">c</a><a href="https://x.org">elsewhere</a>')
    assert site_builder.site_faults(tmp_path) == [
        "a.html: fetches https://x.org/y.png",
        "a.html: links to b.html#here, whose anchor does not exist",
        "b.html: links to c.html, which does not exist",
    ]


@pytest.mark.parametrize("verb", VERBS)
def test_the_reference_has_every_option_of_a_verb(cli_reference, verb):
    page = cli_reference.verb_page(verb, "")
    for entry in list_options(importlib.import_module(VERBS[verb][0]).Options):
        assert page.count(f"\n### `{entry.label}` {{ #") == 1, entry.name
        assert entry.is_positional or page.index(f"## {entry.section}\n") < page.index(f"### `{entry.label}`")


def test_options_with_aliases_and_choices_become_sections(cli_reference):
    (entry,) = [option for option in list_options(TrainOptions) if option.name == "lr"]
    assert cli_reference.entry_lines(entry)[0] == "### `--lr, --learning-rate FLOAT` { #lr }"
    page = cli_reference.verb_page("data check", "")
    assert "### `DATA` { #data }" in page and "### `--split {train,val,test}` { #split }" in page


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_site_builds_strictly(tmp_path):
    if find_spec("zensical") is None or find_spec("mkdocstrings") is None:
        pytest.skip("the extra `docs` is not installed")
    script = f"import build, pathlib; print('\\n'.join(build.build(pathlib.Path({str(tmp_path / 'site')!r}))))"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{DOCS / 'site'}"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert not done.stdout.strip()
    page = (tmp_path / "site" / "site" / "reference" / "command-line" / "train.html").read_text("utf-8")
    assert "--recompute" in page and "ViT-S/16" in page


def test_the_recipe_index_links_every_recipe(reference_pages):
    index = reference_pages.recipe_index()
    assert sorted(re.findall(r"^\| \[([\w.-]+)\]\(\1\.md\)", index, re.MULTILINE)) == sorted(RECIPES)


def test_a_recipe_page_has_command_settings_and_published_results(reference_pages):
    page = reference_pages.recipe_page("deit3")
    assert "```text\nvitreous train DATA --recipe deit3 --model DeiT-III-B/16\n```" in page
    assert "| `optimizer.lr` | `0.004` |" in page and "| DeiT-III-S/16 | ImageNet | 81.4 % |" in page


def test_the_config_page_has_every_field_of_a_run_once(reference_pages):
    page = reference_pages.config_page()
    run = page.partition("\n## Run\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", run, re.MULTILINE) == [field.name for field in fields(Run)]
    for section in ("optimizer", "model (family: swin)", "objective (name: dino)", "preprocess (name: clips)"):
        assert page.count(f"\n## {section}\n") == 1, section
    assert "| `betas` | 2 x number | `[0.9, 0.999]` |" in page


def test_the_http_page_has_every_endpoint(reference_pages):
    page = reference_pages.http_page()
    for path in (*POST_ENDPOINTS, "/v1/sample", *GET_ENDPOINTS):
        assert len(re.findall(rf"^### (?:GET|POST) {path}$", page, re.MULTILINE)) == 1, path
    assert "| `threshold` | query | number from 0 to 1 |" in page


def test_versions_of_the_site_are_listed_newest_first(tmp_path):
    versions = load_script("versions")
    (tmp_path / "site").mkdir()
    (tmp_path / "pages").mkdir()
    for version in ("0.9.0", "0.10.0", "0.9.1"):
        (tmp_path / "site" / "index.html").write_text(version)
        listed = versions.add_version(tmp_path / "site", tmp_path / "pages", version)
    assert listed == ["0.10.0", "0.9.1", "0.9.0"]
    entries = json.loads((tmp_path / "pages" / "versions.json").read_text())
    assert [(entry["version"], entry["aliases"]) for entry in entries] == [
        ("0.10.0", ["latest"]), ("0.9.1", []), ("0.9.0", []),
    ]  # fmt: skip
    assert "url=0.10.0/" in (tmp_path / "pages" / "index.html").read_text()
    assert (tmp_path / "pages" / "0.9.1" / "index.html").read_text() == "0.9.1"
    with pytest.raises(ValueError, match="'v1'"):
        versions.add_version(tmp_path / "site", tmp_path / "pages", "v1")
