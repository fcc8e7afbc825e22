"""Settings of recipes without labels by the size of the set: ours for small ones, the published ones for others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.recipes.test_recipes import derive_run
from vitreous.objectives.heads import HeadOptions
from vitreous.recipes.fit_to_data import advise_pretraining
from vitreous.recipes.options import TrainOptions
from vitreous.recipes.recipe import DatasetInfo

SMALL_IMAGE, PHOTO_SIZE = (32, 32), (300, 400)
SMALL_SET_SETTINGS = {"prototypes": 1024, "head_width": 512, "bottleneck": 128, "batch_norm": True, "koleo": 0.1}


@pytest.mark.parametrize("recipe", ["dino", "dinov2"])
@pytest.mark.parametrize("size", [SMALL_IMAGE, PHOTO_SIZE])
@pytest.mark.parametrize("images", [20, 500, 9_999])
def test_small_sets_use_a_small_head_and_koleo(recipe, size, images):
    run = derive_run(recipe, images=images, size=size)
    assert {name: getattr(run.objective, name) for name in SMALL_SET_SETTINGS} == SMALL_SET_SETTINGS
    assert run.batch_size == min(64, images // 4) and run.schedules["momentum"].start == 0.99
    assert (run.schedules["teacher_temperature"].start, run.schedules["teacher_temperature"].end) == (0.04, 0.04)


def test_ten_thousand_photographs_use_published_settings():
    published, run = HeadOptions(), derive_run("dino", images=10_000)
    for name in ("prototypes", "head_width", "bottleneck", "batch_norm"):
        assert getattr(run.objective, name) == getattr(published, name)
    assert (run.objective.koleo, run.batch_size, run.schedules["momentum"].start) == (0.0, 512, 0.996)
    assert run.optimizer.name == "adamw" and run.optimizer.lr == pytest.approx(1e-3)


def test_small_set_settings_are_logged_in_one_line():
    def lines(*names, **options):
        notes = []
        derive_run(*names, notes=notes, **options)
        return [note for note in notes if "settings tuned for small datasets" in note]

    (line,) = lines("dino", images=500, size=SMALL_IMAGE)
    assert line == (
        "dino uses settings tuned for small datasets instead of the published ones: batch size 64, learning rate 0.002, "
        "1024 prototypes, KoLeo 0.1, teacher momentum 0.99 to 1, teacher temperature 0.04"
    )
    (line,) = lines("dino", images=500, size=SMALL_IMAGE, settings={"objective.koleo": ["0.5"]}, batch_size=32)
    assert "batch size 32" in line and "KoLeo 0.5" in line  # the settings of this run, not the defaults
    (line,) = lines("mae", images=500)
    assert line.endswith("batch size 64, learning rate 0.001, a decoder of 2 blocks of 384")
    assert not lines("dino", images=10_000) and not lines("small", images=500, size=SMALL_IMAGE)


def get_pretraining_advice(recipe, images, size, **changes):
    """What a run is told of pre-training before it starts."""
    run = derive_run(recipe, images=images, size=size)
    run = replace(run, data=replace(run.data, **changes))
    return advise_pretraining(run, DatasetInfo(images, size, 3), TrainOptions("x", recipe=recipe))


@pytest.mark.parametrize("recipe", ["masked-patches", "mae", "dino", "dinov2"])
def test_advice_for_unused_labels_contains_measurements(recipe):
    text = get_pretraining_advice(recipe, 9_000, SMALL_IMAGE)
    assert text.startswith(f"the images have labels, which {recipe} does not use: ")
    assert {"dino": "53.1 %", "dinov2": "24.1 %"}.get(
        recipe, "19.8 %"
    ) in text and "(docs/guides/pretraining.md)" in text
    assert (
        "\n" not in text
        and get_pretraining_advice(recipe, 500, PHOTO_SIZE)
        and not get_pretraining_advice(recipe, 10_000, PHOTO_SIZE)
    )


def test_without_labels_only_mae_gets_advice():
    assert "use --recipe dino" in get_pretraining_advice("mae", 1_200, SMALL_IMAGE, classes=())
    assert "use --recipe dino" in get_pretraining_advice("mae", 1_200, SMALL_IMAGE, classes=("images",))
    assert not get_pretraining_advice("dino", 1_200, SMALL_IMAGE, classes=()) and not get_pretraining_advice(
        "mae", 10_000, PHOTO_SIZE, classes=()
    )
