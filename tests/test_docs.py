"""The Python of the pages that need nothing but themselves."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize("page", ["dense.md", "generating.md", "studies.md", "video.md", "volumes.md", "windows.md"])
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text("utf-8"), re.DOTALL)
    assert blocks
    exec(compile("\n".join(blocks), page, "exec"), {})
    assert capsys.readouterr().out.strip()
