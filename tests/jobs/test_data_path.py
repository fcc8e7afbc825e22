"""The data path of a run is stored as absolute, and a missing path is reported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.conftest import make_folder, run_cli
from vitreous.data.sources import resolve_source
from vitreous.jobs.train import train
from vitreous.training.folder import RunFolder

TINY_OPTIONS = {
    "model": "ViT-16x1/8",
    "image_size": 16,
    "epochs": 1,
    "device": "cpu",
    "precision": "fp32",
    "batch_size": 8,
    "workers": 0,
}


@pytest.fixture(scope="module")
def trained_home(tmp_path_factory):
    """A folder with photos/ and a run that was trained there with a relative path."""
    folder = tmp_path_factory.mktemp("home")
    make_folder(folder / "photos", {"train": 4, "test": 2}, classes=("ant", "bee"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        summary = train("photos", out="run", **TINY_OPTIONS)
    assert summary["data"] == str(folder / "photos")
    return folder


@pytest.fixture
def trained_copy(trained_home, tmp_path):
    """A copy of the folder whose run refers to the copied photos."""
    folder = shutil.copytree(trained_home, tmp_path / "home")
    replace_data_path(folder / "run", trained_home / "photos", folder / "photos")
    return folder


def replace_data_path(run: Path, old: Path | str, new: Path | str) -> None:
    """Replace the data path in a run's config."""
    text = (run / "config.yaml").read_text()
    assert text.count(f"source: {old}\n") == 1
    (run / "config.yaml").write_text(text.replace(f"source: {old}\n", f"source: {new}\n"))


def run_evaluate(run: Path | str, cwd: Path, *words: str):
    return run_cli("evaluate", str(run), *words, "--workers", "0", "--device", "cpu", cwd=cwd)


def test_relative_data_path_is_stored_as_absolute(trained_home, tmp_path):
    assert RunFolder(trained_home / "run").run().data.source == str(trained_home / "photos")
    assert run_evaluate(trained_home / "run", tmp_path).returncode == 0


def test_bundle_does_not_contain_the_absolute_data_path(trained_home):
    text = (trained_home / "run" / "model" / "model.json").read_text()
    assert json.loads(text)["provenance"]["data"] == "photos" and str(trained_home) not in text


def test_dataset_names_are_not_resolved_as_paths(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    names = ["digits", "hf:org/name", "torchvision:CIFAR10"]
    assert [resolve_source(name) for name in names] == names
    assert resolve_source("x-{000..127}.tar") == f"{tmp_path}/x-{{000..127}}.tar"


def test_config_with_a_relative_path_is_rerun_with_an_absolute_path(trained_copy, monkeypatch):
    replace_data_path(trained_copy / "run", trained_copy / "photos", "photos")
    monkeypatch.chdir(trained_copy)
    train("photos", config="run/config.yaml", out="again")
    assert RunFolder(trained_copy / "again").run().data.source == str(trained_copy / "photos")


def test_stored_relative_path_works_only_from_its_folder(trained_copy, tmp_path):
    replace_data_path(trained_copy / "run", trained_copy / "photos", "photos")
    assert run_evaluate("run", trained_copy).returncode == 0
    result = run_evaluate(trained_copy / "run", tmp_path)
    assert result.returncode == 3 and result.stderr.startswith("error: ")
    assert (
        f"{trained_copy / 'run'} was trained on photos, a relative path that does not exist in {tmp_path}"
        in result.stderr
    )
    assert "change to the folder that it is relative to" in result.stderr
    (trained_copy / "run" / "summary.json").unlink()
    assert run_cli("train", "photos", "--out", "run", "--resume", cwd=trained_copy).returncode == 0


def test_missing_data_error_names_the_last_existing_folder(trained_copy, tmp_path):
    (trained_copy / "photos").rename(trained_copy / "moved")
    result = run_evaluate(trained_copy / "run", tmp_path)
    assert result.returncode == 3
    assert (
        f"was trained on {trained_copy / 'photos'}, which no longer exists: the last existing folder of its path is {trained_copy}"
        in result.stderr
    )
    assert f"vitreous evaluate {trained_copy / 'run'} DATA" in result.stderr
    assert run_evaluate(trained_copy / "run", tmp_path, str(trained_copy / "moved")).returncode == 0


def test_run_resumes_with_moved_data_but_not_changed_data(trained_copy):
    (trained_copy / "run" / "summary.json").unlink()
    (trained_copy / "photos").rename(trained_copy / "moved")
    result = run_cli("train", str(trained_copy / "photos"), "--out", "run", "--resume", cwd=trained_copy)
    assert result.returncode == 3 and "no longer exists" in result.stderr
    (trained_copy / "moved" / "train" / "ant" / "0.png").rename(trained_copy / "moved" / "train" / "ant" / "new.png")
    result = run_cli("train", "moved", "--out", "run", "--resume", cwd=trained_copy)
    assert result.returncode == 3 and "moved has changed since the run started" in result.stderr
    (trained_copy / "moved" / "train" / "ant" / "new.png").rename(trained_copy / "moved" / "train" / "ant" / "0.png")
    result = run_cli("train", "moved", "--out", "run", "--resume", cwd=trained_copy)
    assert result.returncode == 0, result.stderr
    assert RunFolder(trained_copy / "run").run().data.source == str(trained_copy / "moved")
