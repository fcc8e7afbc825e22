"""Names of run folders, and COCO files with a missing list."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from vitreous.data.sources import open_data
from vitreous.errors import DataError
from vitreous.jobs.plan import MAX_RUN_NAME_BYTES, build_run_name
from vitreous.models.names import config_from_name


@pytest.mark.parametrize("letter", ["d", "é", "中"])
def test_run_name_of_a_long_folder_name_is_truncated(letter):
    run = SimpleNamespace(model=config_from_name("ViT-32x2/8"))
    name = build_run_name(run, SimpleNamespace(name=letter * 240))  # type: ignore[arg-type]
    assert (
        name.startswith(f"ViT-32x2-8-{letter}") and MAX_RUN_NAME_BYTES - 3 <= len(name.encode()) <= MAX_RUN_NAME_BYTES
    )


def test_coco_error_lists_missing_categories(tmp_path):
    (tmp_path / "train").mkdir()
    annotations = [{"id": 1, "image_id": 1, "category_id": 7, "bbox": [0, 0, 2, 2]}]
    file = tmp_path / "train" / "_annotations.coco.json"
    file.write_text(json.dumps({"images": [{"id": 1, "file_name": "a.png"}], "annotations": annotations}))
    with pytest.raises(DataError) as refused:
        open_data(tmp_path)
    assert "has no list categories" in str(refused.value) and '{"id": 7, "name": "class 7"}' in str(refused.value)
