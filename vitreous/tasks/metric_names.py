"""Names for people of the metrics of detection and segmentation. Imports nothing, for `--help`."""

from __future__ import annotations

SIZES = ("small", "medium", "large")

#: COCO's twelve figures by their key
COCO = (
    {"ap": "AP", "ap50": "AP50", "ap75": "AP75"}
    | {f"ap_{size}": f"AP {size}" for size in (*SIZES, "rare", "common", "frequent")}
    | {f"ar{count}": f"AR{count}" for count in (1, 10, 100)}
    | {f"ar_{size}": f"AR {size}" for size in SIZES}
)
#: figures of class maps beside mIoU, Dice and the accuracy of pixels
MAPS = {
    "boundary_f": "boundary F",
    "pq": "PQ",
    "sq": "SQ",
    "rq": "RQ",
    "pq_things": "PQ of things",
    "pq_stuff": "PQ of the rest",
}
BOXES = "box_"  # what keys of boxes begin with where masks lead
#: keys of figures of objects -> their names
OBJECTS = COCO | {BOXES + key: f"box {name}" for key, name in COCO.items()}
#: kinds of errors by their key, as they stand in sentences
ERRORS = {
    "localisation": "wrong place",
    "class": "wrong class",
    "both": "wrong class and place",
    "duplicate": "duplicate",
    "nothing": "nothing there",
    "missed": "missed",
}
