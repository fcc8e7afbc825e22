"""Where a run's data are is stored so that every folder can find them, and a run says so where they are gone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.conftest import make_folder, say
from vitreous.data.sources import resolve_source
from vitreous.jobs.train import train
from vitreous.training.folder import RunFolder

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
    trained_copy = tmp_path_factory.mktemp("home")
    make_folder(trained_copy / "photos", {"train": 4, "test": 2}, classes=("ant", "bee"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(trained_copy)
        summary = train("photos", out="run", **TINY)
    assert summary["data"] == str(trained_copy / "photos")
    return trained_copy


@pytest.fixture
def trained_copy(trained, tmp_path):
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
    assert RunFolder(trained / "run").run().data.source == str(trained / "photos")
    assert evaluated(trained / "run", tmp_path).returncode == 0


def test_the_model_that_is_shipped_does_not_tell_where_its_data_lay(trained):
    text = (trained / "run" / "model" / "model.json").read_text()
    assert json.loads(text)["provenance"]["data"] == "photos" and str(trained) not in text


def test_names_that_are_no_paths_stay(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    kept = ["digits", "hf:org/name", "torchvision:CIFAR10"]
    assert [resolve_source(name) for name in kept] == kept
    assert resolve_source("x-{000..127}.tar") == f"{tmp_path}/x-{{000..127}}.tar"


def test_a_config_with_a_relative_path_repeats_the_run_with_a_whole_one(trained_copy, monkeypatch):
    name_data(trained_copy / "run", trained_copy / "photos", "photos")
    monkeypatch.chdir(trained_copy)
    train("photos", config="run/config.yaml", out="again")
    assert RunFolder(trained_copy / "again").run().data.source == str(trained_copy / "photos")


def test_a_run_of_before_with_a_relative_path_works_where_it_did_and_says_why_elsewhere(trained_copy, tmp_path):
    name_data(trained_copy / "run", trained_copy / "photos", "photos")
    assert evaluated("run", trained_copy).returncode == 0
    result = evaluated(trained_copy / "run", tmp_path)
    assert result.returncode == 3 and result.stderr.startswith("error: ")
    assert (
        f"{trained_copy / 'run'} was trained on photos, a relative path that does not exist in {tmp_path}"
        in result.stderr
    )
    assert "change to the folder that it is relative to" in result.stderr
    (trained_copy / "run" / "summary.json").unlink()
    assert say("train", "photos", "--out", "run", "--resume", cwd=trained_copy).returncode == 0


def test_data_that_are_gone_are_named_with_what_is_left_of_their_path(trained_copy, tmp_path):
    (trained_copy / "photos").rename(trained_copy / "moved")
    result = evaluated(trained_copy / "run", tmp_path)
    assert result.returncode == 3
    assert (
        f"was trained on {trained_copy / 'photos'}, which no longer exists: the last existing folder of its path is {trained_copy}"
        in result.stderr
    )
    assert f"vitreous evaluate {trained_copy / 'run'} DATA" in result.stderr
    assert evaluated(trained_copy / "run", tmp_path, str(trained_copy / "moved")).returncode == 0


def test_a_run_goes_on_with_data_that_were_moved_and_not_with_others(trained_copy):
    (trained_copy / "run" / "summary.json").unlink()
    (trained_copy / "photos").rename(trained_copy / "moved")
    result = say("train", str(trained_copy / "photos"), "--out", "run", "--resume", cwd=trained_copy)
    assert result.returncode == 3 and "no longer exists" in result.stderr
    (trained_copy / "moved" / "train" / "ant" / "0.png").rename(trained_copy / "moved" / "train" / "ant" / "new.png")
    result = say("train", "moved", "--out", "run", "--resume", cwd=trained_copy)
    assert result.returncode == 3 and "moved has changed since the run began" in result.stderr
    (trained_copy / "moved" / "train" / "ant" / "new.png").rename(trained_copy / "moved" / "train" / "ant" / "0.png")
    result = say("train", "moved", "--out", "run", "--resume", cwd=trained_copy)
    assert result.returncode == 0, result.stderr
    assert RunFolder(trained_copy / "run").run().data.source == str(trained_copy / "moved")
