"""Other libraries' models of masks and boxes, as benchmarks/dense.py learns them: from scratch, with Adam at 1e-3.

segmentation-models-pytorch's U-Net on a ResNet-34 (cross-entropy and Dice, parts of 256 pixels, flips and quarter
turns), torchvision's Faster R-CNN on MobileNetV3 (flips, its own resizing). Both are judged by vitreous' evaluators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitreous.data.annotations.target import AnnotatedSplit
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.evaluation.coco import CocoEvaluator
from vitreous.evaluation.evaluator import Ragged, SplitOutputs
from vitreous.evaluation.matching import match_image
from vitreous.evaluation.pixels import compute_class_metrics, compute_pixel_confusion, compute_segmentation_metrics
from vitreous.tasks.detections import Detections
from vitreous.tasks.tiles import predict_class_map, to_native_array

CROP_SIZE = 256  # pixels of the parts of nuclei


def read_samples(split: AnnotatedSplit) -> list[tuple[np.ndarray, Any]]:
    """Every image of a split as (3, H, W) uint8, and what is on it."""
    preprocess = ImagePreprocess((CROP_SIZE, CROP_SIZE))
    rows = []
    for sample in range(len(split)):
        picture = preprocess.decode(split.raw(sample), split.name(sample))
        rows.append((to_native_array(picture), split.target(sample)))
    return rows


def iterate_batches(kind: str, split: Any, seed: int) -> Iterator[tuple[Any, Any]]:
    """Augmented batches without end."""
    chance, rows = np.random.default_rng(seed), read_samples(split)
    while True:
        some = [rows[number] for number in chance.choice(len(rows), 8 if kind == "nuclei" else 4, replace=False)]
        if kind == "nuclei":
            parts = [crop_augmented(pixels, target.class_map(), chance) for pixels, target in some]
            images, maps = (np.stack([part[n] for part in parts]) for n in (0, 1))
            yield normalise_images(images), torch.from_numpy(maps).long()
        else:
            yield zip_boxes([flip_sample(pixels, target, chance) for pixels, target in some])


def crop_augmented(
    pixels: np.ndarray, classes: np.ndarray, chance: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """(3, H, W), (H, W) -> a part of SIDE pixels of each, scaled by 1/2 to 2, flipped and turned."""
    factor = 2 ** chance.uniform(-1, 1)
    side = round(CROP_SIZE / factor)
    lacking = [max(0, side - length) for length in classes.shape]
    pixels = np.pad(pixels, [(0, 0), (0, lacking[0]), (0, lacking[1])])
    classes = np.pad(classes, [(0, lacking[0]), (0, lacking[1])])
    top, left = (int(chance.integers(0, length - side + 1)) for length in classes.shape)
    image = torch.from_numpy(pixels[None, :, top : top + side, left : left + side].copy()).float()
    image = F.interpolate(image, (CROP_SIZE, CROP_SIZE), mode="bilinear", antialias=True)[0].numpy()
    classes = classes[top : top + side, left : left + side]
    rows = (np.arange(CROP_SIZE) + 0.5) * side // CROP_SIZE
    classes = classes[np.ix_(rows.astype(int), rows.astype(int))]
    turns, flip = int(chance.integers(4)), int(chance.integers(2))
    image, classes = np.rot90(image, turns, (1, 2)), np.rot90(classes, turns)
    return (image[:, :, ::-1] if flip else image).copy(), (classes[:, ::-1] if flip else classes).copy()


def flip_sample(pixels: np.ndarray, target: Any, chance: np.random.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """An image in 0 .. 1, its boxes and labels from 1 on, mirrored as often as not along either axis."""
    boxes = torch.from_numpy(target.boxes.copy())
    image = torch.from_numpy(pixels).float() / 255
    for axis, length in ((0, pixels.shape[2]), (1, pixels.shape[1])):
        if chance.integers(2):
            image = image.flip(2 - axis)
            boxes[:, [axis, axis + 2]] = length - boxes[:, [axis + 2, axis]]
    return image, boxes, torch.from_numpy(target.labels) + 1


def zip_boxes(rows: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Images, and targets as torchvision takes them."""
    return [image for image, *_ in rows], [{"boxes": boxes, "labels": labels} for _, boxes, labels in rows]


def normalise_images(images: np.ndarray) -> Tensor:
    """(B, 3, h, w) in 0 .. 255 -> normalised by ImageNet's mean and deviation."""
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    return (torch.from_numpy(np.ascontiguousarray(images)).float() / 255 - mean[:, None, None]) / std[:, None, None]


EvaluateFunction = Callable[[], tuple[dict[str, Any], list[dict[str, Any]]]]


def build_unet(data: Any) -> tuple[nn.Module, Callable[[Tensor, Tensor], Tensor], EvaluateFunction]:
    """A U-Net, its loss, and what judges it on the test images by tiles, as ours are."""
    import segmentation_models_pytorch as smp

    model = smp.Unet("resnet34", encoder_weights=None, classes=2)
    dice = smp.losses.DiceLoss("multiclass")

    @torch.no_grad()
    def judge() -> tuple[dict[str, Any], list[dict[str, Any]]]:
        compute = lambda tiles: model(normalise_images(tiles)).numpy()  # noqa: E731
        matrices = [
            compute_pixel_confusion(target.class_map(), predict_class_map(compute, pixels, (CROP_SIZE, CROP_SIZE)), 2)
            for pixels, target in read_samples(data.splits["test"])
        ]
        every = np.stack(matrices)
        return compute_segmentation_metrics(every.sum(0)), compute_class_metrics(every, data.classes)

    return model, lambda images, maps: F.cross_entropy(out := model(images), maps) + dice(out, maps), judge


def build_faster_rcnn(data: Any) -> tuple[nn.Module, Callable[..., Tensor], EvaluateFunction]:
    """A Faster R-CNN, its loss, and what judges it on the test images."""
    from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn

    count = len(data.classes)
    model = fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None, num_classes=count + 1)

    @torch.no_grad()
    def judge() -> tuple[dict[str, Any], list[dict[str, Any]]]:
        tables = []
        for pixels, target in read_samples(data.splits["test"]):
            out = model([torch.from_numpy(pixels).float() / 255])[0]
            order = out["scores"].argsort(descending=True, stable=True)
            boxes, labels, scores = (out[name][order].numpy() for name in ("boxes", "labels", "scores"))
            tables.append(match_image(Detections(target.size, boxes, labels - 1, scores), target, False))
        rows = Ragged(np.concatenate(tables), np.array([len(table) for table in tables], np.int64))
        readable = np.ones(len(tables), bool)
        report = CocoEvaluator(data.classes).report(SplitOutputs(data.splits["test"], rows, readable))
        return report.metrics, report.per_class

    return model, lambda images, targets: sum(model(images, targets).values()), judge
