"""Figures of README.md and docs/: each file exists, has at most its maximum size, and is animated if required.

Also: `docs/figures/build.py` rejects unknown names.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).parent.parent
FIGURES = ROOT / "docs" / "figures"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BUILT_PREFIXES = (
    "hero",
    "page",
    "terminal",
    "start",
    "task-",
    "retrieval",
    "zero-shot",
)  # prefixes of the files that build.py generates
ANIMATED_FIGURES = ("page", "terminal")
LARGEST_ANIMATION = 1_500_000  # bytes
LARGEST_TOTAL = 2_000_000  # bytes of all figures that build.py generates, except static vector drawings
FIGURE_MODULES = [
    name for name in ("hero", "page", "terminal", "start", "inspection", "texts") if (FIGURES / f"{name}.py").exists()
]


def read_outputs(name: str) -> tuple[str, ...]:
    """`OUTPUTS` of a module of docs/figures, read without importing it, because the tests may lack its dependencies."""
    for node in ast.parse((FIGURES / f"{name}.py").read_text()).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "OUTPUTS" for target in targets):
            return tuple(ast.literal_eval(node.value))  # type: ignore[attr-defined]
    raise AssertionError(f"{name}.py has no OUTPUTS")


def count_frames(file: Path) -> int:
    """The number of frames of an animation; for an SVG, the key frame sets of its style sheet."""
    if file.suffix == ".svg":
        return file.read_text().count("@keyframes")
    with Image.open(file) as image:
        return getattr(image, "n_frames", 1)


def list_built_files() -> list[Path]:
    """The files of docs/figures that build.py generates."""
    return [file for file in sorted(FIGURES.iterdir()) if file.name.startswith(BUILT_PREFIXES) and file.suffix != ".py"]


def run_build(*words: str) -> subprocess.CompletedProcess[str]:
    """Run build.py without importing the package."""
    return subprocess.run(
        [sys.executable, "-S", str(FIGURES / "build.py"), *words], capture_output=True, text=True, timeout=60
    )


def test_every_linked_figure_exists():
    shown = re.compile(r"[(\"' ,]([^()\"'\s,]*figures/[^()\"'\s,#]+\.(?:svg|png|webp|gif|jpe?g))")
    links = [(page, link) for page in PAGES for link in shown.findall(page.read_text()) if "://" not in link]
    missing = [f"{page.relative_to(ROOT)}: {link}" for page, link in links if not (page.parent / link).is_file()]
    assert links
    assert missing == []


@pytest.mark.parametrize("name", FIGURE_MODULES)
def test_outputs_are_files_and_animations_have_frames_and_a_limit(name):
    for output in read_outputs(name):
        file = FIGURES / output
        assert file.is_file(), f"build it: python docs/figures/build.py {name}"
        frames = count_frames(file)
        assert frames > 1 or name not in ANIMATED_FIGURES, file
        assert frames == 1 or file.stat().st_size <= LARGEST_ANIMATION, file


def test_built_figures_fit_the_total_size():
    sizes = {
        file.name: file.stat().st_size for file in list_built_files() if file.suffix != ".svg" or count_frames(file) > 1
    }
    assert sizes and sum(sizes.values()) <= LARGEST_TOTAL, sizes


def test_the_terminal_shows_its_last_screen_without_animation():
    drawing = (FIGURES / "terminal.svg").read_text()
    hidden = set(re.findall(r"#(s\d+)\{visibility:hidden", drawing))
    shown = [
        re.sub(r"<[^>]+>", " ", body)
        for name, body in re.findall(r'<g id="(s\d+)">(.*?)</g>', drawing)
        if name not in hidden
    ]
    text = " ".join(shown)
    assert hidden and "test: top-1" in text and "vitreous predict runs/digits" in text
    assert re.search(r"@keyframes (s\d+)\{0\.00%\{visibility:visible\}", drawing), "the first frame is empty"
    assert (
        "prefers-reduced-motion:reduce" in drawing
        and "<script" not in drawing
        and "http" not in drawing.replace("http://www.w3.org/2000/svg", "")
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nonsense"], "error: unknown figures: nonsense; choose from "),
        (["terminal", "b", "a"], "error: unknown figures: a, b; choose from "),
    ],
)
def test_unknown_figures_are_rejected(words, message):
    done = run_build(*words)
    assert done.returncode == 2 and done.stdout == "" and message in done.stderr and "Traceback" not in done.stderr
