"""Execute a training run: from a `Run` and its images to a folder with metrics, checkpoints, a bundle and a summary."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch

from vitreous.data.sampling import find_bucket_boundaries
from vitreous.errors import CollapseError, Interrupted, ResourceError
from vitreous.inference.options import Precision
from vitreous.models.zoo import Model
from vitreous.progress import NullListener, ProgressListener
from vitreous.system.machine import configure_process
from vitreous.tasks.report import Report
from vitreous.training import validation
from vitreous.training.batches import RunInputs, build_train_loader, prepare_batches
from vitreous.training.best import BestEvaluation, check_selection, describe_selection
from vitreous.training.build_state import build_state
from vitreous.training.drift import DriftGuard
from vitreous.training.folder import RunFolder, format_evaluation_key, read_last_value
from vitreous.training.health import HealthMonitor
from vitreous.training.loop import SliceBatch, TrainingState, run_training_loop
from vitreous.training.ranks import SINGLE_PROCESS, Ranks
from vitreous.training.results import gather_objective_state, summarize_run, write_bundle
from vitreous.training.run import Run
from vitreous.training.saving import Checkpointer, load_checkpoint_weights
from vitreous.training.signals import StopSignals
from vitreous.training.slices import check_processes, run_slices
from vitreous.training.throughput import ThroughputMeter
from vitreous.training.tune import merge_lora_adapters
from vitreous.training.validation import VAL_PREFIX


class Session:
    """Executes one run in one folder, as one process among `ranks`. `train` continues from the newest checkpoint to the
    end."""

    def __init__(
        self,
        run: Run,
        inputs: RunInputs,
        folder: RunFolder,
        listener: ProgressListener | None = None,
        *,
        ranks: Ranks = SINGLE_PROCESS,
    ) -> None:
        check_processes(run, ranks)
        check_selection(run, inputs.val)
        self.run, self.inputs, self.folder, self.ranks = run, inputs, folder, ranks
        self.listener = listener or NullListener()
        self.device = ranks.device(run.device)
        self.loader = build_train_loader(run, inputs, self.device)
        self.signals = StopSignals()
        self.checkpointer = Checkpointer(folder.store(run.keep), self.note)
        self.health = HealthMonitor(self.note, self.record_warning)
        self.meter = ThroughputMeter(ranks, self.device, run.precision)
        self.evaluation_pending = False  # whether an evaluation was interrupted, and is repeated after resuming
        self.collapse = ""  # text of the first collapse warning
        self.initial_features: dict[str, float] = {}  # reference metrics for collapse warnings
        self.last_report: Report | None = None
        self.best, self.drift = BestEvaluation(), DriftGuard()

    def train(self) -> dict[str, Any]:
        """Train to the end, write the bundle, and return the summary of the run, without metrics of a test split.

        Raises Interrupted after a signal when the state is saved, and CollapseError at a collapse if
        `run.stop_on_collapse` is set. NonFiniteError, DataError and ResourceError are passed on.
        """
        configure_process()
        with self.signals.catch():
            self.health.data(self.inputs.train, self.inputs.val)
            state = self.build()
            self.restore(state)
            self.meter.begin(state)
            if self.evaluation_pending:
                self.evaluate(state)
                self.stop(state)  # stop before the first step if the evaluation was interrupted again
            self.measure_initial_features(state)
            is_over = self.best.is_out_of_patience(self.run) or self.drift.has_drifted(self.run)
            state.should_stop = state.should_stop or is_over
            run = self.run
            hooks = [
                (0, self.watch),
                (run.log_every, self.log),
                (run.evaluate_every, self.evaluate),
                (run.save_every, self.save),
                (0, self.stop),
            ]
            try:
                run_training_loop(state, self.batches(state), hooks)
            finally:
                self.checkpointer.publish_pending(self.ranks.is_main)
            if state.should_stop and self.signals.received:
                raise self.interruption_error(state)
            if state.should_stop and run.stop_on_collapse and self.collapse:
                raise self.collapse_error(state)
            summary = self.finish(state)
            if run.stop_on_collapse and self.collapse:  # a collapse at the last evaluation
                raise self.collapse_error(state)
            return summary

    def build(self) -> TrainingState:
        """Build the state of the run at step 0, and choose the images for evaluations."""
        state = build_state(self.run, self.inputs, self.ranks, self.note)
        evaluators = state.objective.evaluators(self.inputs.train)
        self.validation_images = validation.choose_validation_images(evaluators, self.inputs)
        return state

    def batches(self, state: TrainingState) -> Iterator[SliceBatch]:
        """Yield this process's slices of the steps from `state.images` on, each with its batch."""
        steps = run_slices(
            self.run, self.ranks, state.images, partial(find_bucket_boundaries, self.loader.sample_order)
        )
        return prepare_batches(self.run, self.loader, state.objective, self.device, steps)

    # Hooks of the loop

    def watch(self, state: TrainingState) -> None:
        """Publish checkpoints written in the background, and check the step's metrics."""
        self.checkpointer.poll(state)
        self.health.step(state)

    def log(self, state: TrainingState) -> None:
        """Write the training metrics since the last log line, report problems, and show the progress."""
        epoch, costs = state.images / self.run.data.images, self.meter.line(state)
        loss, scalars = state.pop_mean_metrics()
        line = {
            "step": state.step,
            "epoch": epoch,
            "train/loss": loss,
            "lr": state.learning_rate,
            **{f"train/{name}": value for name, value in scalars.items()},
            "gradient_norm": state.norm if math.isfinite(state.norm) else None,
            "skipped": state.skipped,
            **costs,
        }
        if state.scale != 1:
            line["loss_scale"] = state.scale
        self.record(line)
        self.health.line(costs["data_wait"], state, self.inputs.cached is not None)
        self.warn(state, scalars | self.initial_features)
        report = self.last_report if self.validation_images.prefix == VAL_PREFIX else None
        val = f"  val {report.headline_text}" if report else ""
        progress_text = f"epoch {epoch:.1f}/{round(self.run.epochs, 2):g}  loss {loss or 0.0:.3f}  "
        progress_text += f"{costs['images_per_second']:.0f} images/s{val}"
        if self.ranks.is_main:
            self.listener.progress("train", state.images, self.run.total, progress_text)

    def evaluate(self, state: TrainingState) -> None:
        """Evaluate the averaged weights on the validation images in the run's precision, and select the best
        checkpoint."""
        if not self.validation_images.evaluators or (state.is_done and not self.run.keep_best):
            return  # `finish` evaluates the last weights, in the precision of inference
        self.evaluation_pending = True
        try:
            self.last_report, metrics = self.evaluate_model(
                merge_lora_adapters(state.flat.averaged_model()), self.run.precision
            )
        except Interrupted:
            return
        self.evaluation_pending = False
        epoch = self.epoch(state)
        if not (state.is_done and self.best.update(self.last_report, state.step, epoch).step == state.step):
            self.record({"step": state.step, "epoch": epoch, **metrics, "seconds": self.meter.seconds})
        # otherwise `finish` evaluates these weights in the precision of inference and writes the line
        self.health.report(self.last_report, self.run.data.classes)
        self.warn_about_features(state, self.last_report)
        self.select_checkpoint(state, self.last_report)
        self.meter.mark(state)

    def save(self, state: TrainingState) -> None:
        """Save a checkpoint of the current step."""
        selection = {"best": self.best.to_dict(), "drift": self.drift.to_dict()}
        extra = {"pending": self.evaluation_pending, "seconds": self.meter.seconds, **selection}
        self.checkpointer.save(state, extra)

    def stop(self, state: TrainingState) -> None:
        """If any process received a signal, or a collapse ends the run, save a checkpoint and end the loop."""
        stops = [self.signals.received or 0, self.run.stop_on_collapse and bool(self.collapse)]
        received, collapsed = self.ranks.all_reduce_max(stops, self.device)
        if (received or collapsed) and not state.is_done:
            self.signals.received = int(received) or None
            self.collapse = self.collapse or ("features have collapsed" if collapsed else "")
            self.save(state)
            state.should_stop = True

    # Evaluation and selection

    def evaluate_model(
        self, model: Model, precision: Precision | Literal["fp16"]
    ) -> tuple[Report, dict[str, float | None]]:
        """Evaluate a model on the run's validation images.

        Returns the report of the primary evaluator, and all metrics by their names in metrics.jsonl. Raises
        Interrupted, in all processes, when a signal is received.
        """
        return self.evaluate_on(self.validation_images, model, precision)

    def evaluate_on(
        self, images: validation.ValidationImages, model: Model, precision: Precision | Literal["fp16"]
    ) -> tuple[Report, dict[str, float | None]]:
        """Evaluate a model on `images`. Returns the report of the primary evaluator, and all metrics by their names in
        metrics.jsonl. Raises Interrupted, in all processes, when a signal is received."""
        return validation.evaluate_images(
            images, model, self.run, precision, ranks=self.ranks, is_stopped=lambda: bool(self.signals.received)
        )

    def measure_initial_features(self, state: TrainingState) -> None:
        """Measure the standard deviation of the features before the first step, the reference of later collapse
        warnings, and start the drift guard. A resumed run reads both from metrics.jsonl and its checkpoint."""
        images, guards_drift = self.validation_images, bool(self.run.drift_guard)
        if not (self.run.objective.ships_features and images.evaluators):
            return
        name = f"{images.prefix}feature_std"
        values = validation.read_metric_values(self.folder.metrics, name) if self.ranks.is_main else []
        initial_value = self.ranks.broadcast_text(str(values[0]) if values else "")
        if not state.step and (guards_drift or not initial_value):
            with suppress(Interrupted):  # the signal ends the run after its first step
                model = merge_lora_adapters(state.flat.averaged_model())
                sample = images if guards_drift else validation.sample_feature_images(images)
                report, metrics = self.evaluate_on(sample, model, self.run.precision)
                self.drift = self.drift.start(report)
                if not initial_value:
                    self.record({"step": 0, "epoch": 0.0, **metrics})
                initial_value = metrics.get(name) or ""
        self.initial_features = {"first_feature_std": float(initial_value)} if initial_value else {}

    def select_checkpoint(self, state: TrainingState, report: Report) -> None:
        """Save and keep the checkpoint of the best evaluation so far, and end the loop after too many evaluations
        without improvement, or below the limit of the drift guard."""
        run, previous_best = self.run, self.best
        if not (run.keep_best or run.early_stop or run.drift_guard):
            return
        self.best = previous_best.update(report, state.step, self.epoch(state))
        self.drift = self.drift.update(report, state.step, run.drift_guard)
        if (run.keep_best or run.drift_guard) and self.best.step == state.step:
            self.checkpointer.pinned = state.step
            self.save(state)
            # without the checkpoint, because the disk is full, the previous evaluation remains the best
            if not self.ranks.broadcast_text("saved" if self.checkpointer.saved == state.images else ""):
                self.best, self.checkpointer.pinned = (
                    replace(previous_best, evaluations=previous_best.evaluations + 1),
                    previous_best.step,
                )
        has_drifted = self.drift.has_drifted(run)
        if (has_drifted or self.best.is_out_of_patience(run)) and not state.is_done:
            state.should_stop = True
            self.save(state)
            if has_drifted:
                self.note(f"{self.drift.describe_drift(run)}; the run stops, and keeps step {self.best.step}")

    # Beginning and end

    def restore(self, state: TrainingState) -> None:
        """Continue from the newest valid checkpoint if there is one, and remove later metrics."""
        saved_state = self.checkpointer.restore(state)
        if saved_state is not None:
            self.evaluation_pending, self.meter.earlier_seconds = saved_state["pending"], saved_state["seconds"]
            self.best = BestEvaluation.from_dict(saved_state.get("best"))
            self.drift = DriftGuard.from_dict(saved_state.get("drift"))
            self.checkpointer.pinned = self.best.step or None
            self.note(f"resumed at step {state.step} of {self.run.steps}")
            current = {"threads": torch.get_num_threads(), "world_size": self.ranks.world}
            changed = [
                f"{saved_state[name]} {label} before, {current[name]} now"
                for name, label in (("threads", "threads"), ("world_size", "processes"))
                if saved_state.get(name, current[name]) != current[name]
            ]
            if changed and not self.run.reproducible:
                self.note(f"results may differ by rounding: {'; '.join(changed)}")
        if self.ranks.is_main:
            evaluation_key = format_evaluation_key(state.step, self.epoch(state), self.validation_images.prefix)
            self.folder.rewind(state.step, exclude=evaluation_key if self.evaluation_pending else None)

    def finish(self, state: TrainingState) -> dict[str, Any]:
        """Write the bundle, evaluate it in the precision of inference, and return the summary. Raises ResourceError if
        the run's folder no longer exists, Interrupted after a signal."""
        if self.ranks.is_main and not self.folder.path.is_dir():
            raise ResourceError(
                f"the run folder {self.folder.path} no longer exists", "start the run again, and do not move its folder"
            )
        epoch, bundle_step = self.epoch(state), self.load_best_weights(state)
        model, objective_state = merge_lora_adapters(state.flat.averaged_model()), gather_objective_state(state)
        if self.ranks.is_main:
            bundle_epoch = self.best.epoch if bundle_step != state.step else epoch
            write_bundle(state, model, objective_state, folder=self.folder, epochs=bundle_epoch)
        loss = read_last_value(self.folder.metrics, "train/loss") if self.ranks.is_main else None
        report = self.evaluate_bundle(state, model, bundle_step) if self.validation_images.evaluators else None
        is_val = self.validation_images.prefix == VAL_PREFIX
        return summarize_run(
            state,
            model,
            self.folder,
            epoch=epoch,
            costs=self.meter.totals(state),
            train={"loss": loss, **(report.metrics if report and not is_val else {})},
            val=report.summary() if report and is_val else None,
            selection=describe_selection(self.run, self.best, bundle_step, state.step, drift=self.drift),
        )

    def evaluate_bundle(self, state: TrainingState, model: Model, bundle_step: int) -> Report:
        """Evaluate the model of the bundle, whose weights are those of `bundle_step`, in the precision of inference.

        If they are the last weights, their metrics replace the line of the last evaluation in metrics.jsonl. Raises
        Interrupted after a signal.
        """
        try:
            report, metrics = self.evaluate_model(model, "auto")
        except Interrupted:
            raise self.interruption_error(state) from None
        if self.ranks.is_main and bundle_step == state.step:
            epoch = self.epoch(state)
            self.folder.rewind(
                state.step, exclude=format_evaluation_key(state.step, epoch, self.validation_images.prefix)
            )
            self.folder.append({"step": state.step, "epoch": epoch, **metrics, "seconds": self.meter.seconds})
        self.last_report = report
        self.warn_about_features(state, report)
        return report

    def load_best_weights(self, state: TrainingState) -> int:
        """Load the weights of the best evaluation into the state if `run.keep_best` is set, or if the drift guard ended
        the run. Returns the step of the weights in the state, which the bundle will contain."""
        if not (self.run.keep_best or self.drift.has_drifted(self.run)) or self.best.step in (0, state.step):
            return state.step
        if load_checkpoint_weights(state, self.checkpointer.store, self.best.step):
            return self.best.step
        self.note(
            f"the best checkpoint (step {self.best.step}) is missing or damaged: the bundle contains the last weights"
        )
        return state.step

    def interruption_error(self, state: TrainingState) -> Interrupted:
        """Return the error for a run that a signal stopped, with the command that continues it."""
        code = 128 + int(self.signals.received or 0)
        return Interrupted(self.describe_stop(state), f"continue with --resume --out {self.folder.path}", code)

    def collapse_error(self, state: TrainingState) -> CollapseError:
        """Return the error for a run that stops at a collapse, with the warning and its suggested setting."""
        problem, _, setting = self.collapse.partition(": ")
        return CollapseError(f"{self.describe_stop(state)}: {problem}", f"start again in another --out: {setting}")

    def describe_stop(self, state: TrainingState) -> str:
        """Return the step at which a run stopped, and whether its checkpoint was saved."""
        is_saved = self.checkpointer.saved == state.images
        saved = "saved" if is_saved else "not saved: the newest checkpoint is an older one"
        return f"stopped at step {state.step} of {self.run.steps}, {saved}"

    # Records and notes

    def epoch(self, state: TrainingState) -> float:
        """Return the number of passes over the training images so far."""
        return self.run.epochs if state.is_done else state.images / self.run.data.images

    def record(self, line: dict[str, Any]) -> None:
        """Write a line of metrics, in the main process. If it cannot be written, print a note and continue."""
        try:
            if self.ranks.is_main:
                self.folder.append(line)
        except OSError as error:
            self.note(f"metrics of step {line['step']} not written ({error.strerror}); training continues")

    def record_warning(self, step: int, name: str, text: str) -> None:
        """Add a warning to warnings.jsonl, which the web page of the run shows."""
        with suppress(OSError):  # the warning was already printed
            if self.ranks.is_main and self.folder.path.is_dir():
                self.folder.warn(step, name, text)

    def warn(self, state: TrainingState, metrics: Mapping[str, float]) -> None:
        """Report the objective's warnings about metrics, and store the text of the first one in `collapse`."""
        for name, text in state.objective.warnings(metrics, state.progress):
            self.health.warn_once(name, text)
            self.collapse = self.collapse or text

    def warn_about_features(self, state: TrainingState, report: Report) -> None:
        """Report the objective's warnings about the feature metrics of an evaluation, compared with earlier
        evaluations."""
        history = validation.feature_history(report, self.validation_images, self.folder.metrics)
        self.warn(state, self.initial_features | history)

    def note(self, text: str) -> None:
        """Print a note to the user, in the main process only."""
        if self.ranks.is_main:
            self.listener.note(text)
