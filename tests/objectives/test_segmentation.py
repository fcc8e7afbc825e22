"""Semantic segmentation: the losses, and complete runs on a folder with masks."""

import json
import math

import pytest
import torch

import vitreous
from tests.data.annotations.scenery import write_maps, write_objects
from vitreous.config import to_builtins
from vitreous.data.annotations.target import IGNORE_INDEX
from vitreous.data.augmentation.augment import Augment
from vitreous.data.augmentation.scenes import SceneViews
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.errors import DataError, UsageError
from vitreous.inference.open_model import open_bundle
from vitreous.models.names import config_from_name
from vitreous.models.zoo import create_untrained_model
from vitreous.objectives.base import ObjectiveSetting
from vitreous.objectives.segmentation import SegmentationConfig, dice_loss, pixel_cross_entropy
from vitreous.tasks.features import FeatureExtraction
from vitreous.tasks.segmentation import Segmentation
from vitreous.weights.adopt import load_pretrained_weights, open_objective_state, read_weights_info
from vitreous.weights.bundle import Bundle, load_bundle
from vitreous.weights.objective_parts import load_into_objective

TRAIN_OPTIONS = {
    "recipe": "segment", "model": "ViT-32x2/8", "image_size": 32, "batch_size": 4, "workers": 0, "device": "cpu",
    "precision": "fp32", "evaluate_every": 10**6, "settings": {"objective.head_width": ["8"]},
}  # fmt: skip


def draw_logits_and_truth(images=3, classes=4, size=(5, 6)):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(images, classes, *size, generator=generator, requires_grad=True)
    truth = torch.randint(-1, classes, (images, *size), generator=generator)
    truth[2] = IGNORE_INDEX
    return logits, truth


def test_losses_match_loops_over_labelled_pixels():
    logits, truth = draw_logits_and_truth()
    entropies, overlaps = [], []
    for row, image_truth in zip(logits, truth, strict=True):
        shares = row.softmax(0)
        labelled_pixels = [(y, x) for y in range(5) for x in range(6) if image_truth[y, x] != IGNORE_INDEX]
        entropies.append(
            sum(-shares[image_truth[p], p[0], p[1]].log() for p in labelled_pixels) / max(1, len(labelled_pixels))
        )
        for k in range(4):
            overlap = sum(shares[k, y, x] for y, x in labelled_pixels if image_truth[y, x] == k)
            total = sum(shares[k, y, x] + float(image_truth[y, x] == k) for y, x in labelled_pixels)
            overlaps.append(1 - (2 * overlap + 1) / (total + 1))
    assert pixel_cross_entropy(logits, truth).item() == pytest.approx(float(sum(entropies)) / 3, abs=1e-6)
    assert dice_loss(logits, truth).item() == pytest.approx(float(sum(overlaps)) / 12, abs=1e-6)
    (pixel_cross_entropy(logits, truth) + dice_loss(logits, truth)).backward()
    assert (logits.grad.movedim(1, -1)[truth == IGNORE_INDEX] == 0).all() and logits.grad.isfinite().all()


def test_class_weights_give_a_weighted_pixel_mean():
    logits, truth = draw_logits_and_truth()
    weights = torch.tensor([0.5, 1.0, 4.0, 2.0])
    for image in (0, 1):
        has_class = truth[image] != IGNORE_INDEX
        expected = torch.nn.functional.cross_entropy(logits[image][:, has_class].T, truth[image][has_class], weights)
        assert pixel_cross_entropy(logits[image : image + 1], truth[image : image + 1], weights).item() == (
            pytest.approx(expected.item(), abs=1e-6)
        )
    assert pixel_cross_entropy(logits[2:], truth[2:], weights) == 0  # no pixel has a class
    unweighted, equal_weights = (
        pixel_cross_entropy(logits, truth, class_weights) for class_weights in (None, torch.full((4,), 3.0))
    )
    assert equal_weights.item() == pytest.approx(unweighted.item(), abs=1e-6)


@pytest.mark.parametrize("weights", [(1.0, 0.0), (1.0, -1.0), (1.0, math.inf), (1.0, math.nan)])
def test_invalid_class_weights_are_rejected(weights):
    with pytest.raises(UsageError, match="class_weights must be finite and above 0"):
        SegmentationConfig(class_weights=weights)


def test_number_of_class_weights_must_match_classes():
    config = SegmentationConfig(class_weights=(1.0, 2.0))
    with pytest.raises(UsageError, match="class_weights has 2 numbers for 3 classes"):
        config.check(config_from_name("ViT-32x2/8"), ("a", "b", "c"), SceneViews())


def test_segmentation_run_learns_and_evaluates_on_test(tmp_path):
    for split, count in (("train", 16), ("val", 4), ("test", 4)):
        write_maps(tmp_path / "data" / split, count, "")
    (tmp_path / "data" / "classes.txt").write_text("ground\nsquare\ndisc\n")
    summary = vitreous.train(str(tmp_path / "data"), out=str(tmp_path / "run"), steps=60, lr=1e-2, **TRAIN_OPTIONS)
    assert summary["val"]["primary"] == "miou" and summary["test"]["images"] == 4
    assert summary["test"]["miou"] > 0.6 and summary["test"]["pixel_accuracy"] > 0.9
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    logged = [line for line in lines if "train/loss" in line]
    assert all(math.isfinite(line["train/cross_entropy"] + line["train/dice"]) for line in logged)
    bundle = load_bundle(tmp_path / "run" / "model")
    assert bundle.task == Segmentation(("ground", "square", "disc")) and bundle.model.config.head == "unet"
    with pytest.raises(UsageError, match="segments images and does not classify whole images"):
        open_bundle(tmp_path / "run")
    notes: list[str] = []
    encoder = open_bundle(tmp_path / "run", headless=True, note=notes.append)
    reloaded = vitreous.train(
        str(tmp_path / "data"), out=str(tmp_path / "again"), init=str(tmp_path / "run"), steps=1,
        **{name: option for name, option in TRAIN_OPTIONS.items() if name not in ("model", "image_size")},
    )  # fmt: skip
    assert reloaded["steps"] == 1 and reloaded["test"]["miou"] > 0.5  # the head is reused, too
    assert encoder.task == FeatureExtraction() and encoder.model.config == bundle.model.config.backbone and notes


def test_head_is_loaded_only_for_the_same_classes(tmp_path):
    def build_objective(head="unet"):
        model = create_untrained_model("ViT-32x2/8", image_size=32, num_classes=0)
        return SegmentationConfig(head=head, head_width=8).build(model, ObjectiveSetting(classes=("a", "b")))

    first = build_objective()
    Bundle(first.model.eval(), first.task(), ImagePreprocess((32, 32), 3, (0.5,) * 3, (0.5,) * 3)).save(tmp_path / "x")
    objective_state = open_objective_state(tmp_path / "x")
    for head, classes, is_loaded in (
        ("unet", ["a", "b"], True),
        ("unet", ["a", "c"], False),
        ("linear", ["a", "b"], False),
    ):
        second = build_objective(head)
        adoption = load_into_objective(second, to_builtins(second.config) | {"classes": classes}, objective_state)
        assert (adoption.loaded == ["model.head"], adoption.skipped == ["model.head"]) == (is_loaded, not is_loaded)
        loaded_head, theirs = second.model.head.state_dict(), first.model.head.state_dict()
        assert (
            loaded_head.keys() == theirs.keys()
            and all(torch.equal(loaded_head[name], theirs[name]) for name in loaded_head)
        ) == is_loaded
    assert open_objective_state(tmp_path / "x").config["name"] == "segmentation"


@pytest.mark.parametrize("adapter", ["none", "batch"])
def test_resumed_segmentation_run_is_bit_identical(adapter, tmp_path):
    home = write_objects(tmp_path / "data", 8)
    run_options = {**TRAIN_OPTIONS, "steps": 6, "save_every": 2}
    run_options["settings"] = {"objective.adapter": [adapter], **TRAIN_OPTIONS["settings"]}
    vitreous.train(str(home), out=str(tmp_path / "whole"), **run_options)
    stopped = tmp_path / "stopped"

    class StopRun(Exception):
        pass

    class StoppingListener(vitreous.progress.NullListener):
        def progress(self, verb, done, total, text):
            if done >= 16:
                raise StopRun

    with pytest.raises(StopRun):
        vitreous.train(str(home), out=str(stopped), listener=StoppingListener(), **run_options, log_every=1)
    assert not (stopped / "model").exists()
    vitreous.train(str(home), out=str(stopped), resume=True)
    first, second = (load_bundle(tmp_path / name / "model").model.state_dict() for name in ("whole", "stopped"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    statistics = [tensor for name, tensor in first.items() if "running_mean" in name]
    assert len(statistics) == (adapter == "batch") * 10 and all(tensor.abs().sum() > 0 for tensor in statistics)


def test_vit_adapter_is_added_and_left_out_when_weights_initialise_a_vit(tmp_path):
    torch.manual_seed(0)
    config, setting = (
        SegmentationConfig(adapter="group", head="upernet", head_width=1),
        ObjectiveSetting(classes=("a", "b")),
    )
    backbone = create_untrained_model("ViT-32x2/8", 32, num_classes=0)
    model = config.build(backbone, setting).model
    assert model.backbone.backbone is backbone and model.config.backbone.norm == "group"
    assert config.can_split_batch and not SegmentationConfig(adapter="batch").can_split_batch
    images = torch.randn(2, 3, 32, 32)
    model(images).sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    Bundle(model.eval(), Segmentation(("a", "b")), ImagePreprocess((32, 32), 3, (0.5,) * 3, (0.5,) * 3)).save(
        tmp_path / "x"
    )
    assert torch.equal(load_bundle(tmp_path / "x").model(images), model(images))
    start = read_weights_info(tmp_path / "x")
    assert start.config == backbone.config
    plain_vit = create_untrained_model("ViT-32x2/8", 32, num_classes=0)
    load_pretrained_weights(plain_vit, tmp_path / "x")
    assert all(torch.equal(x, y) for x, y in zip(plain_vit.parameters(), backbone.parameters(), strict=True))
    with pytest.raises(UsageError, match="backbone has stages"):
        config.check(config_from_name("Swin-T/4", 224), ("a", "b"), SceneViews())


def test_unsupported_data_and_options_are_rejected(tmp_path):
    with pytest.raises(DataError, match="has no boxes, masks or class maps"):
        vitreous.train("digits", out=str(tmp_path / "run"), **TRAIN_OPTIONS)
    model = config_from_name("ViT-32x2/8", 32)
    with pytest.raises(UsageError, match="scenes"):
        SegmentationConfig().check(model, ("a", "b"), Augment())
    with pytest.raises(UsageError, match="dice"):
        SegmentationConfig(dice=-1.0)
