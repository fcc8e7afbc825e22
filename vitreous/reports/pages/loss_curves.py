"""Training and validation loss in one chart, and whether they show overfitting."""

from __future__ import annotations

from typing import Any

from vitreous.reports.pages.plots import LINE_COLOURS, Curve, draw_metric_curves

TRAIN_LOSS_KEY, VALIDATION_LOSS_KEY = "train/loss", "val/nll"
OVERFITTING_RISE = 0.05  # relative rise of validation loss, and fall of training loss, that count
OVERFITTING_EVALUATIONS = 2  # evaluations at the end that must all be above


def build_loss_panel(lines: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Draw the losses of a run in one chart; None if neither was logged."""
    series = [
        Curve("training loss", LINE_COLOURS[0], lines, TRAIN_LOSS_KEY),
        Curve("validation loss (NLL)", LINE_COLOURS[1], lines, VALIDATION_LOSS_KEY),
    ]
    series = [curve for curve in series if curve.points()]
    if not series:
        return None
    title, key = ("loss", "losses") if len(series) > 1 else (series[0].name, series[0].key)
    label = " and ".join(curve.name for curve in series)
    return {
        "title": title,
        "key": key,
        "drawing": draw_metric_curves(label, series),
        "overfitting": describe_overfitting(lines),
    }


def describe_overfitting(lines: list[dict[str, Any]]) -> str:
    """Describe overfitting in a text that follows this word and a colon; an empty string if the losses do not show it.

    Overfitting: each of the last two evaluations has a validation loss at least 5 % above the minimum so far, and the
    training loss of the last evaluation is at least 5 % below that at the minimum. The training loss of an evaluation
    is the mean of the log lines since the previous one.
    """
    losses = compute_mean_losses(lines)
    if len(losses) <= OVERFITTING_EVALUATIONS:
        return ""
    best = min(range(len(losses)), key=lambda index: losses[index][2])
    (epoch, train_then, lowest), (last_epoch, train_now, last_loss) = losses[best], losses[-1]
    has_risen = lowest > 0 and all(
        loss >= (1 + OVERFITTING_RISE) * lowest for _, _, loss in losses[-OVERFITTING_EVALUATIONS:]
    )
    if not has_risen or train_now > (1 - OVERFITTING_RISE) * train_then:
        return ""
    return (
        f"validation loss was lowest at epoch {epoch:.3g} ({lowest:.3g}) and rose by "
        f"{last_loss / lowest - 1:.0%} to {last_loss:.3g} at epoch {last_epoch:.3g}, while training loss fell from "
        f"{train_then:.3g} to {train_now:.3g}. Train for fewer epochs, add augmentation, or use --early-stop 5."
    ).replace("%", " %")


def compute_mean_losses(lines: list[dict[str, Any]]) -> list[tuple[float, float, float]]:
    """Return (epoch, mean training loss since the previous evaluation, validation loss) of each evaluation."""
    losses, recent_losses = [], list[float]()
    for line in lines:
        if line.get(TRAIN_LOSS_KEY) is not None:
            recent_losses.append(line[TRAIN_LOSS_KEY])
        if line.get(VALIDATION_LOSS_KEY) is not None and recent_losses:
            losses.append((line["epoch"], sum(recent_losses) / len(recent_losses), line[VALIDATION_LOSS_KEY]))
            recent_losses = []
    return losses
