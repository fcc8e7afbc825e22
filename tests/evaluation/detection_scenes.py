"""Random objects and detections, their evaluation by COCO's code, and a split and an engine of synthetic images."""

from __future__ import annotations

import contextlib
import io

import numpy as np
import torch

from vitreous.data.annotations.shapes import mask_to_rle
from vitreous.data.annotations.target import Target, stack_masks
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.errors import DataError
from vitreous.inference.outputs import pack_outputs
from vitreous.tasks.detections import Detections

COCO_METRIC_NAMES = [
    "ap",
    "ap50",
    "ap75",
    "ap_small",
    "ap_medium",
    "ap_large",
    "ar1",
    "ar10",
    "ar100",
    "ar_small",
    "ar_medium",
    "ar_large",
]


def draw_ellipse_mask(box, size):
    """(H, W) bool: the pixels of the ellipse in a box."""
    y, x = np.mgrid[: size[0], : size[1]] + 0.5
    across, down = (x - (box[0] + box[2]) / 2) / (box[2] - box[0]), (y - (box[1] + box[3]) / 2) / (box[3] - box[1])
    return across**2 + down**2 <= 0.25


def draw_scene(draw, size=(120, 200), classes=4, ties=True):
    """Random detections and objects of an image.

    Detections are near objects and elsewhere, of right and wrong classes, with equal scores; there are crowds, and
    objects of all sizes.
    """

    def boxes(count):
        sides = np.exp(draw.uniform(np.log(4), np.log(110), (count, 2)))
        low = draw.uniform(0, 1, (count, 2)) * (np.array(size[::-1]) - sides)
        return np.concatenate([low, low + sides], 1)

    truth = [box for box in boxes(draw.integers(0, 9)) if draw_ellipse_mask(box, size).any()]
    labels, crowd = draw.integers(0, classes, len(truth)), draw.random(len(truth)) < 0.2
    rows = [(*boxes(1)[0], draw.integers(classes)) for _ in range(draw.integers(0, 6))]
    for box, label in zip(truth, labels, strict=True):
        for _ in range(draw.integers(0, 5)):
            near = box + draw.normal(0, 1, 4) * draw.choice([0, 1, 4, 10])
            rows.append((*near, label if draw.random() < 0.8 else draw.integers(classes)))
    table = np.array([row for row in rows if row[2] > row[0] + 1 and row[3] > row[1] + 1]).reshape(-1, 5)
    scores = draw.integers(1, 11, len(table)) / 10 if ties else draw.random(len(table))
    table, scores = table[np.argsort(-scores, kind="stable")], -np.sort(-scores)
    masks = tuple(mask_to_rle(draw_ellipse_mask(box, size)) for box in table[:, :4])
    detections = Detections(
        size, table[:, :4].astype(np.float32), table[:, 4].astype(int), scores.astype(np.float32), masks=masks
    )
    layers = stack_masks([draw_ellipse_mask(box, size) for box in truth], size)
    return detections, Target(size, labels, np.array(truth, np.float32).reshape(-1, 4), crowd, layers=layers)


def evaluate_with_pycocotools(scenes, kind, classes=4):
    """The twelve metrics of COCOeval, for `kind` bbox or segm, and its precision (T, 101, K)."""
    from pycocotools import mask as library
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    def encode_segmentation(runs, size):
        row = library.frPyObjects({"size": list(size), "counts": list(runs)}, *size)
        return {"size": row["size"], "counts": row["counts"].decode()}

    def encode_box(box):
        left, top, right, bottom = map(float, box)
        return {"bbox": [left, top, right - left, bottom - top]}

    images, objects, results = [], [], []
    for image_id, (image_detections, truth) in enumerate(scenes, 1):
        images.append({"id": image_id, "height": truth.size[0], "width": truth.size[1]})
        for row in range(len(truth)):
            mask, entry = truth.mask(row), {"id": len(objects) + 1, "iscrowd": int(truth.crowd[row])}
            entry |= {"image_id": image_id, "category_id": int(truth.labels[row]) + 1, "area": float(mask.sum())}
            objects.append(
                entry
                | encode_box(truth.boxes[row])
                | {"segmentation": encode_segmentation(mask_to_rle(mask), truth.size)}
            )
        for row in range(len(image_detections)):
            entry = {
                "image_id": image_id,
                "category_id": int(image_detections.labels[row]) + 1,
                "score": float(image_detections.scores[row]),
            }
            masked = (
                {"segmentation": encode_segmentation(image_detections.masks[row], truth.size)} if kind == "segm" else {}
            )
            results.append(entry | (masked or encode_box(image_detections.boxes[row])))
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO()
        names = [{"id": image_id + 1, "name": str(image_id)} for image_id in range(classes)]
        truth.dataset = {"images": images, "annotations": objects, "categories": names}
        truth.createIndex()
        coco_eval = COCOeval(truth, truth.loadRes(results), kind)
        coco_eval.evaluate()
        coco_eval.accumulate()
        coco_eval.summarize()
    return coco_eval.stats, coco_eval.eval["precision"][:, :, :, 0, 2]


class PaintedSplit:
    """Images (H, W) uint8 in memory, and their objects; an image that is None is unreadable."""

    def __init__(self, images, targets):
        self.pictures, self.targets = images, targets
        self.labels = np.zeros((len(images), 2), np.float32)

    def __len__(self):
        return len(self.pictures)

    def raw(self, sample):
        if self.pictures[sample] is None:
            raise DataError(f"{self.name(sample)} is gone")
        return self.pictures[sample]

    def name(self, sample):
        return f"{sample}.png"

    def take(self, indices, labels=None):
        return type(self)([self.pictures[row] for row in indices], [self.targets[row] for row in indices])

    def update(self, digest):
        pass

    def target(self, sample):
        return self.targets[sample]


class PaintedEngine:
    """Detects painted rectangles, by `detect_painted_rectangles` of `test_detections`."""

    precision = "fp32"

    def __init__(self, model, image=(32, 48), masks=True):
        self.preprocess, self.model, self.masks = ImagePreprocess(image, 1, (0.25,), (0.5,)), model, masks

    def __call__(self, pixels):
        outputs = self.model(pixels.numpy())
        return pack_outputs(tuple(torch.from_numpy(np.asarray(output)) for output in outputs[: 3 + self.masks]))
