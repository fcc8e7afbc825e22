"""Run the notebooks and store their outputs: `python docs/site/notebooks.py [NAME ...]`, or `make notebooks`.

Each notebook runs in a separate kernel, in an empty folder. The results and prints of cells are stored. Output on
stderr, times and the version of Python are removed, so that another run changes as little as possible. Prints the wall
time and the CPU time of each notebook. Needs the extra `dev`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
FORMS = ("image/png", "text/html", "text/plain")  # formats of an output; the first available one is stored


def execute_notebook(path: Path, folder: Path) -> dict[str, Any]:
    """Run the cells of a notebook in `folder`, and return it with its outputs as JSON."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, 4)
    resources = {"metadata": {"path": str(folder)}}
    search_path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])  # `!vitreous`
    client = NotebookClient(notebook, timeout=900, kernel_name="python3", resources=resources)
    client.execute(env=os.environ | {"PATH": search_path})
    notebook.metadata.pop("language_info", None)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.execution_count = None
            cell.outputs = merge_prints([output for output in cell.outputs if output.get("name") != "stderr"])
            for output in cell.outputs:
                if "execution_count" in output:
                    output.execution_count = None
                if "data" in output:  # the text form of images and tables contains memory addresses
                    output_format = next(output_format for output_format in FORMS if output_format in output.data)
                    output.data = {output_format: output.data[output_format]}
    return json.loads(nbformat.writes(notebook))


def merge_prints(outputs: list[Any]) -> list[Any]:
    """Merge consecutive prints, whose number depends on the time. Lines of commands end in a line feed only."""
    merged: list[Any] = []
    for output in outputs:
        if output["output_type"] == "stream":
            if merged and merged[-1]["output_type"] == "stream":
                merged[-1]["text"] += output["text"]
            else:
                merged.append(output)
        else:
            merged.append(output)
    for output in merged:
        if output["output_type"] == "stream":
            output["text"] = output["text"].replace("\r\n", "\n")
    return merged


def output_types(book: dict[str, Any]) -> list[list[str]]:
    """Return the formats of the outputs of each code cell, such as `text/html`, or `stream` for prints."""
    cells = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    return [[next(iter(o["data"])) if "data" in o else o["output_type"] for o in cell["outputs"]] for cell in cells]


def notebook_page(path: Path) -> str:
    """Return a notebook as a Markdown page with text, code and outputs, and a link to download it."""
    blocks = [block for cell in json.loads(path.read_text("utf-8"))["cells"] for block in cell_parts(cell)]
    title, _, first_text = blocks[0].partition("\n")
    return "\n\n".join([title, f"Download the notebook: [{path.name}]({path.name}).", first_text, *blocks[1:]]) + "\n"


def cell_parts(cell: dict[str, Any]) -> Iterator[str]:
    """Yield the Markdown blocks of a cell: its text, or its code and its outputs."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield source
        return
    yield f"```python\n{source}\n```"
    for output in cell["outputs"]:
        ((output_format, lines),) = output.get("data", {"text/plain": output.get("text")}).items()
        text = "".join(lines).strip()
        if output_format == "image/png":
            text = f'<img alt="figure" src="data:image/png;base64,{text}">'
        yield (
            f"```text\n{text}\n```"
            if output_format == "text/plain"
            else f'<div class="output">{"".join(text.splitlines())}</div>'
        )


def main() -> None:
    """Run the notebooks that the arguments name, or all, and write them with their outputs."""
    for path in [NOTEBOOKS / f"{name}.ipynb" for name in sys.argv[1:]] or sorted(NOTEBOOKS.glob("*.ipynb")):
        start, cpu_start = time.monotonic(), os.times()
        with tempfile.TemporaryDirectory() as folder:
            book = execute_notebook(path, Path(folder))
        cpu_end = os.times()
        cpu = sum(cpu_end[2:4]) - sum(cpu_start[2:4])  # of the kernel and its commands, user and system
        path.write_text(json.dumps(book, indent=1, ensure_ascii=False) + "\n", "utf-8")
        print(f"{path}: {time.monotonic() - start:.0f} s, CPU {cpu:.0f} s", flush=True)


if __name__ == "__main__":
    main()
