"""docs/tutorials/volumes.md: the commands run, and write the promised files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.conftest import run_cli
from tests.tutorials.runner import DOCS, check_exit_codes, read_steps, run_steps

PAGE = (DOCS / "tutorials" / "volumes.md").read_text("utf-8")
SHORT = {"scans/": ("--steps", "2", "--batch-size", "2", "--workers", "0", "--model", "ViT-32x1/4x4x4")}


def write_scans(root: Path, count: int = 10) -> None:
    """Write `count` volumes of 12 x 14 x 16 voxels with masks of three classes."""
    nibabel = pytest.importorskip("nibabel")
    for number in range(count):
        mask = np.zeros((12, 14, 16), np.float32)
        mask[3:8, 4:9, 3 + number % 3 : 8] = 1
        mask[3:8, 4:9, 8:12] = 2
        for folder, values in (("images", np.random.default_rng(number).normal(100 + 60 * mask, 10)), ("labels", mask)):
            (root / folder).mkdir(parents=True, exist_ok=True)
            path = root / folder / f"hippocampus_{number:03}.nii.gz"
            nibabel.Nifti1Image(values.astype(np.float32), np.eye(4)).to_filename(path)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_commands_run(tmp_path):
    write_scans(tmp_path / "scans")
    steps = run_steps(read_steps(PAGE), tmp_path, SHORT)
    assert [step.command.split()[1] for step in steps] == ["data", "train", "evaluate"]
    check_exit_codes(steps)
    assert "note: classes are numbered, as scans/classes.txt does not exist" in steps[0].error + steps[0].output
    assert (tmp_path / "runs" / "hippocampus" / "report-val.html").is_file()
    prediction = run_cli("predict", "runs/hippocampus", "scans/images", "--out", "masks", cwd=tmp_path)
    assert prediction.returncode == 0, prediction.stderr
    assert (tmp_path / "masks" / "hippocampus_001.nii.gz").is_file()


def test_a_resampled_mask_is_rejected(tmp_path):
    from vitreous.data.decoding.volumes import read_label_volume
    from vitreous.errors import DataError

    path = tmp_path / "1.npy"
    np.save(path, np.full((4, 4, 4), 0.5, np.float32))
    with pytest.raises(DataError, match=r"0\.5 is not a class index"):
        read_label_volume(path)
    assert "0.5 is not a class index" in PAGE
