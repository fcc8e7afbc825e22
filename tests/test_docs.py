"""The Python of the pages that need nothing but themselves."""

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
NEED_FILES = ("guides/distributed.md", "guides/export.md", "guides/prediction.md", "reference/models.md")
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


#: libraries of the page on interoperability, of which a block each is not run by the test above
INTEROP_LIBRARIES = ("pytorch_lightning", "torchao", "captum", "supervision")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("library", INTEROP_LIBRARIES)
def test_a_model_in_another_library(library, tmp_path, monkeypatch):
    """The block of a library runs after those of PyTorch."""
    import torch

    from tests.inference.detectors import save_detector, write_photos

    if find_spec(library) is None:
        pytest.skip("a library of the page on interoperability is not installed")
    monkeypatch.chdir(tmp_path)
    save_detector(tmp_path / "detector")
    write_photos(tmp_path / "pictures", 1)[0].rename("street.jpg")
    page = (DOCS / "guides" / "interoperability.md").read_text("utf-8")
    blocks = re.findall(r"```(python|text)\n(.*?)```", page, re.DOTALL)
    (own,) = [block for kind, block in blocks if kind == "text" and f"{library}" in block.partition("\n")[0]]
    names: dict[str, Any] = {"torch": torch}
    exec(compile(blocks[0][1] + "images = torch.randn(4, 1, 8, 8)\n" + own, library, "exec"), names)
    assert library != "supervision" or len(names["detections"]) == len(names["found"].boxes) > 0


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_stored_with_outputs(notebook):
    text = notebook.read_text("utf-8")
    outputs = [output for cell in json.loads(text)["cells"] for output in cell.get("outputs", ())]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert all(output["output_type"] != "error" and output.get("name") != "stderr" for output in outputs)
    assert "/tmp/" not in text and "/home/" not in text


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_reproduce_their_output_types(notebook, tmp_path, monkeypatch):
    """In a kernel of its own. Numbers may be others on another machine, not which cells show pictures, tables and texts."""
    if find_spec("nbclient") is None or find_spec("ipykernel") is None:
        pytest.skip("a library of the page on interoperability is not installed")
    monkeypatch.syspath_prepend(DOCS / "site")
    site = importlib.import_module("notebooks")
    shown = site.output_types(site.execute_notebook(notebook, tmp_path))
    assert shown == site.output_types(json.loads(notebook.read_text("utf-8")))
    assert {"text/html", "image/png"} <= {kind for cell in shown for kind in cell}


def heading_anchors(text: str) -> set[str]:
    """The anchors of the headings of a page, as GitHub makes them."""
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
        assert not anchor or target.suffix != ".md" or anchor in heading_anchors(target.read_text("utf-8")), link
