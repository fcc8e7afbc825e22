"""Objects and answers drawn at random, and COCO's own judgement of them; a split and an engine of painted pictures."""

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


def ellipse_mask(box, size):
    """(H, W) bool, the pixels of the ellipse in a box."""
    y, x = np.mgrid[: size[0], : size[1]] + 0.5
    across, down = (x - (box[0] + box[2]) / 2) / (box[2] - box[0]), (y - (box[1] + box[3]) / 2) / (box[3] - box[1])
    return across**2 + down**2 <= 0.25


def draw_scene(draw, size=(120, 200), classes=4, ties=True):
    """Answers and objects of an image at random: answers near objects and elsewhere, of right and wrong classes, equal
    scores, crowds, and objects of all sizes."""

    def boxes(count):
        sides = np.exp(draw.uniform(np.log(4), np.log(110), (count, 2)))
        low = draw.uniform(0, 1, (count, 2)) * (np.array(size[::-1]) - sides)
        return np.concatenate([low, low + sides], 1)

    truth = [box for box in boxes(draw.integers(0, 9)) if ellipse_mask(box, size).any()]
    labels, crowd = draw.integers(0, classes, len(truth)), draw.random(len(truth)) < 0.2
    rows = [(*boxes(1)[0], draw.integers(classes)) for _ in range(draw.integers(0, 6))]
    for box, label in zip(truth, labels, strict=True):
        for _ in range(draw.integers(0, 5)):
            near = box + draw.normal(0, 1, 4) * draw.choice([0, 1, 4, 10])
            rows.append((*near, label if draw.random() < 0.8 else draw.integers(classes)))
    table = np.array([row for row in rows if row[2] > row[0] + 1 and row[3] > row[1] + 1]).reshape(-1, 5)
    scores = draw.integers(1, 11, len(table)) / 10 if ties else draw.random(len(table))
    table, scores = table[np.argsort(-scores, kind="stable")], -np.sort(-scores)
    masks = tuple(mask_to_rle(ellipse_mask(box, size)) for box in table[:, :4])
    answers = Detections(
        size, table[:, :4].astype(np.float32), table[:, 4].astype(int), scores.astype(np.float32), masks=masks
    )
    layers = stack_masks([ellipse_mask(box, size) for box in truth], size)
    return answers, Target(size, labels, np.array(truth, np.float32).reshape(-1, 4), crowd, layers=layers)


def evaluate_with_pycocotools(scenes, kind, classes=4):
    """The twelve numbers of COCOeval, `kind` is bbox or segm, and its precision (T, 101, K)."""
    from pycocotools import mask as library
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    def packed(runs, size):
        row = library.frPyObjects({"size": list(size), "counts": list(runs)}, *size)
        return {"size": row["size"], "counts": row["counts"].decode()}

    def region(box):
        left, top, right, bottom = map(float, box)
        return {"bbox": [left, top, right - left, bottom - top]}

    images, objects, answers = [], [], []
    for number, (answer, truth) in enumerate(scenes, 1):
        images.append({"id": number, "height": truth.size[0], "width": truth.size[1]})
        for row in range(len(truth)):
            mask, own = truth.mask(row), {"id": len(objects) + 1, "iscrowd": int(truth.crowd[row])}
            own |= {"image_id": number, "category_id": int(truth.labels[row]) + 1, "area": float(mask.sum())}
            objects.append(own | region(truth.boxes[row]) | {"segmentation": packed(mask_to_rle(mask), truth.size)})
        for row in range(len(answer)):
            own = {"image_id": number, "category_id": int(answer.labels[row]) + 1, "score": float(answer.scores[row])}
            masked = {"segmentation": packed(answer.masks[row], truth.size)} if kind == "segm" else {}
            answers.append(own | (masked or region(answer.boxes[row])))
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO()
        names = [{"id": number + 1, "name": str(number)} for number in range(classes)]
        truth.dataset = {"images": images, "annotations": objects, "categories": names}
        truth.createIndex()
        judge = COCOeval(truth, truth.loadRes(answers), kind)
        judge.evaluate()
        judge.accumulate()
        judge.summarize()
    return judge.stats, judge.eval["precision"][:, :, :, 0, 2]


class PaintedSplit:
    """Pictures (H, W) uint8 in memory, and what is on them; a picture of None cannot be read."""

    def __init__(self, pictures, targets):
        self.pictures, self.targets = pictures, targets
        self.labels = np.zeros((len(pictures), 2), np.float32)

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
    """Finds the rectangles that are painted, by `painted_model` of `test_detections`."""

    precision = "fp32"

    def __init__(self, model, image=(32, 48), masks=True):
        self.preprocess, self.model, self.masks = ImagePreprocess(image, 1, (0.25,), (0.5,)), model, masks

    def __call__(self, pixels):
        outputs = self.model(pixels.numpy())
        return pack_outputs(tuple(torch.from_numpy(np.asarray(part)) for part in outputs[: 3 + self.masks]))
