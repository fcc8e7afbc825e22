"""The results of a finished run: its bundle (model.json and weights), and its summary.json."""

from __future__ import annotations

from typing import Any

from vitreous.config import to_builtins
from vitreous.data.sources import get_public_name
from vitreous.models.zoo import Model
from vitreous.training.folder import RunFolder
from vitreous.training.loop import TrainingState
from vitreous.weights.bundle import Bundle, find_tokenizer
from vitreous.weights.objective_parts import ObjectiveState


def gather_objective_state(state: TrainingState) -> ObjectiveState | None:
    """Return the tensors of a self-supervised objective that its deployed encoder does not contain, such as heads and
    teacher; None for other objectives. With FSDP every process has to call this."""
    objective = state.run.objective
    return (
        ObjectiveState(to_builtins(objective), state.flat.training_only_tensors()) if objective.ships_features else None
    )


def write_bundle(
    state: TrainingState, model: Model, objective_state: ObjectiveState | None, *, folder: RunFolder, epochs: float
) -> None:
    """Write the bundle of a run. `objective_state` is saved with the model to continue pre-training; `epochs` is the
    number of epochs that the weights of `model` were trained for."""
    run = state.run
    data = get_public_name(run.data.source)
    provenance = {"init": run.init, "recipe": run.recipe, "data": data, "epochs": epochs, "seed": run.seed}
    tokenizer = find_tokenizer(folder.path, run.model)
    Bundle(
        model, state.objective.task(), run.preprocess, provenance, objective_state=objective_state, tokenizer=tokenizer
    ).save(folder.bundle)


def summarize_run(
    state: TrainingState,
    model: Model,
    folder: RunFolder,
    *,
    epoch: float,
    costs: dict[str, Any],
    train: dict[str, Any],
    val: dict[str, Any] | None,
    selection: dict[str, Any] | None,
) -> dict[str, Any]:
    """Return the contents of summary.json, without metrics of a test split.

    Args:
        state: the state of the run at its end.
        model: the model that the bundle contains.
        folder: the folder of the run.
        epoch: the number of passes over the training images.
        costs: time, throughput and memory (`ThroughputMeter.totals`).
        train: metrics on training images.
        val: metrics on validation images; None if there are none.
        selection: whether the bundle has the best or the last weights (`best.describe_selection`).
    """
    run = state.run
    return {
        "model": run.model.name(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "data": run.data.source,
        "steps": state.step,
        "epochs": epoch,
        "seed": run.seed,
        **costs,
        "skipped": state.skipped,
        "train": train,
        "val": val,
        "test": None,
        "selection": selection,
        "run": str(folder.path),
        "bundle": str(folder.bundle),
    }
