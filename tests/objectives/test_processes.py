"""Training in new processes: bit-identical after SIGKILL, and equal for 1, 2 and 4 processes and FSDP2.

Runs with the same number of processes share these processes, because starting takes most of the time of a short run.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

import vitreous
from tests.conftest import make_folder, make_image
from tests.data.annotations.scenery import write_maps, write_objects
from tests.objectives.test_distillation import make_teacher_bundle
from tests.reports.test_report import NoteListener
from tests.training.test_ranks import carry_out, read_outcome  # noqa: F401  a fixture
from vitreous.weights.sharded import load_checkpoint_tensors

SMALL_OPTIONS = {
    "model": "ViT-32x2/4",
    "image_size": 16,
    "precision": "fp32",
    "seed": 3,
    "log_every": 1,
    "batch_size": 8,
}
HEAD_OPTIONS = {"prototypes": 32, "head_width": 24, "bottleneck": 16}
GRAM_OPTIONS = {"gram_weight": 2.0, "gram_start": 0.2, "gram_refresh": 0.25, "gram_refreshes": 1}
#: recipe and objective settings
OBJECTIVE_VARIANTS = {
    "mean-colour": ("masked-patches", {}),
    "small-colours": ("masked-patches", {"target": "small-colours"}),
    "pixels": ("masked-patches", {"target": "pixels"}),
    "mae": ("mae", {"decoder_width": 16, "decoder_heads": 2, "decoder_depth": 1}),
    "dino": ("dino", HEAD_OPTIONS),
    "dinov2": ("dinov2", HEAD_OPTIONS),
    "dinov2-sinkhorn": ("dinov2", {**HEAD_OPTIONS, "centring": "sinkhorn", "patch_prototypes": 16, "batch_norm": True}),
    "dinov2-taught": ("dinov2", {**HEAD_OPTIONS, "batch_norm": True}),
    "dinov3": ("dinov3", {**HEAD_OPTIONS, "local_weight": 0.5, **GRAM_OPTIONS}),
    "distil-features": ("distil-features", {}),
    "hard": ("distil", {}),
    "soft": ("distil", {"kind": "soft", "temperature": 2.0, "reduction": "official"}),
    "segment": ("segment", {"head_width": 8}),
    "detect": ("detect", {"width": 16, "hidden": 16, "proposals": 20, "anchor": 2.0, "finest": 4}),
    "diffusion": ("dit", {}),
    "flow": ("sit", {"label_dropout": 0.5}),
    "values": ("regression", {"loss": "l1"}),
    "clip": ("clip", {}),
    "siglip": ("siglip", {}),
    "tiny-dino": ("tiny-dino", {}),
    "tiny-pixels": ("tiny-pixels", {}),
}
# the other student has a single head for labels and teacher
MODEL_SETTINGS = {
    "hard": {"model.pool": ["distilled"], "model.class_token": ["True"], "model.positions.slots": ["2"]},
    "diffusion": {"model.learned_variance": ["True"]},
}
#: student models of another family
MODEL_NAMES = {"soft": "Swin-32x1-2/2-window2", "diffusion": "DiT-32x2/4", "flow": "DiT-32x2/4"}
#: a run of more than one epoch: four steps of 8 images, and a last step of 2 or 3 images, where some of 4 processes are
#: idle
TRAIN_OPTIONS = {**SMALL_OPTIONS, "workers": 0, "epochs": 1.2, "evaluate_every": 100, "drop_path": 0.0}
WORLD_SIZES = {"one": 1, "two": 2, "four": 4, "fsdp": 2}
#: Two processes train most objectives; FSDP2 only objectives with special reductions of statistics or gradients. Other
#: targets and heads, four processes and killed variants are in slow tests.
COMBINED_VARIANTS = ("mae", "dino", "dinov2-sinkhorn", "hard", "detect")
SLOW_VARIANTS = ("small-colours", "pixels", "dinov2", "dinov2-taught", "soft", "flow", "tiny-dino", "tiny-pixels")
FAST_VARIANTS = [name for name in OBJECTIVE_VARIANTS if name not in SLOW_VARIANTS]
FAST_CASES = [*(("two", name) for name in FAST_VARIANTS), *(("fsdp", name) for name in COMBINED_VARIANTS)]
UNSUPPORTED_CASES = [("fsdp", "clip"), ("fsdp", "siglip")]
SLOW_CASES = [("two", name) for name in SLOW_VARIANTS] + [
    (way, name)
    for way in ("four", "fsdp")
    for name in OBJECTIVE_VARIANTS
    if "tiny" not in name and (way, name) not in UNSUPPORTED_CASES and (way == "four" or name not in COMBINED_VARIANTS)
]


@pytest.fixture(scope="module")
def data_folder(tmp_path_factory):
    """Return a folder with the data of all objectives and two teachers.

    32 images are unlabelled, and also have captions, values, class maps or objects. 30 training and 6 validation images have
    three classes.
    """
    home = tmp_path_factory.mktemp("data")
    (home / "flat").mkdir()
    for index in range(32):
        make_image(index, (16, 16), index % 3).save(home / "flat" / f"{index}.png")
    rows = [f"flat/{index}.png,{index / 7:g},{'' if index % 5 == 0 else index * index}" for index in range(32)]
    (home / "values.csv").write_text("\n".join(["path,a,b", *rows]) + "\n")
    captions = [f"flat/{index}.png,a {['red', 'green', 'blue'][index % 3]} image {index % 5}" for index in range(32)]
    (home / "pairs.csv").write_text("\n".join(["path,caption", *captions]) + "\n")
    make_folder(home / "photos", {"train": 10, "val": 2})
    write_maps(home / "scenes", 32)
    write_objects(home / "objects", 32)
    make_teacher_bundle().save(home / "teacher")
    vitreous.train(**make_run_options(home, home, "dinov2", epochs=0.3, save_every=100), listener=NoteListener())
    return home


def make_run_options(data_folder, out, name, **changes):
    """Return options of a short run."""
    recipe, settings = OBJECTIVE_VARIANTS[name]
    folder = data_folder / {
        "distil": "photos",
        "dit": "photos",
        "sit": "photos",
        "segment": "scenes",
        "detect": "objects",
        "regression": "values.csv",
        "clip": "pairs.csv",
        "siglip": "pairs.csv",
    }.get(recipe, "flat")
    if recipe == "distil":
        settings, changes = {**settings, "teacher": data_folder / "teacher"}, {"mixup": 0.0, **changes}
    if recipe == "distil-features":
        settings = {**settings, "teacher": data_folder / "teacher"}
    if recipe in ("dit", "sit", "clip", "siglip"):
        changes = {"drop_path": None, **changes}
    if name == "dinov2-taught":
        settings = {**settings, "teacher": data_folder / "dinov2"}
    chosen = {f"objective.{key}": [str(value)] for key, value in settings.items()} | MODEL_SETTINGS.get(name, {})
    if recipe == "dinov3":
        chosen["views.anchor_scale"] = ["2.0"]
    return {
        "data": str(folder),
        "out": str(out / name),
        "recipe": recipe,
        "settings": chosen,
        **TRAIN_OPTIONS,
        **changes,
    } | ({"model": MODEL_NAMES[name]} if name in MODEL_NAMES else {})


def make_process_order(world, options, **order_options):
    """Return an order for consecutive runs in the same processes."""
    return {"world": world, "options": options, **order_options}


def kill_and_resume_runs(data_folder, home, names, carry_out):  # noqa: F811
    """Return a folder with `whole` runs, and `killed` runs that were killed after the third step and resumed."""
    often = {"save_every": 1}
    codes, errors = carry_out(
        make_process_order(1, [make_run_options(data_folder, home / "whole", name, **often) for name in names]),
        *(
            make_process_order(1, make_run_options(data_folder, home / "killed", name, **often), kill=[0, 3])
            for name in names
        ),
        make_process_order(1, [{"data": "", "out": str(home / "killed" / name), "resume": True} for name in names]),
    )
    assert codes == [[0], *[[-9]] * len(names), [0]], errors
    return home


@pytest.fixture(scope="module")
def killed_runs(data_folder, tmp_path_factory, carry_out):  # noqa: F811
    return kill_and_resume_runs(data_folder, tmp_path_factory.mktemp("killed"), FAST_VARIANTS, carry_out)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAST_VARIANTS)
def test_killed_run_resumes_bit_identical(killed_runs, name):
    assert_resumed_run_is_identical(killed_runs, name)


@pytest.fixture(scope="module")
def slow_killed_runs(data_folder, tmp_path_factory, carry_out):  # noqa: F811
    return kill_and_resume_runs(data_folder, tmp_path_factory.mktemp("killed"), SLOW_VARIANTS, carry_out)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_VARIANTS)
def test_killed_run_resumes_bit_identical_for_other_variants(slow_killed_runs, name):
    assert_resumed_run_is_identical(slow_killed_runs, name)


def assert_resumed_run_is_identical(home, name):
    """Assert that a resumed run matches the uninterrupted one, and that its checkpoints contain the derived state."""
    uninterrupted = read_outcome(home / "whole" / name)
    assert uninterrupted == read_outcome(home / "killed" / name) and uninterrupted[0] == "step-00000005"
    if "dino" in name:
        frozen_tensors = load_file(max((home / "whole" / name / "checkpoints").glob("step-*")) / "frozen.safetensors")
        head = "teacher_head.weight" if "tiny" in name else "teacher_head.prototypes.weight"
        assert {"centre", head, "teacher.projection.weight"} <= frozen_tensors.keys()
        assert ("gram_teacher.projection.weight" in frozen_tensors) == (name == "dinov3")
        assert (frozen_tensors["centre"].abs().max() == 0) == (name == "dinov2-sinkhorn")


def train_with_world_sizes(data_folder, home, pairs, carry_out):  # noqa: F811
    """Train each variant in one process, and in the requested world sizes; return the folder."""
    shared_options = {"optimizer": "sgd", "lr": 0.05, "save_every": 100}
    pairs = [*(("one", name) for name in OBJECTIVE_VARIANTS if any(name == variant for _, variant in pairs)), *pairs]
    orders = {}
    for world, name in pairs:
        parallel_options = {"parallel": "fsdp"} if world == "fsdp" else {}
        orders.setdefault(world, []).append(
            make_run_options(data_folder, home / world, name, **shared_options, **parallel_options)
        )
    codes, errors = carry_out(*(make_process_order(WORLD_SIZES[world], options) for world, options in orders.items()))
    assert codes == [[0] * WORLD_SIZES[world] for world in orders], errors
    return home


def assert_runs_agree(home, world, name):
    """Assert that a multi-process run has the weights, state and losses of the single-process run."""
    expected, actual = load_checkpoint_states(home / "one" / name), load_checkpoint_states(home / world / name)
    assert expected.keys() == actual.keys()
    assert [
        key
        for key in expected
        if not torch.allclose(expected[key], actual[key].reshape(expected[key].shape), atol=1e-5)
    ] == []
    assert read_losses(home / world / name) == pytest.approx(read_losses(home / "one" / name), rel=1e-4)


@pytest.fixture(scope="module")
def shared_runs(data_folder, tmp_path_factory, carry_out):  # noqa: F811
    return train_with_world_sizes(data_folder, tmp_path_factory.mktemp("shared"), FAST_CASES, carry_out)


@pytest.mark.parametrize(("world", "name"), FAST_CASES)
def test_runs_agree_for_any_number_of_processes(shared_runs, world, name):
    assert_runs_agree(shared_runs, world, name)


@pytest.fixture(scope="module")
def slow_shared_runs(data_folder, tmp_path_factory, carry_out):  # noqa: F811
    return train_with_world_sizes(data_folder, tmp_path_factory.mktemp("shared"), SLOW_CASES, carry_out)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "name"), SLOW_CASES)
def test_slow_variants_agree_for_any_number_of_processes(slow_shared_runs, world, name):
    assert_runs_agree(slow_shared_runs, world, name)


def load_checkpoint_states(out):
    """Return the tensors of the last checkpoint, by file and name."""
    path = max((out / "checkpoints").glob("step-*"))
    return {
        f"{file}/{n}": t for file in ("model", "frozen", "ema") for n, t in load_checkpoint_tensors(path, file).items()
    }


def read_losses(out):
    """Return the loss of every step."""
    return [line["train/loss"] for line in map(json.loads, (out / "metrics.jsonl").open()) if "train/loss" in line]
