"""Training and validation loss in one chart, and whether they show overfitting."""

from __future__ import annotations

from typing import Any

from vitreous.reports.pages.plots import LINE_COLOURS, Curve, draw_metric_curves

TRAIN_LOSS_KEY, VALIDATION_LOSS_KEY = "train/loss", "val/nll"
SINGLE_LOSS_TITLES = {TRAIN_LOSS_KEY: "Training loss", VALIDATION_LOSS_KEY: "Validation loss (NLL)"}
OVERFITTING_RISE = 0.05  # minimum relative rise of validation loss, and fall of training loss
OVERFITTING_EVALUATIONS = 2  # last evaluations that must all have a risen validation loss


def build_loss_panel(lines: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the panel that shows training and validation loss in one chart; None if neither was logged."""
    series = [
        Curve("training", LINE_COLOURS[0], lines, TRAIN_LOSS_KEY),
        Curve("validation (NLL)", LINE_COLOURS[1], lines, VALIDATION_LOSS_KEY),
    ]
    series = [curve for curve in series if curve.points()]
    if not series:
        return None
    title, key = ("Loss", "losses") if len(series) > 1 else (SINGLE_LOSS_TITLES[series[0].key], series[0].key)
    label = f"loss: {' and '.join(curve.name for curve in series)}"
    return {
        "title": title,
        "key": key,
        "drawing": draw_metric_curves(label, series),
        "overfitting": describe_overfitting(lines),
    }


def describe_overfitting(lines: list[dict[str, Any]]) -> str:
    """Return a sentence that describes overfitting, and its remedy; an empty string if the losses do not show it.

    Losses show overfitting if each of the last two evaluations has a validation loss at least 5 % above the minimum so
    far, and the training loss of the last evaluation is at least 5 % below that at the minimum. The training loss of an
    evaluation is the mean of the log lines since the previous one.
    """
    losses = compute_mean_losses(lines)
    if len(losses) <= OVERFITTING_EVALUATIONS:
        return ""
    best_index = min(range(len(losses)), key=lambda index: losses[index][2])
    (epoch, train_loss_at_best, lowest_loss), (last_epoch, last_train_loss, last_loss) = losses[best_index], losses[-1]
    has_risen = lowest_loss > 0 and all(
        loss >= (1 + OVERFITTING_RISE) * lowest_loss for _, _, loss in losses[-OVERFITTING_EVALUATIONS:]
    )
    if not has_risen or last_train_loss > (1 - OVERFITTING_RISE) * train_loss_at_best:
        return ""
    return (
        f"validation loss was lowest at epoch {epoch:.3g} ({lowest_loss:.3g}) and rose by "
        f"{last_loss / lowest_loss - 1:.0%} to {last_loss:.3g} at epoch {last_epoch:.3g}, while training loss fell "
        f"from {train_loss_at_best:.3g} to {last_train_loss:.3g}. "
        "Train for fewer epochs, add augmentation, or use --early-stop 5."
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
