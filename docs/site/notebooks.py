"""Run the notebooks and keep what they show: `python docs/site/notebooks.py [NAME ...]`, or `make notebooks`.

Each runs in a kernel of its own, in an empty folder. Kept are the results of cells and their prints; what goes to
stderr, times and the version of Python are not, so that a second run changes as little as it can. Needs the
extra `dev`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
FORMS = ("image/png", "text/html", "text/plain")  # of an output, of which the first that it has is kept


def execute_notebook(path: Path, folder: Path) -> dict[str, Any]:
    """The notebook as JSON, with its outputs, when its cells have run in `folder`."""
    import nbformat
    from nbclient import NotebookClient

    book = nbformat.read(path, 4)
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(book, timeout=900, kernel_name="python3", resources=resources).execute()
    book.metadata.pop("language_info", None)
    for cell in book.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.execution_count = None
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
            for output in cell.outputs:
                if "execution_count" in output:
                    output.execution_count = None
                if "data" in output:  # pictures and tables need no text, which has addresses in it
                    form = next(form for form in FORMS if form in output.data)
                    output.data = {form: output.data[form]}
    return json.loads(nbformat.writes(book))


def output_types(book: dict[str, Any]) -> list[list[str]]:
    """What each code cell of a notebook shows: the form of each output, such as `text/html`, or `stream` for prints."""
    cells = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    return [[next(iter(o["data"])) if "data" in o else o["output_type"] for o in cell["outputs"]] for cell in cells]


def notebook_page(path: Path) -> str:
    """A notebook as a page of the site: text, code and outputs, and the file itself to take along."""
    parts = [part for cell in json.loads(path.read_text("utf-8"))["cells"] for part in cell_parts(cell)]
    title, _, rest = parts[0].partition("\n")
    return "\n\n".join([title, f"The notebook itself: [{path.name}]({path.name}).", rest, *parts[1:]]) + "\n"


def cell_parts(cell: dict[str, Any]) -> Iterator[str]:
    """The Markdown of a cell and of its outputs."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield source
        return
    yield f"```python\n{source}\n```"
    for output in cell["outputs"]:
        ((form, lines),) = output.get("data", {"text/plain": output.get("text")}).items()
        text = "".join(lines).strip()
        if form == "image/png":
            text = f'<img alt="figure" src="data:image/png;base64,{text}">'
        yield (
            f"```text\n{text}\n```"
            if form == "text/plain"
            else f'<div class="output">{"".join(text.splitlines())}</div>'
        )


def main() -> None:
    """Run the notebooks that are named, or all, and write them with their outputs."""
    for path in [NOTEBOOKS / f"{name}.ipynb" for name in sys.argv[1:]] or sorted(NOTEBOOKS.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as folder:
            book = execute_notebook(path, Path(folder))
        path.write_text(json.dumps(book, indent=1, ensure_ascii=False) + "\n", "utf-8")
        print(path)


if __name__ == "__main__":
    main()
