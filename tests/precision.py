"""How near two computations of one answer are, by the precision that they multiply in.

Differences are relative, of norms. Products in float32 differ by the order of their sums: 1e-6 is usual. bfloat16 keeps
eight binary digits, so every product is rounded by up to 2**-9 (0.002) of itself; over a network it comes to 1e-3 to
6e-3, measured over every model of the zoo and every option, with hardware for it (AVX512-BF16) and without.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vitreous.tasks.classification import Prediction

ERROR_LIMITS = {"fp32": 1e-5, "bf16": 1e-2}

#: how far a probability may be from float32's by another way. That of a class moves by at most half of what the
#: difference of two logits does: at logits of about 10, of which bfloat16 loses a hundredth, by 0.05. 0.043 was
#: measured, of 1,797 images of digits by a model that was half trained; 1e-6 in float32.
PROBABILITY_LIMITS = {"fp32": 1e-5, "bf16": 0.05}
#: share of pictures whose most probable class is float32's: 0.9972 was measured of those images, where the two first
#: were within 0.026
TOP1_AGREEMENT_LIMITS = {"fp32": 1.0, "bf16": 0.99}


def relative_error(answer, expected) -> float:
    """|answer - expected| / |expected| of two arrays or tensors, computed in float64."""
    answer, expected = (np.asarray(torch.as_tensor(values).double()) for values in (answer, expected))
    return float(np.linalg.norm(answer - expected) / np.linalg.norm(expected))


def parse_predictions(rows: Sequence[dict]) -> list[Prediction]:
    """Predictions from the documents of `predict --json` and of HTTP: of each picture its `classes`, best first."""
    classes = [row["classes"] for row in rows]
    return [Prediction("", tuple(c["class"] for c in one), tuple(c["probability"] for c in one)) for one in classes]


def are_predictions_close(found: Sequence[Prediction], expected: Sequence[Prediction], precision: str) -> bool:
    """Whether predictions of the same pictures agree: every class's probability within the precision's limit, and the
    first class of all pictures in float32, of 99 in 100 in bfloat16."""
    for a, b in zip(found, expected, strict=True):
        ours, theirs = (dict(zip(answer.names, answer.probabilities, strict=True)) for answer in (a, b))
        if set(ours) != set(theirs) or any(
            abs(ours[name] - theirs[name]) > PROBABILITY_LIMITS[precision] for name in ours
        ):
            return False
    return sum(a.names[0] == b.names[0] for a, b in zip(found, expected, strict=True)) >= TOP1_AGREEMENT_LIMITS[
        precision
    ] * len(expected)
