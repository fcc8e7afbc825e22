"""Explanations of metrics, and the markup that shows them on pages."""

from __future__ import annotations

import re
from typing import Any

from vitreous.tasks.metrics import BOX_PREFIX, DETECTION_ERRORS, F1, METRICS

#: metric key without `train/`, `val/`, `training_images/` or `box_` -> explanation; those of `METRICS` are added below
EXPLANATIONS = {
    "loss": "The value that training minimises, on training images. Lower is better.",
    "losses": "Training loss is measured with augmentation, label smoothing and dropout where the recipe uses them, "
    "validation loss (NLL) without. Compare their trends, not their values.",
    "dino": "Cross-entropy between the predictions of student and teacher for whole views, in nats.",
    "ibot": "Cross-entropy between the predictions of student and teacher for masked patches, in nats.",
    "koleo": "Entropy regulariser: lower if the features of a batch are farther apart.",
    "teacher_entropy": "Entropy of the teacher's targets, mean over images, from 0 to ln K for K prototypes. At ln K "
    "the targets are uniform and carry no information.",
    "prototype_entropy": "Entropy of the mean target. Near 0, all images share one prototype, which is a collapse; "
    "near ln K, images are spread over all prototypes.",
    "lr": "Step size of the optimizer, after warmup and decay.",
    "tide": "AP50 points that would be gained if all errors of one type were corrected (TIDE, arXiv:2008.08115).",
    "cosine": "Cosine similarity of two feature vectors: 1 is the same direction.",
    "interval": "95 % confidence interval: the range of the metric on other images of the same distribution.",
    "overfitting": "Shown if validation loss rose by at least 5 % above its minimum in both of the last two "
    "evaluations, while training loss fell by at least 5 % since that minimum.",
    "flops": "Floating-point operations of all training steps, forward and backward; a multiply-add counts as two.",
    "flops_utilisation": "Share of the machine's peak matrix-product throughput that training reached.",
    "throughput": "Training images per second of wall time, evaluation excluded.",
    "gradient_norm": "L2 norm of the gradient of all parameters before clipping.",
    "skipped": "Optimizer steps skipped because of a gradient that was not finite.",
    "data_wait": "Share of the time in which training waited for data.",
    "images_per_second": "Training throughput since the previous line.",
    "exaflops": "Floating-point operations of the run so far, in units of 10^18.",
    F1.key: F1.explanation,
    **{key: metric.explanation for key, metric in METRICS.items()},
}


def explain_metric(name: str) -> str:
    """Return the explanation of a metric; an empty string if there is none. `name` may have a prefix such as `val/`."""
    key = re.sub(r"^(train|val|training_images)/", "", name).removeprefix(BOX_PREFIX)
    if key in DETECTION_ERRORS:
        return EXPLANATIONS["tide"]
    return EXPLANATIONS.get(key, "")


class MetricTerms:
    """Markup of the terms of one page: a label that shows its explanation on hover, focus and tap, and to screen
    readers."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, label: str, key: str) -> Any:
        """Return the markup of a label with the explanation of the metric `key`; the label alone if there is none."""
        return self.explain(label, explain_metric(key))

    def explain(self, label: str, text: str) -> Any:
        """Return the markup of a label with the explanation `text`; the label alone if `text` is empty."""
        from markupsafe import Markup, escape

        if not text:
            return escape(label)
        self.count += 1
        button = Markup('<button type="button" aria-describedby="term-{}">{}</button>').format(self.count, label)
        tooltip = Markup('<span role="tooltip" id="term-{}">{}</span>').format(self.count, text)
        return Markup('<span class="term">{}{}</span>').format(button, tooltip)
