"""The card of a trained model: its description without weights, with task, preprocessing and version, also as text and
HTML for notebooks. Does not import torch."""

from __future__ import annotations

import json
from dataclasses import KW_ONLY, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitreous.config import Json, from_builtins, to_builtins
from vitreous.data.modalities.table import AnyPreprocess
from vitreous.errors import UsageError, WeightsError
from vitreous.nn.sizes import format_size
from vitreous.system.notebook import format_html_table
from vitreous.tasks.base import Task
from vitreous.tasks.features import FeatureExtraction
from vitreous.tasks.table import TaskMixin, list_task_keys, task_from_json, task_to_card

if TYPE_CHECKING:
    from vitreous.weights.bundle import Bundle

MAX_NAMED_CLASSES = 12  # classes listed by name


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


def format_card_text(card: Card, origin: str, precision: str) -> str:
    """Format the card of a model as text: name, origin, task, classes, input and preprocessing."""
    preprocess, names = card.preprocess, card.task.classes
    more_text = f" and {len(names) - MAX_NAMED_CLASSES:,} more" if len(names) > MAX_NAMED_CLASSES else ""
    lines = [
        f"Predictor({card.name}" + (f" of {origin})" if origin else ")"),
        f"task: {card.task.name}, in {precision}",
        f"classes: {len(names):,} ({', '.join(names[:MAX_NAMED_CLASSES])}{more_text})" if names else "classes: none",
        f"input: {format_size(preprocess.image)} pixels, {preprocess.channels} channels",
        f"preprocessing: {preprocess.summary}, mean {preprocess.mean}, std {preprocess.std}",
    ]
    return "\n  ".join(lines)


def format_card_html(card: Card, origin: str, parameters: int | None, precision: str) -> str:
    """Format the card of a model as an HTML table: task, input, classes, precision, parameters, origin, and the metrics
    of its run."""
    preprocess, names = card.preprocess, card.task.classes
    more_text = f" and {len(names) - MAX_NAMED_CLASSES} more" if len(names) > MAX_NAMED_CLASSES else ""
    fields: list[tuple[str, Any]] = [
        ("task", card.task.name),
        (
            "input",
            (
                f"{format_size(preprocess.image)} pixels, {preprocess.channels} channels, "
                f"{preprocess.summary}, {preprocess.noun}"
            ),
        ),
        ("classes", f"{len(names)}: {', '.join(names[:MAX_NAMED_CLASSES])}{more_text}" if names else "none"),
        ("computed in", precision),
    ]
    fields += [("parameters", f"{parameters:,}")] if parameters is not None else []
    fields += [(name, value) for name, value in card.provenance.items() if isinstance(value, str | int | float)]
    fields += [(f"{split} {name}", f"{value:.4g}") for split, name, value in read_summary_metrics(origin)]
    return format_html_table(fields, title=f"{card.name} ({card.version})")


def read_summary_metrics(origin: str) -> list[tuple[str, str, float]]:
    """Read the validation and test metrics in the summary.json of a run folder: (split, name, value); [] for other
    paths."""
    try:
        summary: dict[str, Json] = json.loads((Path(origin) / "summary.json").read_text("utf-8"))
    except (OSError, ValueError):
        return []
    split_metrics = ((split, summary.get(split)) for split in ("val", "test"))
    return [
        (split, name, float(value))
        for split, metrics in split_metrics
        if isinstance(metrics, dict)
        for name, value in metrics.items()
        if isinstance(value, int | float)
    ]
