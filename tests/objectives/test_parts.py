"""Bundles of self-supervised runs contain the objective's state, which another such run loads."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

import vitreous
from tests.conftest import make_image
from tests.reports.test_report import NoteListener
from vitreous.errors import WeightsError
from vitreous.weights.adopt import open_objective_state, open_weights

TRAIN_OPTIONS = {
    "model": "ViT-16x1/4",
    "image_size": 16,
    "precision": "fp32",
    "batch_size": 8,
    "epochs": 1.0,
    "workers": 0,
}
OBJECTIVE_SETTINGS = {
    "mae": {"decoder_width": ["16"], "decoder_heads": ["2"], "decoder_depth": ["1"]},
    "masked-patches": {},
    "dino": {"prototypes": ["16"], "head_width": ["16"], "bottleneck": ["8"]},
    "dinov2": {"prototypes": ["16"], "head_width": ["16"], "bottleneck": ["8"]},
    "dinov3": {
        **{"prototypes": ["16"], "head_width": ["16"], "bottleneck": ["8"], "local_weight": ["0.5"]},
        **{"gram_weight": ["2"], "gram_refresh": ["0"]},
    },
}
OBJECTIVE_STATE_PARTS = {
    "mae": {"decoder"},
    "masked-patches": {"head", "mask_token"},
    "dino": {"model", "head", "teacher_head", "centre"},
    "dinov2": {"model", "head", "teacher_head", "mask_token", "centre", "patch_centre"},
    "dinov3": {"model", "head", "teacher_head", "mask_token", "centre", "patch_centre", "gram_teacher"},
}


def train_run(home, recipe, out, listener=None, **options):
    settings = {
        f"objective.{key}": value for key, value in (OBJECTIVE_SETTINGS[recipe] | options.pop("objective", {})).items()
    }
    return vitreous.train(
        str(home / "photos"), listener or NoteListener(), recipe=recipe, out=str(home / out), settings=settings, device="cpu",
        **{**TRAIN_OPTIONS, **options},
    )  # fmt: skip


@pytest.fixture(scope="module")
def pretrained_runs(tmp_path_factory):
    """Return a folder of 16 unlabelled images, and a short run of each recipe."""
    pretrained_runs = tmp_path_factory.mktemp("parts")
    (pretrained_runs / "photos").mkdir()
    for index in range(16):
        make_image(index, (16, 16), index % 3).save(pretrained_runs / "photos" / f"{index}.png")
    for recipe in OBJECTIVE_SETTINGS:
        train_run(pretrained_runs, recipe, recipe)
    return pretrained_runs


@pytest.mark.parametrize("recipe", OBJECTIVE_SETTINGS)
def test_objective_state_matches_the_last_checkpoint(pretrained_runs, recipe):
    objective_state = open_objective_state(pretrained_runs / recipe)
    assert {name.partition(".")[0] for name in objective_state.state} == OBJECTIVE_STATE_PARTS[recipe]
    path = max((pretrained_runs / recipe / "checkpoints").iterdir())
    checkpoint_tensors = {name: t for file in ("model", "frozen") if (path / f"{file}.safetensors").is_file()
            for name, t in load_file(path / f"{file}.safetensors").items()}  # fmt: skip
    assert objective_state.state and all(
        torch.equal(tensor, checkpoint_tensors[name].float()) for name, tensor in objective_state.state.items()
    )
    bundle_weights = load_file(pretrained_runs / recipe / "model" / "weights.safetensors")
    prefix = "teacher." if recipe.startswith("dino") else "model."
    from_checkpoint = open_weights(path).read_state()
    assert from_checkpoint.keys() == bundle_weights.keys()
    assert all(
        torch.equal(tensor, checkpoint_tensors[prefix + name].float()) for name, tensor in bundle_weights.items()
    )
    assert all(torch.equal(tensor, from_checkpoint[name].float()) for name, tensor in bundle_weights.items())


@pytest.mark.parametrize("recipe", OBJECTIVE_SETTINGS)
def test_run_of_the_same_objective_continues_its_state(pretrained_runs, recipe, tmp_path):
    """With a learning rate of almost zero, only teacher and centre change."""
    listener = NoteListener()
    train_run(
        pretrained_runs,
        recipe,
        f"{recipe}-on",
        listener,
        init=str(pretrained_runs / recipe),
        optimizer="adamw",
        lr=1e-30,
    )
    assert any(note.startswith(f"{recipe} continues with its") for note in listener.notes)
    before, after = (
        open_objective_state(pretrained_runs / recipe),
        open_objective_state(pretrained_runs / f"{recipe}-on"),
    )
    assert before.config == after.config and before.state.keys() == after.state.keys()
    for name, tensor in before.state.items():
        follows = name.startswith("teacher") or "centre" in name
        assert follows or torch.equal(tensor, after.state[name]), name


def test_mismatched_objective_state_is_newly_initialised(pretrained_runs):
    listener = NoteListener()
    train_run(
        pretrained_runs, "dino", "wider", listener, init=str(pretrained_runs / "dino"), objective={"prototypes": ["24"]}
    )
    (note,) = [note for note in listener.notes if note.startswith("dino continues with")]
    assert note.startswith("dino continues with its model; newly initialised") and "teacher_head" in note
    assert open_objective_state(pretrained_runs / "wider").state["centre"].shape == (24,)
    listener = NoteListener()
    train_run(pretrained_runs, "masked-patches", "other", listener, init=str(pretrained_runs / "mae"))
    assert not any("continues with" in note for note in listener.notes)


def test_damaged_objective_state_is_rejected(pretrained_runs, tmp_path):
    file = pretrained_runs / "dinov2" / "model" / "objective.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-4] + b"\x00\x01\x02\x03")
    try:
        with pytest.raises(WeightsError, match="is missing or was modified after it was saved"):
            train_run(pretrained_runs, "dinov2", "damaged", init=str(pretrained_runs / "dinov2"))
    finally:
        file.write_bytes(content)
