"""The card of a trained model: its description without weights, with task, preprocessing and version. Does not import
torch."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from vitreous.config import from_builtins, to_builtins
from vitreous.data.modalities.table import AnyPreprocess
from vitreous.errors import UsageError, WeightsError
from vitreous.tasks.base import Task
from vitreous.tasks.features import FeatureExtraction
from vitreous.tasks.table import TaskMixin, list_task_keys, task_from_json, task_to_card

if TYPE_CHECKING:
    from vitreous.weights.bundle import Bundle


@dataclass(frozen=True)
class CardFields:
    """The fields of a card except its task. `name`: the model's name, such as `ViT-S/16`. `version` identifies the
    weights and settings: the first 12 hexadecimal digits of a SHA-256. `provenance`: how the model was trained."""

    name: str
    version: str
    preprocess: AnyPreprocess
    provenance: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Card(CardFields, TaskMixin):
    """The card of a model: name, version, preprocessing, provenance and task."""

    _: KW_ONLY
    task: Task = field(default_factory=FeatureExtraction)

    def to_dict(self) -> dict[str, Any]:
        """Return the card as JSON values. The key `task` is omitted for classification, as in earlier formats."""
        document = {
            card_field.name: to_builtins(getattr(self, card_field.name))
            for card_field in fields(self)
            if card_field.name != "task"
        }
        return document | task_to_card(self.task)


def parse_card(card_json: Any, origin: str) -> Card:
    """Parse the JSON values of `Card.to_dict`. Raises WeightsError, which names `origin`, for an invalid card."""
    try:
        task = task_from_json(card_json, origin)
        card_fields = {key: value for key, value in card_json.items() if key not in list_task_keys(task)}
        return Card(**vars(from_builtins(CardFields, card_fields)), task=task)
    except (UsageError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise WeightsError(f"{origin}: {error}", "export the model again") from None


def build_card(bundle: Bundle) -> Card:
    """Build the card of a bundle. Its version is a hash of the weights and of all settings that predictions depend
    on."""
    import hashlib
    import json

    names, *settings = bundle.task.get_version_fields()
    version_values = (names, to_builtins(bundle.preprocess), *settings)
    digest = hashlib.sha256(json.dumps([*version_values, to_builtins(bundle.model.config)]).encode())
    for name, tensor in sorted(bundle.model.state_dict().items()):
        digest.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
    name = bundle.model.config.name()
    return Card(name, digest.hexdigest()[:12], bundle.preprocess, bundle.provenance, task=bundle.task)
