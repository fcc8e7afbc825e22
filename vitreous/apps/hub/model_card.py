"""The model card of a bundle: README.md with the Hub's metadata, metrics in its `model-index`, and usage examples."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from vitreous.config import to_builtins
from vitreous.nn.sizes import format_size
from vitreous.version import __version__
from vitreous.weights.bundle import Bundle

#: metric of vitreous -> metric of the Hub; other metrics keep their name
HUB_METRICS = {"top1": "accuracy", "top5": "accuracy", "macro_f1": "f1", "miou": "mean_iou", "map": "map"}
LICENCE_PATTERN = re.compile(r"[a-z0-9][a-z0-9.-]*")  # the Hub's identifiers, and `other`


def strip_local_folders(value: str) -> str:
    """Return the name of a dataset or a file without its local folders. Names with a scheme, such as `hf:org/name`, are
    returned unchanged."""
    if ":" in value[2:] and not os.path.isabs(value):
        return value
    return Path(value).name if os.path.isabs(value) or "/" in value or "\\" in value else value


def strip_provenance_paths(value: Any) -> Any:
    """Return a model's provenance (values, lists and dicts) with every absolute path reduced to its last component."""
    if isinstance(value, dict):
        return {key: strip_provenance_paths(item) for key, item in value.items()}
    if isinstance(value, list):
        return [strip_provenance_paths(item) for item in value]
    return strip_local_folders(value) if isinstance(value, str) and os.path.isabs(value) else value


def list_summary_metrics(summary: dict[str, Any]) -> list[tuple[str, str, float, list[float] | None, int]]:
    """List the metrics of a run's summary as (split, name, value, 95 % interval or None, number of images)."""
    metrics = []
    for split in ("test", "val"):
        measured = summary.get(split) or {}
        intervals = measured.get("interval") or {}
        for name, value in measured.items():
            if isinstance(value, float) and name not in ("images", "unreadable"):
                metrics.append((split, name, value, intervals.get(name), int(measured.get("images") or 0)))
    return metrics


def build_hub_metadata(
    repository: str, bundle: Bundle, summary: dict[str, Any], licence: str | None, tags: list[str]
) -> str:
    """Build the YAML metadata of a model card, without the surrounding `---` lines. Needs the extra `hub`."""
    from huggingface_hub import EvalResult, ModelCardData

    name, data = repository.partition("/")[2], strip_local_folders(str(summary.get("data") or ""))
    task = bundle.preprocess.hub_task or bundle.task.hub_task
    results = [
        EvalResult(
            task_type=task,
            dataset_type=re.sub(r"[^\w./-]+", "-", data).strip("-") or "custom",
            dataset_name=data or "custom",
            dataset_split="validation" if split == "val" else split,
            metric_type=HUB_METRICS.get(metric_name, metric_name),
            metric_name=metric_name,
            metric_value=round(value, 5),
        )
        for split, metric_name, value, _, _ in list_summary_metrics(summary)
    ]
    base = str(bundle.provenance.get("init") or "").removeprefix("hf:")
    card_fields: dict[str, Any] = {"license": licence} if licence else {}
    card_fields |= {"base_model": base} if re.fullmatch(r"[\w.-]+/[\w.-]+", base) and not os.path.exists(base) else {}
    card_fields |= {"model_name": name, "eval_results": results} if results else {}
    card = ModelCardData(
        library_name="vitreous", pipeline_tag=task, tags=["vitreous", "vision-transformer", *tags], **card_fields
    )
    return card.to_yaml()


def render_model_card(
    repository: str,
    bundle: Bundle,
    summary: dict[str, Any],
    licence: str | None,
    tags: list[str],
    extra_files_note: str,
) -> str:
    """Render README.md. `summary` is the summary of the run, or {}. `extra_files_note` is a sentence about files for
    other libraries, or ""."""

    config, task = bundle.model.config, bundle.task
    parameters = sum(parameter.numel() for parameter in bundle.model.parameters())
    verb = task.verb
    image_arguments = "" if verb == "sample" else " IMAGE ..."
    call = {"predict": '.predict("image.jpg")', "embed": '.embed("image.jpg")'}.get(verb, ".model")
    class_names = list(task.classes)
    classes = (
        f"\nClasses: {', '.join(class_names[:50])}{' ...' if len(class_names) > 50 else ''}\n" if class_names else ""
    )
    headless = ", headless=True" if verb == "embed" else ""
    return f"""---
{build_hub_metadata(repository, bundle, summary, licence, tags)}
---

# {repository.partition("/")[2]}

{config.name()}, {parameters:,} parameters, for images of {format_size(config.image)} pixels and
{config.channels} channel{"s" * (config.channels > 1)}: it {task.summary}. Trained with vitreous {__version__}.
{classes}
## Use

vitreous is not on PyPI yet: install it from a checkout of its repository.

```bash
pip install '.[hub]'  # in the checkout
vitreous {verb} hf:{repository}{image_arguments}
```

```python
import vitreous

model = vitreous.load("hf:{repository}"{headless})
prediction = model{call}
```

`model.model` is the `torch.nn.Module` in float32.{f" {extra_files_note}" if extra_files_note else ""}

## Metrics
{format_metric_table(summary)}
## Training
{format_training_list(bundle, summary)}
## Limits

The metrics apply to images similar to the test images. The model also returns predictions for unrelated images.
Evaluate it on your own images before you rely on it: `vitreous evaluate hf:{repository} DATA`.
"""


def format_metric_table(summary: dict[str, Any]) -> str:
    """Format the metrics as a Markdown table; without metrics, return a sentence instead."""
    metrics = list_summary_metrics(summary)
    if not metrics:
        return "\nNo metrics were measured before publication.\n"
    lines = [
        "",
        f"On {strip_local_folders(str(summary.get('data') or 'its data'))}; the 95 % interval is in brackets.",
        "",
    ]
    lines += ["| split | metric | value | images |", "|---|---|---|---|"]
    for split, name, value, interval, images in metrics:
        interval_text = f" [{interval[0]:.4f}, {interval[1]:.4f}]" if interval else ""
        lines.append(f"| {split} | {name} | {value:.4f}{interval_text} | {images:,} |")
    return "\n".join([*lines, ""])


def format_training_list(bundle: Bundle, summary: dict[str, Any]) -> str:
    """Format the training settings of the bundle and the run as a Markdown list."""
    settings = {
        name: value for name, value in strip_provenance_paths(bundle.provenance).items() if not isinstance(value, dict)
    }
    settings |= {name: summary[name] for name in ("steps", "wall_seconds", "exaflops") if summary.get(name) is not None}
    settings = {name: value for name, value in settings.items() if value is not None}
    lines = [f"- {name.replace('_', ' ')}: {format_card_value(value)}" for name, value in settings.items()]
    lines.append(f"- preprocessing: {', '.join(f'{k} {v}' for k, v in list_preprocess_settings(bundle).items())}")
    return "\n".join(["", *lines, ""])


def format_card_value(value: Any) -> str:
    """Format a value for the card: floats with four significant digits, absolute paths as their last component."""
    return (
        f"{value:.4g}"
        if isinstance(value, float)
        else strip_local_folders(value)
        if isinstance(value, str)
        else str(value)
    )


def list_preprocess_settings(bundle: Bundle) -> dict[str, Any]:
    """Return the main preprocessing settings of a bundle by name."""
    settings = to_builtins(bundle.preprocess)
    return {name: settings[name] for name in ("fit", "share", "filter", "mean", "std") if name in settings}
