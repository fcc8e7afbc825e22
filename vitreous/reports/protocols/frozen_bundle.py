"""Store an encoder with a linear head that was trained on its cached features, as a bundle."""

from __future__ import annotations

import os
from pathlib import Path
from typing import cast

from torch import Tensor, nn

from vitreous.errors import UsageError
from vitreous.inference.engine import remove_head
from vitreous.models.zoo import Model
from vitreous.reports.protocols.task import ProtocolTask
from vitreous.tasks.classification import Classification
from vitreous.tasks.report import Report
from vitreous.weights.bundle import Bundle


def check_bundle_path(out: str | os.PathLike[str], bundle: Bundle, heads: list[str]) -> None:
    """Raise UsageError if the bundle with the linear head cannot be written to the folder `out`, or if the model cannot
    be stored."""
    folder, model = Path(out), bundle.model
    if "linear" not in heads:
        raise UsageError("--out needs the linear head", "add linear to --heads")
    if folder.exists() or folder.is_symlink():
        raise UsageError(f"{folder} already exists", "use another folder")
    model.to_storable()
    attach_linear_head(model, bundle.model.first_parameter().new_zeros(2, model.num_features), None)


def attach_linear_head(model: Model, weight: Tensor, bias: Tensor | None) -> Model:
    """Return a copy of a model, which shares the encoder's weights, with a linear head of `weight` (K, F) and `bias`
    (K,), by default 0.

    Raises UsageError for a model whose head is not a linear layer of its pooled features.
    """
    headed = remove_head(model)
    headed.reset_classifier(len(weight))
    head = cast(nn.Module, headed.head)
    if not isinstance(head, nn.Linear) or head.weight.shape != weight.shape:
        problem = f"the head of {model.config.name()} is not one linear layer on its pooled features"
        raise UsageError(problem, "leave --out out")
    head.weight.data.copy_(weight)
    if bias is not None:
        head.bias.data.copy_(bias)
    return headed


def save_linear_head(task: ProtocolTask, weight: Tensor, bias: Tensor, report: Report) -> str:
    """Write the encoder with a linear head of `weight` (K, F) and `bias` (K,) as a bundle to the folder --out; return
    the folder. `report` is the evaluation of the head, which the bundle's provenance contains."""
    assert task.options.out
    model = attach_linear_head(task.bundle.model, weight.cpu(), bias.cpu())
    provenance = {
        "protocol": "heads",
        "encoder": task.run,
        "data": task.source,
        task.split: {name: value for name, value in report.metrics.items() if value is not None},
    }
    bundle = Bundle(model, Classification(task.data.classes, task.data.multilabel), task.bundle.preprocess, provenance)
    bundle.save(Path(task.options.out))
    task.evaluation_settings.listener.note(f"encoder and linear head written to {task.options.out}")
    return os.fspath(task.options.out)
