"""The one table of metrics: a row for each, which the command line, files, pages and help read. Imports nothing heavy,
for `--help`."""

from __future__ import annotations

from dataclasses import dataclass

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


RETRIEVAL = (("recall", "recall"), ("precision", "precision"))  # keys and labels of two metrics of a class


@dataclass(frozen=True)
class Metric:
    """A metric: its key in files, its label for people, the format of its value (`.2%` for shares), one or two
    sentences that pages show.

    Of a metric that leads evaluations also the `secondary` ones, printed after it; `of_class`, keys and labels of the
    metrics of a class, and `ranks`, the key of the one by which classes are ranked; and what is `counted`."""

    key: str
    label: str
    form: str = ".2%"
    explanation: str = ""
    secondary: tuple[str, ...] | None = None
    of_class: tuple[tuple[str, str], ...] = (*RETRIEVAL, ("f1", "F1"))
    ranks: str = "f1"
    counted: str = "images"

    @property
    def leads(self) -> bool:
        """Whether evaluations are compared by it."""
        return self.secondary is not None

    @property
    def class_rank(self) -> tuple[str, str]:
        """Key and label of the metric by which classes are ranked."""
        return self.ranks, dict(self.of_class)[self.ranks]

    @property
    def is_share(self) -> bool:
        """Whether it is shown in per cent."""
        return self.form.endswith("%")

    @property
    def short_form(self) -> str:
        """The format with a decimal less, for lines of progress and for intervals: shares have one decimal."""
        return self.form.replace(".2", ".1") if self.is_share else self.form


CLASSIFICATION = (
    Metric(
        "top1",
        "top-1",
        explanation="Share of images whose label is the most probable class. Higher is better.",
        secondary=("top5", "nll", "ece"),
    ),
    Metric(
        "map",
        "mAP",
        explanation="Mean over classes of average precision, the area under the precision-recall curve. Higher is "
        "better.",
        secondary=("macro_f1", "micro_f1", "nll"),
        of_class=(("ap", "AP"), *RETRIEVAL, ("f1", "F1")),
        ranks="ap",
    ),
    Metric(
        "top5",
        "top-5",
        explanation="Share of images whose label is among the five most probable classes. Higher is better.",
    ),
    Metric(
        "macro_f1",
        "macro F1",
        explanation="F1 of each class, averaged over classes, so that rare classes count as much as frequent ones.",
    ),
    Metric(
        "micro_f1", "micro F1", explanation="F1 over all pairs of image and label, so that frequent labels count more."
    ),
    Metric(
        "nll",
        "NLL",
        ".3f",
        "Negative log-likelihood: minus the logarithm of the label's probability, mean over "
        "images, in nats. Lower is better.",
    ),
    Metric(
        "ece",
        "ECE",
        ".3f",
        "Expected calibration error: mean gap between confidence and accuracy over bins of "
        "confidence. 0 is perfectly calibrated.",
    ),
)
FEATURES = (
    Metric(
        "feature_deviation",
        "feature std",
        ".4g",
        "Standard deviation over images of features of length one: 0 is a collapse, where all images have the same "
        "features.",
    ),
    Metric(
        "knn_top1",
        "k-NN top-1",
        explanation="Top-1 of a k-nearest-neighbour classifier on the features. Labels are used for this metric only, "
        "never for training.",
        secondary=("rankme",),
    ),
    Metric(
        "knn_map",
        "k-NN mAP",
        explanation="mAP of a k-nearest-neighbour classifier on the features. Labels are used for this metric only, "
        "never for training.",
        secondary=("rankme",),
    ),
    Metric(
        "rankme",
        "RankMe",
        ".1f",
        "Effective rank of the features (arXiv:2210.02885): 1 is a complete collapse; the maximum is the feature "
        "width, or the number of images if that is smaller.",
        secondary=(),
    ),
)
SEGMENTATION = (
    Metric(
        "miou",
        "mIoU",
        explanation="Intersection over union of predicted and true pixels of a class, mean over classes. Higher is "
        "better.",
        secondary=("dice", "pixel_accuracy", "boundary_f", "pq"),
        of_class=(("iou", "IoU"), *RETRIEVAL, ("f1", "Dice"), ("image_dice", "Dice of an image")),
        ranks="iou",
        counted="pixels",
    ),
    Metric(
        "dice",
        "Dice",
        explanation="2 × intersection / (predicted + true pixels), which equals F1 of pixels. Higher is better.",
    ),
    Metric(
        "pixel_accuracy",
        "pixel accuracy",
        explanation="Share of pixels with the right class. Frequent classes dominate it.",
    ),
    *(Metric(key, label) for key, label in MAPS.items()),
)
DETECTION = (
    Metric(
        "ap",
        "AP",
        secondary=("ap50", "ap75", "ar100", "box_ap", "box_ap50"),
        of_class=(("ap", "AP"), ("ap50", "AP50"), *RETRIEVAL, ("f1", "F1")),
        ranks="ap",
    ),
    *(Metric(key, label) for key, label in OBJECTS.items() if key != "ap"),
)
GENERATION = (
    Metric(
        "denoising_error",
        "denoising error",
        ".4f",
        "Mean squared error of the predicted noise or velocity at fixed noise levels. Lower is better.",
        secondary=(),
    ),
    Metric(
        "frechet_distance",
        "Fréchet distance",
        ".4g",
        "Distance between the feature distributions of generated and real images. Lower is better.",
        secondary=(),
    ),
)
REGRESSION = (
    Metric(
        "r2",
        "R²",
        ".3f",
        "Coefficient of determination: 1 minus the squared errors divided by the variance of the labels. 1 is perfect; "
        "0 is no better than always predicting their mean. Of several targets the mean. Higher is better.",
        secondary=("mae", "rmse", "spearman"),
    ),
    Metric("mae", "MAE", ".4g", "Mean absolute error, in the unit of the target. Lower is better."),
    Metric(
        "rmse",
        "RMSE",
        ".4g",
        "Root mean squared error, in the unit of the target. Large errors count more than in MAE. Lower is better.",
    ),
    Metric(
        "spearman",
        "Spearman",
        ".3f",
        "Rank correlation of predictions and labels: 1 if both order the images in the same way. Higher is better.",
    ),
)
#: every metric by its key; of leading ones, those of an earlier row are looked for first
METRICS: dict[str, Metric] = {
    metric.key: metric for metric in (*CLASSIFICATION, *FEATURES, *SEGMENTATION, *DETECTION, *GENERATION, *REGRESSION)
}


def label_metric(key: str) -> str:
    """The label of a metric; of one without a row, its key."""
    return METRICS[key].label if key in METRICS else key
