"""Python code of the documentation pages that need no external data."""

import importlib
import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[1] / "docs"
ROOT = DOCS.parent
MARKDOWN = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/**/*.md", "vitreous/**/*.md")
    for page in ROOT.glob(pattern)
)
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))


#: pages whose Python needs files of the reader
NEED_FILES = ("reference/models.md",)
#: pages whose blocks of Python run in order, without other files
PYTHON_PAGES = sorted(
    page.relative_to(DOCS).as_posix()
    for page in DOCS.rglob("*.md")
    if not page.as_posix().endswith(("log/2026-11.md", *NEED_FILES)) and "```python\n" in page.read_text("utf-8")
)


@pytest.mark.parametrize("page", PYTHON_PAGES)
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text("utf-8"), re.DOTALL)
    assert blocks
    exec(compile("\n".join(blocks), page, "exec"), {})
    assert capsys.readouterr().out.strip()


#: libraries of the page on interoperability whose code blocks the test above does not run
INTEROP_LIBRARIES = ("pytorch_lightning", "torchao", "captum", "supervision")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("library", INTEROP_LIBRARIES)
def test_a_model_in_another_library(library, tmp_path, monkeypatch):
    """A library's code block runs after the PyTorch block."""
    import torch

    from tests.inference.detectors import save_detector, write_photos

    if find_spec(library) is None:
        pytest.skip("a library of the page on interoperability is not installed")
    monkeypatch.chdir(tmp_path)
    save_detector(tmp_path / "detector")
    write_photos(tmp_path / "pictures", 1)[0].rename("street.jpg")
    page = (DOCS / "guides" / "interoperability.md").read_text("utf-8")
    blocks = re.findall(r"```(python|text)\n(.*?)```", page, re.DOTALL)
    (library_block,) = [
        block for language, block in blocks if language == "text" and f"{library}" in block.partition("\n")[0]
    ]
    names: dict[str, Any] = {"torch": torch}
    exec(compile(blocks[0][1] + "images = torch.randn(4, 1, 8, 8)\n" + library_block, library, "exec"), names)
    assert library != "supervision" or len(names["detections"]) == len(names["found"].boxes) > 0


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_stored_with_outputs(notebook):
    text = notebook.read_text("utf-8")
    outputs = [output for cell in json.loads(text)["cells"] for output in cell.get("outputs", ())]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert all(output["output_type"] != "error" and output.get("name") != "stderr" for output in outputs)
    assert "/tmp/" not in text and "/home/" not in text


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_start_with_a_title_and_an_install_cell(notebook):
    title, install, *cells = ["".join(cell["source"]) for cell in json.loads(notebook.read_text("utf-8"))["cells"]]
    assert title.startswith("# ") and "At the end of this notebook you have" in title and "Colab" in title
    assert install.startswith("try:\n    import vitreous\nexcept ModuleNotFoundError:") and "%pip install" in install
    for link in re.findall(r"\]\(([^()\s]+)\)", "\n".join(cells)):
        assert (notebook.parent / link.partition("#")[0]).exists(), link
    assert f"notebooks/{notebook.stem}.md" in (DOCS / "site" / "mkdocs.yml").read_text("utf-8")
    assert f"notebooks/{notebook.name}" in (DOCS / "guides" / "interoperability.md").read_text("utf-8")


def test_the_table_of_published_weights_is_current(monkeypatch):
    monkeypatch.syspath_prepend(DOCS / "site")
    page = importlib.import_module("weights_page")
    assert page.PAGE.read_text("utf-8") == page.make_weights_page(), "run: python docs/site/weights_page.py"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_reproduce_their_output_types(notebook, tmp_path, monkeypatch):
    """In a new kernel. Numbers may differ between machines, but not the types of outputs: images, tables and texts."""
    if find_spec("nbclient") is None or find_spec("ipykernel") is None:
        pytest.skip("a library of the page on interoperability is not installed")
    monkeypatch.syspath_prepend(DOCS / "site")
    site = importlib.import_module("notebooks")
    shown = site.output_types(site.execute_notebook(notebook, tmp_path))
    assert shown == site.output_types(json.loads(notebook.read_text("utf-8")))
    assert {"text/html", "image/png"} <= {mime_type for cell in shown for mime_type in cell}


def test_prints_of_a_cell_are_merged(monkeypatch):
    """The number of chunks of a command's output, and its line ends, do not change the stored output."""
    monkeypatch.syspath_prepend(DOCS / "site")
    site = importlib.import_module("notebooks")
    prints = [{"output_type": "stream", "name": "stdout", "text": text} for text in ("a\r", "\nb\n")]
    image = {"output_type": "display_data", "data": {"image/png": ""}}
    assert site.merge_prints([*prints, image]) == [{**prints[0], "text": "a\nb\n"}, image]


def list_heading_anchors(text: str) -> set[str]:
    """The anchors of the headings of a page, as generated by GitHub."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    titles = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files_and_headings(page):
    """Every relative link of a page names a file of the checkout, and its anchor a heading there."""
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^()\s]+)\)", re.sub(r"`[^`\n]*`", "", text)):
        if "://" in link or link.startswith("mailto:"):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or target.suffix != ".md" or anchor in list_heading_anchors(target.read_text("utf-8")), link
