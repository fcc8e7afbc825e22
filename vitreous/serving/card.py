"""What a trained model is, apart from its weights: what it takes and what it answers. Read without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vitreous.config import from_plain, to_plain
from vitreous.data.preprocess import Preprocess
from vitreous.errors import UsageError, WeightsError

if TYPE_CHECKING:
    from vitreous.weights.bundle import Bundle

LOSSES = ("softmax", "sigmoid", "binary")


@dataclass(frozen=True)
class Card:
    """Class names in the order of the logits, preprocessing, and how logits become probabilities, as a bundle has them.

    `name` is the model's, `ViT-S/16`; `version` tells two trainings of it apart: the first 12 hexadecimal digits of a
    SHA-256.
    """

    name: str
    version: str
    classes: tuple[str, ...]
    preprocess: Preprocess
    loss: str = "softmax"
    several: bool = False
    temperature: float = 1.0
    provenance: dict[str, Any] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """The card as JSON has it."""
        return to_plain(self)


def read_card(plain: Any, origin: str) -> Card:
    """The card that `Card.plain` wrote. Raises WeightsError, naming `origin`, for anything else."""
    try:
        card = from_plain(Card, plain)
    except (UsageError, KeyError, ValueError, TypeError) as error:
        raise WeightsError(f"{origin}: {error}", "export the model again") from None
    if card.loss not in LOSSES or not 0 < card.temperature < math.inf:
        raise WeightsError(
            f"{origin}: loss {card.loss}, temperature {card.temperature}", f"there are {', '.join(LOSSES)}; above 0"
        )
    return card


def card_of(bundle: Bundle) -> Card:
    """The card of a bundle; its version is of its weights and of everything beside them that an answer depends on."""
    import hashlib
    import json

    from vitreous.models.names import name_of

    told = [
        bundle.classes,
        to_plain(bundle.preprocess),
        bundle.loss,
        bundle.several,
        bundle.temperature,
        to_plain(bundle.model.config),
    ]
    digest = hashlib.sha256(json.dumps(told).encode())
    for name, tensor in sorted(bundle.model.state_dict().items()):
        digest.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
    return Card(
        name=name_of(bundle.model.config),
        version=digest.hexdigest()[:12],
        classes=bundle.classes,
        preprocess=bundle.preprocess,
        loss=bundle.loss,
        several=bundle.several,
        temperature=bundle.temperature,
        provenance=bundle.provenance,
    )
