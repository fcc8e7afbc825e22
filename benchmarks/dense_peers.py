"""Models of other libraries for benchmarks/dense.py, which trains them from scratch with Adam at 1e-3.

- segmentation-models-pytorch's U-Net on a ResNet-34: cross-entropy and Dice loss, crops of 256 pixels, flips, rotations
  by 90 degrees
- torchvision's Faster R-CNN on MobileNetV3: flips, and the resizing of torchvision

Both are evaluated by the evaluators of vitreous.
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

CROP_SIZE = 256  # height and width in pixels of training crops of nuclei


def read_samples(split: AnnotatedSplit) -> list[tuple[np.ndarray, Any]]:
    """Return (pixels (3, H, W) uint8, target) of every image of a split."""
    preprocess = ImagePreprocess((CROP_SIZE, CROP_SIZE))
    rows = []
    for sample in range(len(split)):
        image = preprocess.decode(split.raw(sample), split.name(sample))
        rows.append((to_native_array(image), split.target(sample)))
    return rows


def iterate_batches(kind: str, split: Any, seed: int) -> Iterator[tuple[Any, Any]]:
    """Yield augmented batches forever: 8 crops and class maps for `nuclei`, else 4 images with boxes."""
    rng, rows = np.random.default_rng(seed), read_samples(split)
    while True:
        samples = [rows[number] for number in rng.choice(len(rows), 8 if kind == "nuclei" else 4, replace=False)]
        if kind == "nuclei":
            crops = [crop_augmented(pixels, target.class_map(), rng) for pixels, target in samples]
            images, maps = (np.stack([crop[index] for crop in crops]) for index in (0, 1))
            yield normalise_images(images), torch.from_numpy(maps).long()
        else:
            yield zip_boxes([flip_sample(pixels, target, rng) for pixels, target in samples])


def crop_augmented(pixels: np.ndarray, classes: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Crop an image (3, H, W) and its class map (H, W) to `CROP_SIZE`, scaled by 1/2 to 2, flipped and rotated."""
    factor = 2 ** rng.uniform(-1, 1)
    side = round(CROP_SIZE / factor)
    missing = [max(0, side - length) for length in classes.shape]
    pixels = np.pad(pixels, [(0, 0), (0, missing[0]), (0, missing[1])])
    classes = np.pad(classes, [(0, missing[0]), (0, missing[1])])
    top, left = (int(rng.integers(0, length - side + 1)) for length in classes.shape)
    image = torch.from_numpy(pixels[None, :, top : top + side, left : left + side].copy()).float()
    image = F.interpolate(image, (CROP_SIZE, CROP_SIZE), mode="bilinear", antialias=True)[0].numpy()
    classes = classes[top : top + side, left : left + side]
    rows = (np.arange(CROP_SIZE) + 0.5) * side // CROP_SIZE
    classes = classes[np.ix_(rows.astype(int), rows.astype(int))]
    quarter_turns, flip = int(rng.integers(4)), int(rng.integers(2))
    image, classes = np.rot90(image, quarter_turns, (1, 2)), np.rot90(classes, quarter_turns)
    return (image[:, :, ::-1] if flip else image).copy(), (classes[:, ::-1] if flip else classes).copy()


def flip_sample(pixels: np.ndarray, target: Any, rng: np.random.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return an image in [0, 1] with its boxes and labels (counted from 1), flipped along each axis with probability
    1/2."""
    boxes = torch.from_numpy(target.boxes.copy())
    image = torch.from_numpy(pixels).float() / 255
    for axis, length in ((0, pixels.shape[2]), (1, pixels.shape[1])):
        if rng.integers(2):
            image = image.flip(2 - axis)
            boxes[:, [axis, axis + 2]] = length - boxes[:, [axis + 2, axis]]
    return image, boxes, torch.from_numpy(target.labels) + 1


def zip_boxes(rows: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Convert samples to a batch of torchvision's detectors: a list of images, and a list of targets."""
    return [image for image, *_ in rows], [{"boxes": boxes, "labels": labels} for _, boxes, labels in rows]


def normalise_images(images: np.ndarray) -> Tensor:
    """Normalise images (B, 3, h, w) in 0 .. 255 by the mean and standard deviation of ImageNet."""
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    return (torch.from_numpy(np.ascontiguousarray(images)).float() / 255 - mean[:, None, None]) / std[:, None, None]


EvaluateFunction = Callable[[], tuple[dict[str, Any], list[dict[str, Any]]]]


def build_unet(data: Any) -> tuple[nn.Module, Callable[[Tensor, Tensor], Tensor], EvaluateFunction]:
    """Return a U-Net, its loss function, and a function that evaluates it on the test images, by tiles as vitreous."""
    import segmentation_models_pytorch as smp

    model = smp.Unet("resnet34", encoder_weights=None, classes=2)
    dice = smp.losses.DiceLoss("multiclass")

    @torch.no_grad()
    def evaluate() -> tuple[dict[str, Any], list[dict[str, Any]]]:
        compute = lambda tiles: model(normalise_images(tiles)).numpy()  # noqa: E731
        matrices = [
            compute_pixel_confusion(target.class_map(), predict_class_map(compute, pixels, (CROP_SIZE, CROP_SIZE)), 2)
            for pixels, target in read_samples(data.splits["test"])
        ]
        matrices_array = np.stack(matrices)
        return compute_segmentation_metrics(matrices_array.sum(0)), compute_class_metrics(matrices_array, data.classes)

    return model, lambda images, maps: F.cross_entropy(out := model(images), maps) + dice(out, maps), evaluate


def build_faster_rcnn(data: Any) -> tuple[nn.Module, Callable[..., Tensor], EvaluateFunction]:
    """Return a Faster R-CNN, its loss function, and a function that evaluates it on the test images."""
    from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn

    count = len(data.classes)
    model = fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None, num_classes=count + 1)

    @torch.no_grad()
    def evaluate() -> tuple[dict[str, Any], list[dict[str, Any]]]:
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

    return model, lambda images, targets: sum(model(images, targets).values()), evaluate
