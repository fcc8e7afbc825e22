"""Every objective by `train`'s own path in processes of its own: to the same bits after SIGKILL, and the same for 1, 2
and 4 processes and under FSDP2.

All runs of a kind are made by the same processes, one after the other, for most of a short run is its start.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

import vitreous
from tests.conftest import make_folder, picture
from tests.data.annotations.scenery import write_maps, write_objects
from tests.objectives.test_distillation import bundle
from tests.reports.test_report import Heard
from tests.training.test_ranks import carry_out, outcome  # noqa: F401  a fixture
from vitreous.weights.sharded import load_checkpoint_tensors

SMALL = {"model": "ViT-32x2/4", "image_size": 16, "precision": "fp32", "seed": 3, "log_every": 1, "batch_size": 8}
HEADS = {"prototypes": 32, "head_width": 24, "bottleneck": 16}
#: recipe, and settings of the objective
VARIANTS = {
    "mean-colour": ("masked-patches", {}),
    "small-colours": ("masked-patches", {"target": "small-colours"}),
    "pixels": ("masked-patches", {"target": "pixels"}),
    "mae": ("mae", {"decoder_width": 16, "decoder_heads": 2, "decoder_depth": 1}),
    "dino": ("dino", HEADS),
    "dinov2": ("dinov2", HEADS),
    "dinov2-sinkhorn": ("dinov2", {**HEADS, "centring": "sinkhorn", "patch_prototypes": 16, "batch_norm": True}),
    "dinov2-taught": ("dinov2", {**HEADS, "batch_norm": True}),
    "hard": ("distil", {}),
    "soft": ("distil", {"kind": "soft", "temperature": 2.0, "reduction": "official"}),
    "segment": ("segment", {"head_width": 8}),
    "detect": ("detect", {"width": 16, "hidden": 16, "proposals": 20, "anchor": 2.0, "finest": 4}),
    "diffusion": ("dit", {}),
    "flow": ("sit", {"label_dropout": 0.5}),
    "values": ("regression", {"loss": "l1"}),
    "tiny-dino": ("tiny-dino", {}),
    "tiny-pixels": ("tiny-pixels", {}),
}
TOKEN = {
    "hard": {"model.pool": ["distilled"], "model.class_token": ["True"], "model.positions.slots": ["2"]},
    "diffusion": {"model.learned_variance": ["True"]},
}  # the other student has one head for labels and teacher
#: students of another family
STUDENTS = {"soft": "Swin-32x1-2/2-window2", "diffusion": "DiT-32x2/4", "flow": "DiT-32x2/4"}
#: a run of more than an epoch: four steps of 8 images, and a last one of 2 or 3, in which some of 4 processes have none
OPTIONS = {**SMALL, "workers": 0, "epochs": 1.2, "evaluate_every": 100, "drop_path": 0.0}
WAYS = {"one": 1, "two": 2, "four": 4, "fsdp": 2}
#: by two processes every objective; under FSDP2 those whose statistics or gradients are put
#: together in a way of their own. Other targets and heads of an objective, all by four, and killed ones, in slow tests
MANY = ("mae", "dino", "dinov2-sinkhorn", "hard", "detect")
OTHERS = ("small-colours", "pixels", "dinov2-taught", "soft")
FIRST = [name for name in VARIANTS if name not in OTHERS]
ORDINARY = [*(("two", name) for name in FIRST), *(("fsdp", name) for name in MANY)]
SLOW = [("two", name) for name in OTHERS] + [
    (way, name)
    for way in ("four", "fsdp")
    for name in VARIANTS
    if "tiny" not in name and (way == "four" or name not in MANY)
]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """29 training images without classes, with values, or with class maps, or 30 of three classes, 3 and 6 more to judge on; a teacher that classifies,
    and one of prototypes."""
    home = tmp_path_factory.mktemp("data")
    (home / "flat").mkdir()
    for index in range(32):
        picture(index, (16, 16), index % 3).save(home / "flat" / f"{index}.png")
    rows = [f"flat/{index}.png,{index / 7:g},{'' if index % 5 == 0 else index * index}" for index in range(32)]
    (home / "values.csv").write_text("\n".join(["path,a,b", *rows]) + "\n")
    make_folder(home / "photos", {"train": 10, "val": 2})
    write_maps(home / "scenes", 32)
    write_objects(home / "objects", 32)
    bundle().save(home / "teacher")
    vitreous.train(**options_of(home, home, "dinov2", epochs=0.3, save_every=100), listener=Heard())
    return home


def options_of(data, out, name, **changes):
    """Options of a short run."""
    recipe, settings = VARIANTS[name]
    folder = data / {
        "distil": "photos",
        "dit": "photos",
        "sit": "photos",
        "segment": "scenes",
        "detect": "objects",
        "regression": "values.csv",
    }.get(recipe, "flat")
    if recipe == "distil":
        settings, changes = {**settings, "teacher": data / "teacher"}, {"mixup": 0.0, **changes}
    if recipe in ("dit", "sit"):
        changes = {"drop_path": None, **changes}
    if name == "dinov2-taught":
        settings = {**settings, "teacher": data / "dinov2"}
    chosen = {f"objective.{key}": [str(value)] for key, value in settings.items()} | TOKEN.get(name, {})
    return {"data": str(folder), "out": str(out / name), "recipe": recipe, "settings": chosen, **OPTIONS, **changes} | (
        {"model": STUDENTS[name]} if name in STUDENTS else {}
    )


def runs(world, options, **further):
    """Runs one after the other in the same processes."""
    return {"world": world, "options": options, **further}


def kill(data, home, names, carry_out):  # noqa: F811
    """A folder with runs as they are `whole`, and `killed` after the third step and resumed."""
    often = {"save_every": 1}
    codes, errors = carry_out(
        runs(1, [options_of(data, home / "whole", name, **often) for name in names]),
        *(runs(1, options_of(data, home / "killed", name, **often), kill=[0, 3]) for name in names),
        runs(1, [{"data": "", "out": str(home / "killed" / name), "resume": True} for name in names]),
    )
    assert codes == [[0], *[[-9]] * len(names), [0]], errors
    return home


@pytest.fixture(scope="module")
def killed(data, tmp_path_factory, carry_out):  # noqa: F811
    return kill(data, tmp_path_factory.mktemp("killed"), FIRST, carry_out)


@pytest.mark.slow
@pytest.mark.parametrize("name", FIRST)
def test_a_killed_run_goes_on_to_the_same_bits(killed, name):
    goes_on(killed, name)


@pytest.fixture(scope="module")
def killed_too(data, tmp_path_factory, carry_out):  # noqa: F811
    return kill(data, tmp_path_factory.mktemp("killed"), OTHERS, carry_out)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_a_killed_run_goes_on_to_the_same_bits_for_other_targets_and_heads(killed_too, name):
    goes_on(killed_too, name)


def goes_on(home, name):
    """Assert that a killed run ended as the whole one, and that its checkpoints hold what follows the weights."""
    whole = outcome(home / "whole" / name)
    assert whole == outcome(home / "killed" / name) and whole[0] == "step-00000005"
    if "dino" in name:
        held = load_file(max((home / "whole" / name / "checkpoints").glob("step-*")) / "frozen.safetensors")
        head = "teacher_head.weight" if "tiny" in name else "teacher_head.prototypes.weight"
        assert {"centre", head, "teacher.projection.weight"} <= held.keys()
        assert (held["centre"].abs().max() == 0) == (name == "dinov2-sinkhorn")


def share(data, home, pairs, carry_out):  # noqa: F811
    """A folder with the runs by one process, and each of the ways in which it is also made."""
    same = {"optimizer": "sgd", "lr": 0.05, "save_every": 100}
    pairs = [*(("one", name) for name in VARIANTS if any(name == other for _, other in pairs)), *pairs]
    orders = {}
    for way, name in pairs:
        further = {"parallel": "fsdp"} if way == "fsdp" else {}
        orders.setdefault(way, []).append(options_of(data, home / way, name, **same, **further))
    codes, errors = carry_out(*(runs(WAYS[way], options) for way, options in orders.items()))
    assert codes == [[0] * WAYS[way] for way in orders], errors
    return home


def agree(home, way, name):
    """Assert that a run by several processes has the weights, state and losses of that by one."""
    one, other = states(home / "one" / name), states(home / way / name)
    assert one.keys() == other.keys()
    assert [key for key in one if not torch.allclose(one[key], other[key].reshape(one[key].shape), atol=1e-5)] == []
    assert losses(home / way / name) == pytest.approx(losses(home / "one" / name), rel=1e-4)


@pytest.fixture(scope="module")
def shared(data, tmp_path_factory, carry_out):  # noqa: F811
    return share(data, tmp_path_factory.mktemp("shared"), ORDINARY, carry_out)


@pytest.mark.parametrize(("way", "name"), ORDINARY)
def test_any_number_of_processes_agrees(shared, way, name):
    agree(shared, way, name)


@pytest.fixture(scope="module")
def shared_too(data, tmp_path_factory, carry_out):  # noqa: F811
    return share(data, tmp_path_factory.mktemp("shared"), SLOW, carry_out)


@pytest.mark.slow
@pytest.mark.parametrize(("way", "name"), SLOW)
def test_any_number_of_processes_agrees_for_every_target_and_head(shared_too, way, name):
    agree(shared_too, way, name)


def states(out):
    """Tensors of the last checkpoint, by part and name."""
    place = max((out / "checkpoints").glob("step-*"))
    return {
        f"{part}/{n}": t for part in ("model", "frozen", "ema") for n, t in load_checkpoint_tensors(place, part).items()
    }


def losses(out):
    """The loss of every step."""
    return [line["train/loss"] for line in map(json.loads, (out / "metrics.jsonl").open()) if "train/loss" in line]
