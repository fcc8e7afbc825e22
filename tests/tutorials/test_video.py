"""docs/tutorials/video.md: the scripts and commands run, and print the fixed lines of the page."""

from __future__ import annotations

import re
import shutil

import pytest
from PIL import Image

from tests.tutorials.runner import DOCS, check_exit_codes, check_fixed_lines, read_steps, run_steps

PAGE = (DOCS / "tutorials" / "video.md").read_text("utf-8")
SHORT = {"clips/": ("--steps", "2", "--batch-size", "4", "--workers", "0")}
COMMANDS = [
    *("data", "train", "evaluate", "evaluate", "evaluate", "train", "evaluate", "inspect", "predict", "predict"),
    *("train", "train", "train"),
]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_commands_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_clips, make_film = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    # fewer clips than on the page
    exec(re.sub(r"\], \d+\)", "], 8)", write_clips), {})
    exec(make_film, {})
    for label, numbers in (("left", (0, 2, 4, 6)), ("right", (1, 3, 5, 7))):
        for folder in ("mixed", "broken"):
            (tmp_path / folder / label).mkdir(parents=True)
            for number in numbers:
                shutil.copy(f"clips/train/{label}/{number:03}.gif", tmp_path / folder / label)
    Image.new("RGB", (32, 32)).save("mixed/left/preview.png")
    content = (tmp_path / "broken" / "left" / "000.gif").read_bytes()
    (tmp_path / "broken" / "left" / "000.gif").write_bytes(content[: len(content) // 3])

    steps = run_steps([step for step in read_steps(PAGE) if step.command.startswith("vitreous ")], tmp_path, SHORT)
    assert [step.command.split()[1] for step in steps] == COMMANDS
    check_exit_codes([step for step in steps if "broken/" not in step.command])
    (broken,) = [step for step in steps if "broken/" in step.command]
    assert broken.returncode and "broken/left/000.gif: cut short after" in broken.error
    check_fixed_lines([step for step in steps if step.command.split()[1] in ("inspect", "predict")])
    for name in ("runs/actions/report.html", "runs/actions/inspect/clips.png", "runs/actions/inspect/clips.gif"):
        assert (tmp_path / name).is_file(), name
