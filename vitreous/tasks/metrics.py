"""The table of all metrics, with their labels, formats and explanations, for the command line, files, pages and help.
Imports nothing heavy, so that `--help` stays fast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

OBJECT_SIZES, FREQUENCIES = ("small", "medium", "large"), ("rare", "common", "frequent")
BOX_PREFIX = "box_"  # prefix of the keys of box metrics; keys without it are mask metrics if the model has masks
#: key of an error type of TIDE (arXiv:2008.08115) -> its name
DETECTION_ERRORS = {
    "localisation": "localisation",
    "class": "classification",
    "both": "both",
    "duplicate": "duplicate",
    "nothing": "background",
    "missed": "missed",
}


@dataclass(frozen=True)
class Metric:
    """A metric: its key in files, its label, the format of its value (`.2%` for shares), and an explanation for pages.

    - `secondary`: keys of the metrics that are printed after it if it is the primary metric; None if it cannot be one.
    - `per_class_metrics`: the columns of tables with one row per class.
    - `ranking_key`: the key of the column by which classes are ranked.
    - `counted_noun`: the noun of the counted items, such as images or pixels.
    - `class_mean`: the key of the per-class metric whose mean over the classes with images is this metric (single-label
      data).
    """

    key: str
    label: str
    format_spec: str = ".2%"
    explanation: str = ""
    secondary: tuple[str, ...] | None = None
    per_class_metrics: tuple[Metric, ...] = ()
    ranking_key: str = "f1"
    counted_noun: str = "images"
    class_mean: str = ""

    @property
    def is_primary(self) -> bool:
        """Whether the metric can be the primary metric, by which evaluations are compared."""
        return self.secondary is not None

    @property
    def ranking_metric(self) -> tuple[str, str]:
        """Key and label of the column by which classes are ranked; the label is empty for a metric without per-class
        columns."""
        return self.ranking_key, next(
            (column.label for column in self.per_class_metrics if column.key == self.ranking_key), ""
        )

    def class_columns(self, rows: Sequence[Mapping[str, Any]]) -> list[Metric]:
        """List the columns of a per-class table that are present in its rows. Some require masks or rare classes."""
        return [column for column in self.per_class_metrics if any(column.key in row for row in rows)]

    @property
    def is_share(self) -> bool:
        """Whether the value is a share, which is shown in per cent."""
        return self.format_spec.endswith("%")

    @property
    def short_form(self) -> str:
        """The format with one decimal for shares, for progress lines and intervals; the full format for other
        metrics."""
        return self.format_spec.replace(".2", ".1") if self.is_share else self.format_spec


#: per-class metrics
RECALL = Metric("recall", "recall", explanation="Share of the class's samples that the model finds.")
PRECISION = Metric("precision", "precision", explanation="Share of the class's predictions that are correct.")
F1 = Metric("f1", "F1", explanation="Harmonic mean of precision and recall.")
DICE = "2 × intersection / (predicted + true pixels), which equals F1 of pixels. Higher is better."
COCO_AP = "Average precision, mean over classes and IoU thresholds from 0.50 to 0.95. Higher is better."
COCO_AP50 = "Average precision at an IoU threshold of 0.5, for which rough localisation is enough."

CLASSIFICATION_METRICS = (
    Metric(
        "top1",
        "top-1",
        explanation="Share of images whose label is the most probable class. Higher is better.",
        secondary=("top5", "nll", "ece"),
        per_class_metrics=(RECALL, PRECISION, F1),
    ),
    Metric(
        "map",
        "mAP",
        explanation="Mean over classes of average precision, the area under the precision-recall curve. Higher is "
        "better.",
        secondary=("macro_f1", "micro_f1", "nll"),
        per_class_metrics=(
            Metric("ap", "AP", explanation="Average precision: area under the precision-recall curve."),
            RECALL,
            PRECISION,
            F1,
        ),
        ranking_key="ap",
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
        class_mean="f1",
    ),
    Metric(
        "balanced_accuracy",
        "balanced accuracy",
        explanation="Recall averaged over classes: top-1 as if all classes had equally many images. Higher is better.",
        class_mean="recall",
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
FEATURE_METRICS = (
    Metric(
        "feature_std",
        "feature std",
        ".4g",
        "Standard deviation over images of unit-length features. 0 means collapse: all images have the same features.",
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
RETRIEVAL_METRICS = (
    Metric(
        "retrieval_r1",
        "R@1",
        explanation="Mean of R@1 of texts by images and of images by texts. Higher is better.",
        secondary=tuple(
            f"{direction}_r{depth}" for direction in ("image_to_text", "text_to_image") for depth in (1, 5, 10)
        ),
    ),
    Metric(
        "image_to_text_r1",
        "R@1 image to text",
        explanation="Share of images whose most similar text is a caption of the image. Equal captions are one text.",
    ),
    Metric(
        "image_to_text_r5",
        "R@5 image to text",
        explanation="Share of images of which a caption is among the five most similar texts.",
    ),
    Metric(
        "image_to_text_r10",
        "R@10 image to text",
        explanation="Share of images of which a caption is among the ten most similar texts.",
    ),
    Metric(
        "text_to_image_r1",
        "R@1 text to image",
        explanation="Share of texts whose most similar image has this caption. Equal captions are one text.",
    ),
    Metric(
        "text_to_image_r5",
        "R@5 text to image",
        explanation="Share of texts for which an image with this caption is among the five most similar images.",
    ),
    Metric(
        "text_to_image_r10",
        "R@10 text to image",
        explanation="Share of texts for which an image with this caption is among the ten most similar images.",
    ),
)
SEGMENTATION_METRICS = (
    Metric(
        "miou",
        "mIoU",
        explanation="Intersection over union of predicted and true pixels of a class, mean over classes. Higher is "
        "better.",
        secondary=("dice", "pixel_accuracy", "boundary_f", "pq"),
        per_class_metrics=(
            Metric(
                "iou",
                "IoU",
                explanation="Intersection over union: pixels that both prediction and ground truth assign to the "
                "class, divided by the pixels that either assigns to it.",
            ),
            RECALL,
            PRECISION,
            Metric("f1", "Dice", explanation=DICE),
            Metric(
                "image_dice",
                "Dice per image",
                explanation="Dice of each image that has the class, averaged over these images.",
            ),
        ),
        ranking_key="iou",
        counted_noun="pixels",
    ),
    Metric("dice", "Dice", explanation=DICE),
    Metric(
        "pixel_accuracy",
        "pixel accuracy",
        explanation="Share of pixels with the correct class. Frequent classes dominate it.",
    ),
    Metric(
        "boundary_f",
        "boundary F",
        explanation="F1 of predicted and true boundaries within a small tolerance in pixels.",
    ),
    Metric("pq", "PQ", explanation="Panoptic quality: segmentation quality × recognition quality. Higher is better."),
    Metric("sq", "SQ", explanation="Segmentation quality: mean IoU of matched segments."),
    Metric("rq", "RQ", explanation="Recognition quality: F1 of segments matched at an IoU above 0.5."),
    Metric("pq_things", "PQ of things", explanation="Panoptic quality of countable objects."),
    Metric("pq_stuff", "PQ of stuff", explanation="Panoptic quality of background classes, which are not countable."),
)
#: COCO's twelve metrics, and those of LVIS: of masks, or of boxes for models without masks
REGIONS = (
    Metric(
        "ap",
        "AP",
        explanation=COCO_AP,
        secondary=("ap50", "ap75", "ar100", "box_ap", "box_ap50"),
        per_class_metrics=(
            Metric("ap", "AP", explanation=COCO_AP),
            Metric("ap50", "AP50", explanation=COCO_AP50),
            Metric("box_ap", "box AP", explanation=COCO_AP),
            RECALL,
            PRECISION,
            F1,
        ),
        ranking_key="ap",
    ),
    Metric("ap50", "AP50", explanation=COCO_AP50),
    Metric("ap75", "AP75", explanation="Average precision at an IoU threshold of 0.75, which requires a tight fit."),
    *(Metric(f"ap_{size}", f"AP {size}", explanation=f"Average precision of {size} objects.") for size in OBJECT_SIZES),
    *(
        Metric(f"ap_{frequency}", f"AP {frequency}", explanation=f"Average precision of {frequency} classes.")
        for frequency in FREQUENCIES
    ),
    *(
        Metric(
            f"ar{count}",
            f"AR{count}",
            explanation=f"Recall with at most {count} detections per image, mean over classes and IoU thresholds 0.50 "
            "to 0.95.",
        )
        for count in (1, 10, 100)
    ),
    *(Metric(f"ar_{size}", f"AR {size}", explanation=f"Recall of {size} objects.") for size in OBJECT_SIZES),
)
DETECTION_METRICS = (
    *REGIONS,
    *(
        replace(metric, key=BOX_PREFIX + metric.key, label=f"box {metric.label}", secondary=None, per_class_metrics=())
        for metric in REGIONS
    ),
)
GENERATION_METRICS = (
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
REGRESSION_METRICS = (
    Metric(
        "r2",
        "R²",
        ".3f",
        "Coefficient of determination: 1 minus the squared errors divided by the variance of the labels. 1 is perfect; "
        "0 is no better than always predicting their mean. With several targets, their mean. Higher is better.",
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
#: all metrics by key; if several could be the primary metric, the first one is
METRICS: dict[str, Metric] = {
    metric.key: metric
    for metric in (
        *CLASSIFICATION_METRICS,
        *FEATURE_METRICS,
        *RETRIEVAL_METRICS,
        *SEGMENTATION_METRICS,
        *DETECTION_METRICS,
        *GENERATION_METRICS,
        *REGRESSION_METRICS,
    )
}


def get_metric_label(key: str) -> str:
    """Return the label of a metric, or `key` if the table does not contain it."""
    return METRICS[key].label if key in METRICS else key
