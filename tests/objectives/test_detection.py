"""Training of object detection: the losses of a batch, and complete runs on annotated folders."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import vitreous
from tests.data.annotations.scenery import write_maps, write_objects
from tests.data.annotations.writing_scenes import write_coco, write_voc
from vitreous.data.annotations.painted import has_object_masks, keep_object_targets, with_object_masks
from vitreous.data.augmentation.augment import Augment
from vitreous.data.augmentation.scenes import SceneViews
from vitreous.data.keys import derive_keys, draw_uniform
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.data.sources import open_data
from vitreous.errors import DataError, UsageError
from vitreous.models.names import config_from_name
from vitreous.models.regions import federated_loss
from vitreous.objectives.base import ObjectiveSetting, TrainingProgress
from vitreous.objectives.detection import DetectionConfig, draw_federated_classes
from vitreous.tasks.detection import Detection
from vitreous.weights.adopt import open_objective_state
from vitreous.weights.bundle import Bundle, load_bundle
from vitreous.weights.objective_parts import load_into_objective

SMALL_OBJECTIVE = {"width": 16, "hidden": 32, "proposals": 30, "finest": 4, "anchor": 2.0}
TRAIN_OPTIONS = {
    "recipe": "detect", "model": "Conv8-16-16+ViT-32x1/8", "image_size": 32, "batch_size": 4, "workers": 0,
    "device": "cpu", "precision": "fp32", "evaluate_every": 10**6,
    "settings": {f"objective.{name}": [str(value)] for name, value in SMALL_OBJECTIVE.items()},
}  # fmt: skip


def train_detector(out: Path, **changes):
    return vitreous.train(changes.pop("data"), out=str(out), **TRAIN_OPTIONS | changes)


def test_detection_run_learns_and_reports_average_precision(tmp_path):
    for split, count in (("train", 16), ("val", 4)):
        write_objects(tmp_path / "data" / split, count)
    settings = TRAIN_OPTIONS["settings"] | {"optimizer.matrix_lr": ["0.03"]}
    summary = train_detector(tmp_path / "run", data=str(tmp_path / "data"), steps=80, lr=3e-3, settings=settings)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    logged = [line for line in lines if "train/loss" in line]
    loss_names = ("objectness", "proposals", "classes", "boxes", "masks")
    for line in logged:
        assert line["train/loss"] == pytest.approx(sum(line[f"train/{name}"] for name in loss_names), rel=1e-5)
    assert all(logged[-1][f"train/{name}"] > 0 for name in loss_names)
    assert logged[-1]["train/loss"] < 0.6 * logged[0]["train/loss"]
    assert summary["val"]["primary"] == "ap" and summary["val"]["box_ap50"] > 0.3 and summary["val"]["ap50"] > 0.1
    bundle = load_bundle(tmp_path / "run" / "model")
    assert bundle.task == Detection(("object",), masks=True) and bundle.model.config.masks


def test_pretrained_backbones_are_trained_frozen_or_adapted(tmp_path):
    home = write_objects(tmp_path / "data", 8)
    once = {"data": str(home), "steps": 2, "save_every": 10}
    train_detector(tmp_path / "first", **once)
    before = load_bundle(tmp_path / "first" / "model").model.backbone.state_dict()
    oblong = make_setting_arguments("model.image", ["24", "32"])
    for name, change in {
        "all": {},
        "heads": {"last_blocks": 0},
        "adapters": {"lora": 2},
        "best": {"keep_best": True},
    }.items():
        train_detector(
            tmp_path / name, **once, **change, **oblong, init=str(tmp_path / "first"), model=None, image_size=None
        )
        after = load_bundle(tmp_path / name / "model").model.backbone.state_dict()
        assert json.loads((tmp_path / name / "model" / "model.json").read_text())["preprocess"]["image"] == [24, 32]
        changed = {
            parameter
            for parameter in before
            if parameter != "position.table" and not torch.equal(before[parameter], after[parameter])
        }
        assert {"all": bool(changed), "best": bool(changed), "heads": not changed}.get(
            name, changed == LORA_PARAMETERS
        ), name
    summary = json.loads((tmp_path / "best" / "summary.json").read_text())
    assert summary["selection"]["best"]["metric"] == "AP"


LORA_PARAMETERS = {"encoder.blocks.0.attention.part.qkv.weight"}


def test_mask_prediction_follows_the_data_or_the_option(tmp_path):
    boxes, masks = str(write_voc(tmp_path / "voc")), str(write_coco(tmp_path / "coco"))
    once = {"steps": 1, "batch_size": 2, "save_every": 10}
    train_detector(tmp_path / "boxes", data=boxes, **once)
    assert load_bundle(tmp_path / "boxes" / "model").task == Detection(("cat", "dog", "owl"), masks=False)
    with pytest.raises(DataError, match=r"no masks[\s\S]*'objective.masks': \['false'\]"):
        train_detector(tmp_path / "no", data=boxes, **once, **make_setting_arguments("objective.masks", ["true"]))
    train_detector(tmp_path / "masks", data=masks, **once)
    assert load_bundle(tmp_path / "masks" / "model").task.masks
    train_detector(tmp_path / "less", data=masks, **once, **make_setting_arguments("objective.masks", ["false"]))
    assert not load_bundle(tmp_path / "less" / "model").task.masks


def make_setting_arguments(name: str, value: list[str]) -> dict:
    return {"settings": TRAIN_OPTIONS["settings"] | {name: value}}


def test_detection_targets_contain_only_objects(tmp_path):
    data = keep_object_targets(open_data(str(write_coco(tmp_path / "coco"))))
    assert has_object_masks(data) and data.classes == ("cat", "dog", "owl")
    split = data.split("train").take(torch.arange(2).numpy())
    assert split.target(0).layers is not None and split.target(0).classes is None
    assert with_object_masks(data, False).split("train").target(0).layers is None
    with pytest.raises(DataError, match=r"has class maps but no objects[\s\S]*segment"):
        keep_object_targets(open_data(str(write_maps(tmp_path / "maps"))))
    with pytest.raises(DataError, match=r"has no boxes, masks or class maps[\s\S]*COCO"):
        keep_object_targets(open_data("digits"))


def objective_and_batch(**changes):
    """Return an objective without random augmentation, and a batch of 4 images with one square each.

    Only the sampling of anchors and regions is random.
    """
    config = DetectionConfig(**SMALL_OBJECTIVE | changes)
    torch.manual_seed(0)
    model = vitreous.create("Conv8-16-16+ViT-32x1/8", image_size=32, num_classes=0)
    objective = config.build(model, ObjectiveSetting(seed=3, classes=("a", "b")))
    generator = torch.Generator().manual_seed(1)
    corners = torch.randint(0, 20, (4, 2), generator=generator).float()
    images, masks = torch.randn(4, 3, 32, 32, generator=generator), torch.zeros(4, 1, 32, 32, dtype=torch.bool)
    for image, mask, (x, y) in zip(images, masks, corners.int().tolist(), strict=True):
        image[:, y : y + 10, x : x + 10] = 3
        mask[0, y : y + 10, x : x + 10] = True
    boxes = torch.cat([corners, corners + 10], 1)[:, None]
    labels, crowd = [torch.tensor([number % 2]) for number in range(4)], [torch.zeros(1, dtype=torch.bool)] * 4
    batch = {"images": images, "boxes": [*boxes], "labels": labels, "crowd": crowd, "masks": [*masks]}
    return objective, batch | {"positions": torch.arange(4)}


def test_detector_for_other_classes_loads_pyramid_and_proposals(tmp_path):
    (first, _), (second, _) = objective_and_batch(), objective_and_batch()
    Bundle(first.model.eval(), first.task(), ImagePreprocess((32, 32), 3, (0.5,) * 3, (0.5,) * 3)).save(tmp_path / "x")
    objective_state = open_objective_state(tmp_path / "x")
    for tensor in second.model.parameters():
        tensor.data.zero_()
    loading_report = load_into_objective(second, {"classes": ["c", "d"]}, objective_state)
    assert set(loading_report.loaded) == {"model.pyramid", "model.proposals"} and loading_report.skipped == [
        "model.regions"
    ]
    assert not any(tensor.any() for tensor in second.model.regions.parameters())
    assert set(load_into_objective(second, {"classes": ["a", "b"]}, objective_state).loaded) == {
        *loading_report.loaded,
        *loading_report.skipped,
    }
    loaded_state, theirs = second.model.state_dict(), first.model.state_dict()
    assert all(
        torch.equal(loaded_state[name], theirs[name]) for name in loaded_state if not name.startswith("backbone.")
    )


def test_sampling_keys_depend_only_on_seed_and_position():
    objective, batch = objective_and_batch(masks=True)
    keys = objective.prepare(batch, TrainingProgress())["keys"]
    assert torch.equal(
        keys[2:], objective.prepare({**batch, "positions": torch.arange(2, 4)}, TrainingProgress())["keys"]
    )
    assert len(set(keys.tolist())) == 4
    first, repeated = (objective(objective.prepare(batch, TrainingProgress())) for _ in range(2))
    assert all(torch.equal(first[name], repeated[name]) for name in first)
    sample_losses = [
        objective({name: rows[i : i + 1] for name, rows in (batch | {"keys": keys}).items()}) for i in range(4)
    ]
    assert first["loss"].item() == pytest.approx(sum(losses["loss"].item() for losses in sample_losses) / 4, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_are_float32_and_decrease(dtype):
    objective, batch = objective_and_batch(masks=True)
    batch = objective.prepare(batch, TrainingProgress())
    objective.to(dtype)
    batch["images"] = batch["images"].to(dtype)
    optimizer, losses = torch.optim.AdamW(objective.parameters(), 3e-3), []
    for _ in range(12):
        optimizer.zero_grad()
        outputs = objective(batch)
        assert outputs["loss"].dtype == torch.float32
        outputs["loss"].backward()
        optimizer.step()
        losses.append(outputs["loss"].item())
    assert all(map(math.isfinite, losses)) and losses[-1] < 0.8 * losses[0]


def compute_loss_curve(masks: bool) -> list[float]:
    """Return the losses of eight SGD steps on one batch; step n uses the random draws from position n."""
    objective, batch = objective_and_batch(masks=masks)
    optimizer, losses = torch.optim.SGD(objective.parameters(), 0.02, momentum=0.9), []
    for step in range(8):
        optimizer.zero_grad()
        outputs = objective(
            objective.prepare({**batch, "positions": torch.arange(4) + 4 * step}, TrainingProgress(step))
        )
        outputs["loss"].backward()
        optimizer.step()
        losses.append(outputs["loss"].item())
    return losses


@pytest.mark.parametrize("masks", [False, True])
def test_golden_curve(masks):
    """Refactoring does not change the losses; `compute_loss_curve` computes new reference values."""
    assert compute_loss_curve(masks) == pytest.approx(GOLDEN_LOSSES[masks], abs=2e-3)


GOLDEN_LOSSES = {
    False: [1.84478, 1.64536, 1.18171, 0.99888, 1.16494, 1.24704, 1.14111, 0.93412],
    True: [3.54125, 2.87588, 2.41921, 1.95913, 2.02573, 1.72442, 1.59554, 1.45789],
}


def test_unsupported_data_and_options_are_rejected():
    model = replace(config_from_name("ViT-32x2/8", 32), classes=0)
    with pytest.raises(UsageError, match="scenes"):
        DetectionConfig().check(model, ("a", "b"), Augment())
    with pytest.raises(UsageError, match="nms"):
        DetectionConfig(nms=2.0).check(model, ("a", "b"), SceneViews())


def test_federated_loss_matches_the_loop():
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(7, 6, generator=generator), torch.tensor([0, 1, 5, 5, 0, 2, 0])
    for classes in (range(5), (0, 4), ()):
        counted = torch.zeros(5, dtype=torch.bool)
        counted[list(classes)] = True
        total = 0.0
        for row, label in zip(logits.tolist(), labels.tolist(), strict=True):
            for k in classes:
                total += math.log(1 + math.exp(row[1 + k])) - row[1 + k] * (label == 1 + k)
        assert federated_loss(logits, labels, counted).item() == pytest.approx(total / 7, rel=1e-5)
    assert torch.equal(federated_loss(logits, labels), federated_loss(logits, labels, torch.ones(5, dtype=torch.bool)))
    assert federated_loss(logits[:0], labels[:0]) == 0


def test_federated_classes_are_sampled_by_root_frequency():
    frequencies = np.array([100, 25, 0, 4, 1, 400, 0, 9])
    present = np.zeros((6000, 8), bool)
    present[::2, 2] = present[::3, 0] = True
    keys = derive_keys(5, np.arange(6000))
    counted, uniform = draw_federated_classes(present, frequencies, 3, keys), draw_uniform(keys, 8)
    for image in range(50):
        image_classes = set(np.flatnonzero(present[image]).tolist())
        times = {
            k: -math.log1p(-uniform[image, k]) / math.sqrt(frequencies[k])
            for k in range(8)
            if frequencies[k] and k not in image_classes
        }
        sampled = sorted(times, key=lambda k: times[k])[: 3 - len(image_classes)]
        assert set(np.flatnonzero(counted[image]).tolist()) == image_classes | set(sampled)
    assert (counted.sum(1) == 3).all() and not counted[1::2, [2, 6]].any()
    first = draw_federated_classes(np.zeros((6000, 8), bool), frequencies, 1, keys).mean(0)
    assert first == pytest.approx(np.sqrt(frequencies) / np.sqrt(frequencies).sum(), abs=0.02)
    assert np.array_equal(draw_federated_classes(present[10:20], frequencies, 3, keys[10:20]), counted[10:20])
    few_sampled = draw_federated_classes(present[:2], frequencies, 50, keys[:2])
    assert few_sampled.sum(1).tolist() == [7, 6]  # classes without any image are not sampled


def test_federated_loss_is_a_mean_over_images():
    objective, batch = objective_and_batch(scores="sigmoid", federated=1, frequencies=(3, 1))
    prepared = objective.prepare(batch, TrainingProgress())
    assert torch.equal(prepared["federated"], torch.tensor([[True, False], [False, True]] * 2))
    batch_losses = objective(prepared)
    assert batch_losses["classes"].isfinite() and batch_losses["classes"] > 0
    sample_losses = [objective({name: rows[i : i + 1] for name, rows in prepared.items()}) for i in range(4)]
    assert batch_losses["loss"].item() == pytest.approx(
        sum(losses["loss"].item() for losses in sample_losses) / 4, rel=1e-5
    )
    all_classes, _ = objective_and_batch(scores="sigmoid", federated=2)
    assert all_classes.prepare(batch, TrainingProgress())["federated"].all()
    config = DetectionConfig(scores="sigmoid", federated=50)
    assert config.fitted(np.array([[1.0, 0.0], [1.0, 1.0]], np.float32)).frequencies == (2, 1)
    assert DetectionConfig().fitted(np.ones((2, 2), np.float32)) == DetectionConfig()
    with torch.inference_mode():
        boxes, scores, labels = objective.deployed_model().eval()(batch["images"])
    assert len(boxes) == 4 and scores.max() <= 1 and set(labels.flatten().tolist()) <= {0, 1}
    model = replace(config_from_name("ViT-32x2/8", 32), classes=0)
    with pytest.raises(UsageError, match=r"'objective.scores': \['sigmoid'\]"):
        DetectionConfig(federated=5).check(model, ("a", "b"), SceneViews())
    with pytest.raises(UsageError, match="frequencies has 3 numbers for 2 classes"):
        replace(config, frequencies=(1, 2, 3)).check(model, ("a", "b"), SceneViews())


def test_lvis_options_are_applied_to_rare_classes(tmp_path):
    changes = {"objective.scores": ["sigmoid"], "objective.federated": ["2"], "data.repeat_threshold": ["0.9"]}
    settings = TRAIN_OPTIONS["settings"] | changes
    data = str(write_coco(tmp_path / "coco"))
    train_detector(tmp_path / "run", data=data, steps=2, batch_size=2, sampling="repeat-factor", settings=settings)
    config = json.loads((tmp_path / "run" / "model" / "model.json").read_text())["architecture"]
    assert config["scores"] == "sigmoid"
    run = (tmp_path / "run" / "config.yaml").read_text()
    assert "sampling: repeat-factor" in run and "frequencies:" in run and "frequencies: []" not in run
