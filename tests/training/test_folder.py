"""Metrics lines in a run folder: a truncated line does not affect other lines."""

from __future__ import annotations

import pytest

from vitreous.training.folder import RunFolder, append_line, read_json_lines

JSON_LINES = [{"step": 1, "name": "loss", "text": "a }\n"}, {"step": 2, "name": "top1", "text": "é"}]


@pytest.mark.parametrize("lost", range(1, 40, 3))
def test_lines_after_a_truncated_line_are_read(tmp_path, lost):
    path = tmp_path / "lines.jsonl"
    for line in JSON_LINES:
        append_line(path, line)
    path.write_bytes(path.read_bytes()[:-lost])
    append_line(path, {"step": 3})
    expected = JSON_LINES if lost == 1 else JSON_LINES[:1]  # of the first line only the newline is lost
    assert read_json_lines(path) == [*expected, {"step": 3}]


def test_no_file_has_no_lines(tmp_path):
    assert read_json_lines(tmp_path / "none.jsonl") == []


def test_rewind_keeps_lines_up_to_the_step(tmp_path):
    folder = RunFolder(tmp_path)
    for step in (1, 2, 3):
        folder.append({"step": step, "loss": float("nan")})
        folder.append({"step": step, "val/top1": 0.5})
    folder.metrics.write_bytes(folder.metrics.read_bytes()[:-3])
    folder.rewind(2, exclude='"step": 2, "val/')
    assert [(line["step"], "loss" in line) for line in read_json_lines(folder.metrics)] == [
        (1, True),
        (1, False),
        (2, True),
    ]
    assert folder.metrics.read_bytes().endswith(b"\n")
