"""Tolerances between two computations of the same output, by precision.

Differences are relative, of norms. Products in float32 differ by the order of summation: 1e-6 is usual. bfloat16 keeps
eight binary digits, so every product is rounded by up to 2**-9 (0.002) of its value. Over a network this adds up to
between 1e-3 and 6e-3, measured over all zoo models and options, with hardware bfloat16 (AVX512-BF16) and without.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vitreous.tasks.classification import Prediction

ERROR_LIMITS = {"fp32": 1e-5, "bf16": 1e-2}

#: maximum difference of a probability from float32's. A class probability changes by at most half the change of a logit
#: difference; bfloat16 loses 1 % of logits of about 10, thus 0.05. Measured: 0.043 on 1,797 digits with a half-trained
#: model; 1e-6 in float32.
PROBABILITY_LIMITS = {"fp32": 1e-5, "bf16": 0.05}
#: minimum share of images with the same top-1 class as float32. Measured: 0.9972 of the same images; the two top
#: probabilities of the others were within 0.026.
TOP1_AGREEMENT_LIMITS = {"fp32": 1.0, "bf16": 0.99}


def relative_error(actual, expected) -> float:
    """|actual - expected| / |expected| of two arrays or tensors, computed in float64."""
    actual, expected = (np.asarray(torch.as_tensor(values).double()) for values in (actual, expected))
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


def parse_predictions(documents: Sequence[dict]) -> list[Prediction]:
    """Predictions from the documents of `predict --json` and of HTTP: the `classes` of each image, best first."""
    classes = [document["classes"] for document in documents]
    return [
        Prediction("", tuple(c["class"] for c in image_classes), tuple(c["probability"] for c in image_classes))
        for image_classes in classes
    ]


def are_predictions_close(predictions: Sequence[Prediction], expected: Sequence[Prediction], precision: str) -> bool:
    """Whether predictions of the same images agree: every class probability within the precision's limit, and the top-1
    class of all images in float32, of 99 % in bfloat16."""
    for a, b in zip(predictions, expected, strict=True):
        ours, theirs = (dict(zip(prediction.names, prediction.probabilities, strict=True)) for prediction in (a, b))
        if set(ours) != set(theirs) or any(
            abs(ours[name] - theirs[name]) > PROBABILITY_LIMITS[precision] for name in ours
        ):
            return False
    return sum(a.names[0] == b.names[0] for a, b in zip(predictions, expected, strict=True)) >= TOP1_AGREEMENT_LIMITS[
        precision
    ] * len(expected)
