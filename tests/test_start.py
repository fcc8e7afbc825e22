"""docs/tutorials/first-model.md and docs/index.md: the commands run as printed, and files shown on the pages exist."""

from __future__ import annotations

import json
import re
import shutil

import pytest

from tests.conftest import make_folder, run_cli
from tests.tutorials.runner import DOCS, check_exit_codes, check_fixed_lines, read_steps, run_steps
from vitreous.jobs import default_weights, doctor
from vitreous.jobs.default_weights import find_available_weights

pytestmark = pytest.mark.drawn

START_PAGE = "".join((DOCS / "tutorials" / name).read_text("utf-8") for name in ("first-model.md", "own-photos.md"))
INDEX_PAGE = (DOCS / "index.md").read_text("utf-8")
CLASSES = ("cardboard", "glass", "metal", "paper", "plastic", "trash")
#: additional options by dataset of `train`, and the minimum test top-1 of `train digits`
SETTINGS = {
    "short": ({"digits": ["--epochs", "6"], "photos/": ["--steps", "1", "--batch-size", "4", "--workers", "0"]}, 0.3),
    "as printed": ({"photos/": ["--steps", "2", "--batch-size", "8", "--workers", "0"]}, 0.975),
}


def list_images(page: str) -> list[tuple[str, str]]:
    """Alternative text and file of the images of a page, in Markdown or HTML."""
    images = re.findall(r"!\[([^]]*)\]\(([^)]+)\)", page)
    for tag in re.findall(r"<img [^>]+>", page):
        values = dict(re.findall(r'(\w+)="([^"]*)"', tag))
        images.append((values.get("alt", ""), values["src"]))
    return images


@pytest.fixture(scope="module", params=["short", pytest.param("as printed", marks=pytest.mark.slow)])
def command_results(request, tmp_path_factory):
    """Run every console command of the two first tutorials in order, on synthetic photos: (setting, folder, steps)."""
    folder = tmp_path_factory.mktemp("start")
    make_folder(folder / "photos", {"train": 6, "val": 2, "test": 2}, CLASSES, size=(213, 160))
    (folder / "new").mkdir()
    for number, name in enumerate(("glass12", "metal114", "paper129")):
        shutil.copy(folder / "photos" / "test" / CLASSES[number] / "0.png", folder / "new" / f"{name}.jpg")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "short":
            patch.setattr(doctor, "BENCHMARK_BATCH_SIZE", 2)
            patch.setattr(doctor, "BENCHMARK_SECONDS", 0.0)
        steps = run_steps(read_steps(START_PAGE), folder, SETTINGS[request.param][0])
    return request.param, folder, steps


def test_the_start_page_covers_the_main_verbs():
    commands = [step.command for step in read_steps(START_PAGE)]
    verbs = [command.split()[1] for command in commands if command.startswith("vitreous")]
    assert list(dict.fromkeys(verbs)) == ["doctor", "train", "evaluate", "inspect", "predict", "data"]
    assert START_PAGE.count("`vitreous serve runs/") == 2


@pytest.mark.timeout(3600)
def test_every_command_exits_as_shown(command_results):
    """Commands followed by an error on the page fail with that message; all others succeed."""
    check_exit_codes(command_results[2])


@pytest.mark.timeout(3600)
def test_notes_headings_and_last_lines_are_those_printed(command_results):
    """Lines that do not depend on the photos: notes, table headings, written files and the next step."""
    check_fixed_lines(command_results[2])


@pytest.mark.timeout(3600)
def test_the_digits_are_learned(command_results):
    setting, folder, _ = command_results
    summary = json.loads((folder / "runs" / "digits" / "summary.json").read_text())
    assert summary["test"]["top1"] >= SETTINGS[setting][1]
    assert (folder / "runs" / "digits" / "inspect" / "index.html").is_file() and (folder / "predictions.csv").is_file()


def test_photos_start_from_published_weights_without_a_download(published_weights, tmp_path, monkeypatch):
    """The default that the page describes, with a small model in place of the published one."""
    monkeypatch.setenv("VITREOUS_MIRROR", str(published_weights))
    monkeypatch.setattr(default_weights, "find_available_weights", find_available_weights)
    make_folder(tmp_path / "photos", {"train": 4, "val": 2, "test": 2}, CLASSES[:2], size=(80, 72))
    result = run_cli("train", "photos/", "--steps", "1", "--workers", "0", "--out", "runs/photos", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "training starts from the published weights vit-s16-augreg (cached)" in result.stderr


@pytest.mark.parametrize(
    ("page", "least"), [("tutorials/first-model.md", 1), ("tutorials/own-photos.md", 3), ("index.md", 11)]
)
def test_images_exist_and_have_alternative_texts(page, least):
    images = list_images((DOCS / page).read_text("utf-8"))
    assert len(images) >= least
    for text, file in images:
        assert len(text.split()) >= 3, file
        assert (DOCS / page).parent.joinpath(file).stat().st_size > 1000, file


def test_tiles_link_to_pages():
    """Each tile has an image, a title that links to an existing page, a sentence and a command."""
    tiles = re.findall(
        r"\[!\[[^]]+\]\(figures/task-\S+\)<br>\*\*([^*]+)\*\*\]\(([^)]+)\)<br>([^<`]+\.)<br>`vitreous ", INDEX_PAGE
    )
    assert len(tiles) == INDEX_PAGE.count("figures/task-") == 11
    for title, page, _ in tiles:
        assert (DOCS / page.partition("#")[0]).is_file(), title
