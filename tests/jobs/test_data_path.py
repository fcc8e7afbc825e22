"""Where a run's data are is stored so that every folder can find them, and a run says so where they are gone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.conftest import make_folder, say
from vitreous.data.sources import resolve_source
from vitreous.jobs.train import train
from vitreous.training.folder import Folder

TINY = {
    "model": "ViT-16x1/8",
    "image_size": 16,
    "epochs": 1,
    "device": "cpu",
    "precision": "fp32",
    "batch_size": 8,
    "workers": 0,
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with photos/ and a run on them, which was trained in there with a relative path."""
    home = tmp_path_factory.mktemp("home")
    make_folder(home / "photos", {"train": 4, "test": 2}, classes=("ant", "bee"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        summary = train("photos", out="run", **TINY)
    assert summary["data"] == str(home / "photos")
    return home


@pytest.fixture
def home(trained, tmp_path):
    """A copy of it, whose run names the copied photos."""
    place = shutil.copytree(trained, tmp_path / "home")
    name_data(place / "run", trained / "photos", place / "photos")
    return place


def name_data(run: Path, before: Path | str, after: Path | str) -> None:
    """Replace the path of the data in a run's config."""
    text = (run / "config.yaml").read_text()
    assert text.count(f"source: {before}\n") == 1
    (run / "config.yaml").write_text(text.replace(f"source: {before}\n", f"source: {after}\n"))


def evaluated(run: Path | str, cwd: Path, *words: str):
    return say("evaluate", str(run), *words, "--workers", "0", "--device", "cpu", cwd=cwd)


def test_a_relative_path_is_stored_so_that_any_folder_finds_it(trained, tmp_path):
    assert Folder(trained / "run").run().data.source == str(trained / "photos")
    assert evaluated(trained / "run", tmp_path).returncode == 0


def test_the_model_that_is_shipped_does_not_tell_where_its_data_lay(trained):
    text = (trained / "run" / "model" / "model.json").read_text()
    assert json.loads(text)["provenance"]["data"] == "photos" and str(trained) not in text


def test_names_that_are_no_paths_stay(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    kept = ["digits", "hf:org/name", "torchvision:CIFAR10"]
    assert [resolve_source(name) for name in kept] == kept
    assert resolve_source("x-{000..127}.tar") == f"{tmp_path}/x-{{000..127}}.tar"


def test_a_config_with_a_relative_path_repeats_the_run_with_a_whole_one(home, monkeypatch):
    name_data(home / "run", home / "photos", "photos")
    monkeypatch.chdir(home)
    train("photos", config="run/config.yaml", out="again")
    assert Folder(home / "again").run().data.source == str(home / "photos")


def test_a_run_of_before_with_a_relative_path_works_where_it_did_and_says_why_elsewhere(home, tmp_path):
    name_data(home / "run", home / "photos", "photos")
    assert evaluated("run", home).returncode == 0
    result = evaluated(home / "run", tmp_path)
    assert result.returncode == 3 and result.stderr.startswith("error: ")
    assert (
        f"{home / 'run'} was trained on photos, a relative path that does not exist below {tmp_path}" in result.stderr
    )
    assert "go to the folder it starts from" in result.stderr
    (home / "run" / "summary.json").unlink()
    assert say("train", "photos", "--out", "run", "--resume", cwd=home).returncode == 0


def test_data_that_are_gone_are_named_with_what_is_left_of_their_path(home, tmp_path):
    (home / "photos").rename(home / "moved")
    result = evaluated(home / "run", tmp_path)
    assert result.returncode == 3
    assert (
        f"was trained on {home / 'photos'}, which is not there any more: of its path only {home} exists"
        in result.stderr
    )
    assert f"vitreous evaluate {home / 'run'} DATA" in result.stderr
    assert evaluated(home / "run", tmp_path, str(home / "moved")).returncode == 0


def test_a_run_goes_on_with_data_that_were_moved_and_not_with_others(home):
    (home / "run" / "summary.json").unlink()
    (home / "photos").rename(home / "moved")
    result = say("train", str(home / "photos"), "--out", "run", "--resume", cwd=home)
    assert result.returncode == 3 and "is not there any more" in result.stderr
    (home / "moved" / "train" / "ant" / "0.png").rename(home / "moved" / "train" / "ant" / "new.png")
    result = say("train", "moved", "--out", "run", "--resume", cwd=home)
    assert result.returncode == 3 and "moved is not what it was when the run began" in result.stderr
    (home / "moved" / "train" / "ant" / "new.png").rename(home / "moved" / "train" / "ant" / "0.png")
    result = say("train", "moved", "--out", "run", "--resume", cwd=home)
    assert result.returncode == 0, result.stderr
    assert Folder(home / "run").run().data.source == str(home / "moved")
