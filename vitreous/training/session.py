"""A whole training run: from a `Run` and its pictures to a folder with metrics, checkpoints, a bundle and a summary."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from vitreous.config import to_plain
from vitreous.data.batch import Batch
from vitreous.data.keys import key
from vitreous.data.sampling import cuts
from vitreous.data.sources import public_name
from vitreous.errors import CollapseError, Interrupted, ResourceError
from vitreous.evaluation.report import Report
from vitreous.inference.engine import TorchEngine
from vitreous.models.names import name_of
from vitreous.models.zoo import Model, build
from vitreous.progress import Listener, NullListener
from vitreous.system.machine import DTYPES, settle_process
from vitreous.training import best, validation
from vitreous.training.batches import Inputs, mean_work, prepared_batches, train_loader
from vitreous.training.compute import count_gradients
from vitreous.training.flat import Flat
from vitreous.training.folder import Folder, evaluation_key, last_value
from vitreous.training.groups import group_of
from vitreous.training.health import Health
from vitreous.training.loop import State, fit
from vitreous.training.optimizer import Optimizers
from vitreous.training.parts import check, spans
from vitreous.training.ranks import ALONE, Ranks
from vitreous.training.run import Run
from vitreous.training.saving import Checkpointer, take_weights
from vitreous.training.sharded import Sharded
from vitreous.training.signals import Signals
from vitreous.training.throughput import ThroughputMeter
from vitreous.training.tune import merged, prepare, recompute_blocks
from vitreous.training.validation import VAL, Measured, measured, shared_outputs
from vitreous.weights.adopt import adopt, parts_of
from vitreous.weights.bundle import Bundle
from vitreous.weights.objective_parts import ObjectiveParts, adopt_parts
from vitreous.weights.options import WeightsSource


class Session:
    """One run in one folder, by this process among `ranks`. `train` goes from wherever the newest checkpoint is to the
    end."""

    def __init__(
        self, run: Run, inputs: Inputs, folder: Folder, listener: Listener | None = None, ranks: Ranks = ALONE
    ) -> None:
        check(run, ranks)
        best.check(run, inputs.val)
        self.run, self.inputs, self.folder, self.ranks = run, inputs, folder, ranks
        self.listener = listener or NullListener()
        self.device = ranks.device(run.device)
        self.loader = train_loader(run, inputs, self.device)
        self.signals = Signals()
        self.checkpointer = Checkpointer(folder.store(run.keep), self.tell)
        self.health = Health(self.tell, self.keep_warning)
        self.meter = ThroughputMeter(ranks, self.device, run.precision)
        self.pending = False  # an evaluation was cut short and has to be made after resuming
        self.collapse = ""  # the first alarm of a collapse
        self.start: dict[str, float] = {}  # what alarms compare features with
        self.last: Report | None = None
        self.best = best.Best()

    def tell(self, text: str) -> None:
        """A note, from the process that speaks."""
        if self.ranks.is_main:
            self.listener.note(text)

    def keep_warning(self, step: int, name: str, text: str) -> None:
        """Write a warning down, for the page of the run."""
        with suppress(OSError):  # it was told
            if self.ranks.is_main and self.folder.path.is_dir():
                self.folder.warn(step, name, text)

    def train(self) -> dict[str, Any]:
        """Train to the end, write the bundle, and return the run's summary, without figures for a test split.

        Raises Interrupted after a signal, with everything saved, and CollapseError at a collapse where the run is to
        stop; NonFiniteError, DataError, ResourceError as they come.
        """
        settle_process()
        with self.signals.caught():
            self.health.data(self.inputs.train, self.inputs.val)
            state = self.build()
            self.restore(state)
            self.meter.begin(state)
            if self.pending:
                self.evaluate(state)
                self.stop(state)  # before a step, if it was cut short again
            self.measure_start(state)
            state.halt = state.halt or self.best.exhausted(self.run)
            run = self.run
            hooks = [
                (0, self.watch),
                (run.log_every, self.log),
                (run.evaluate_every, self.evaluate),
                (run.save_every, self.save),
                (0, self.stop),
            ]
            try:
                fit(state, self.batches(state), hooks)
            finally:
                self.checkpointer.settle(self.ranks.is_main)
            if state.halt and self.signals.received:
                raise self.interrupted(state)
            if state.halt and run.stop_on_collapse and self.collapse:
                raise self.collapsed(state)
            summary = self.finish(state)
            if run.stop_on_collapse and self.collapse:  # at the last evaluation
                raise self.collapsed(state)
            return summary

    def build(self) -> State:
        """The model, its objective, its flat weights and its optimisers, at step 0."""
        run, device = self.run, torch.device(self.device)
        torch.manual_seed(int(key(run.seed)) >> 1)
        model = build(run.model)
        run.objective.initialise(model)
        if run.init:
            classes = run.data.classes if run.objective.takes_classes else ()
            self.tell(adopt(model, WeightsSource(run.init, source_size=run.init_source_size), classes).text())
        if notes := prepare(model, run.tune):
            self.tell(notes)
        if run.recompute:
            recompute_blocks(model)
        multilabel = self.inputs.train.labels.ndim == 2 and bool(run.data.classes)
        objective, dtype = run.objective.build(model, run.objective_setting(multilabel)), DTYPES[run.precision]
        parts = parts_of(run.init) if run.init else None
        if parts and parts.config["name"] == run.objective.name:
            config = to_plain(run.objective) | {"classes": list(run.data.classes)}
            self.tell(f"{run.objective.name} {adopt_parts(objective, config, parts).text()}")
        objective.reduce, objective.gather = self.ranks.mean, self.ranks.gather_rows
        group = partial(group_of, run.optimizer, run.model, objective)
        if self.ranks.joined and run.parallel == "fsdp":
            flat = Sharded(objective, dtype, device=device, ranks=self.ranks, ema=run.ema, group_of=group)
        else:
            flat = Flat(
                objective, dtype, device=device, ema=run.ema, shards=count_gradients(run, self.ranks), group_of=group
            )
        self.measured = measured(objective.evaluators(self.inputs.train), self.inputs)
        return State(
            run=run,
            objective=objective,
            flat=flat,
            optimizers=Optimizers(run.optimizer, flat),
            ranks=self.ranks,
            cut=partial(cuts, self.loader.order),
            work=mean_work(run, self.inputs),
            scale=2.0**16 if run.precision == "fp16" else 1.0,
        )

    def batches(self, state: State) -> Iterator[Batch]:
        """This process's parts of the steps from the state's position on, as `prepared_batches` makes them."""
        places, ahead = (spans(self.run, self.ranks, state.images, state.cut) for _ in range(2))
        return prepared_batches(
            self.run, self.loader, objective=state.objective, device=self.device, places=places, ahead=ahead
        )

    def watch(self, state: State) -> None:
        """After every step: what was written in the background, and what looks wrong."""
        self.checkpointer.poll(state)
        self.health.step(state)

    def log(self, state: State) -> None:
        """One line of training figures, and the progress shown."""
        epoch, figures = state.images / self.run.data.images, self.meter.line(state)
        line = {
            "step": state.step,
            "epoch": epoch,
            "train/loss": state.losses / state.counted if state.counted else None,
            "lr": state.rate,
            **{f"train/{name}": total / max(state.counted, 1) for name, total in state.scalars.items()},
            "gradient_norm": state.norm if math.isfinite(state.norm) else None,
            "skipped": state.skipped,
            **figures,
        }
        if state.scale != 1:
            line["loss_scale"] = state.scale
        self.record(line)
        self.health.line(figures["waiting"], state, self.inputs.cached is not None)
        self.warn(state, {name: total / max(state.counted, 1) for name, total in state.scalars.items()} | self.start)
        loss = state.losses / max(state.counted, 1)
        state.losses, state.counted, state.scalars = 0.0, 0, {}
        val = f"  val {self.last.leading_text}" if self.last and self.measured.prefix == VAL else ""
        text = f"epoch {epoch:.1f}/{round(self.run.epochs, 2):g}  loss {loss:.3f}  "
        text += f"{figures['images_per_second']:.0f} images/s{val}"
        if self.ranks.is_main:
            self.listener.progress("train", state.images, self.run.total, text)

    def warn(self, state: State, figures: Mapping[str, float]) -> None:
        """Print what the objective finds wrong in metrics, and keep the first collapse."""
        for name, text in state.objective.warnings(figures, state.progress):
            self.health.once(name, text)
            self.collapse = self.collapse or text

    def record(self, line: dict[str, Any]) -> None:
        """A line of metrics. One that cannot be written is told, and does not stop the run."""
        try:
            if self.ranks.is_main:
                self.folder.append(line)
        except OSError as error:
            self.tell(f"metrics of step {line['step']} not written ({error.strerror}); training goes on")

    def evaluate(self, state: State) -> None:
        """Judge the averaged weights on the validation split, in the run's precision."""
        if not self.measured.evaluators or (state.done and not self.run.keep_best):
            return  # the last one is made by `finish`, as `evaluate` would
        self.pending = True
        try:
            self.last, figures = self.judged(merged(state.flat.averaged()), self.run.precision)
        except Interrupted:
            return
        self.pending = False
        epoch = self.epoch(state)
        if not (state.done and self.best.after(self.last, state.step, epoch).step == state.step):
            self.record({"step": state.step, "epoch": epoch, **figures, "seconds": self.meter.seconds})
        # else `finish`, which judges these weights in the precision of inference, writes the line
        self.health.report(self.last, self.run.data.classes)
        self.warn(state, self.start | validation.feature_history(self.last, self.measured, self.folder.metrics))
        self.choose(state, self.last)
        self.meter.mark(state)

    def measure_start(self, state: State) -> None:
        """Record metrics of the features that the run starts with, which alarms compare later ones with."""
        if not (self.run.objective.ships_features and self.measured.evaluators):
            return
        name = f"{self.measured.prefix}feature_deviation"
        values = validation.recorded_values(self.folder.metrics, name) if self.ranks.is_main else []
        first = self.ranks.broadcast_text(str(values[0]) if values else "")
        if not first and not state.step:
            with suppress(Interrupted):  # the signal ends the run after its first step
                model, sample = merged(state.flat.averaged()), validation.sample_features(self.measured)
                _, metrics = self.judged(model, self.run.precision, sample)
                self.record({"step": 0, "epoch": 0.0, **metrics})
                first = metrics.get(name) or ""
        self.start = {"first_deviation": float(first)} if first else {}

    def epoch(self, state: State) -> float:
        """Passes over the training images so far."""
        return self.run.epochs if state.done else state.images / self.run.data.images

    def choose(self, state: State, report: Report) -> None:
        """Keep the checkpoint of an evaluation that is the best so far, and end the loop after too many that were
        not."""
        run, before = self.run, self.best
        if not (run.keep_best or run.early_stop):
            return
        self.best = before.after(report, state.step, self.epoch(state))
        if run.keep_best and self.best.step == state.step:
            self.checkpointer.pinned = state.step
            self.save(state)
            # the disk is full, which was told
            if not self.ranks.broadcast_text("saved" if self.checkpointer.saved == state.images else ""):
                self.best, self.checkpointer.pinned = replace(before, evaluations=before.evaluations + 1), before.step
        if self.best.exhausted(run) and not state.done:
            state.halt = True
            self.save(state)

    def judged(
        self, model: Model, precision: str, sample: Measured | None = None
    ) -> tuple[Report, dict[str, float | None]]:
        """The leading report on the images that are judged, or on a `sample` of them, and all figures by the name that
        a line of metrics has for them.

        Raises Interrupted, in all processes, when a signal came in.
        """
        judged: Measured = sample or self.measured
        precision = "fp32" if precision == "fp16" else precision
        engine = TorchEngine(model, self.run.preprocess, self.device, precision)
        measure = partial(
            shared_outputs, engine, self.ranks, self.run.data.workers, lambda: bool(self.signals.received)
        )
        reports = [
            evaluator.report(*(measure(evaluator, split) for split in evaluator.splits(judged.split)))
            for evaluator in judged.evaluators
        ]
        figures = {name: value for report in reversed(reports) for name, value in report.figures.items()}
        return reports[0], {f"{judged.prefix}{name}": value for name, value in figures.items()}

    def save(self, state: State) -> None:
        """A checkpoint."""
        self.checkpointer.save(
            state, {"pending": self.pending, "seconds": self.meter.seconds, "best": self.best.plain()}
        )

    def restore(self, state: State) -> None:
        """Continue from the newest valid checkpoint, if there is one."""
        stored = self.checkpointer.restore(state)
        if stored is not None:
            self.pending, self.meter.before = stored["pending"], stored["seconds"]
            self.best = best.Best.from_plain(stored.get("best"))
            self.checkpointer.pinned = self.best.step or None
            self.tell(f"resumed at step {state.step} of {self.run.steps}")
            now = {"threads": torch.get_num_threads(), "world": self.ranks.world}
            changed = [
                f"{stored[name]} {word} before, {now[name]} now"
                for name, word in (("threads", "threads"), ("world", "processes"))
                if stored.get(name, now[name]) != now[name]
            ]
            if changed and not self.run.reproducible:
                self.tell(f"{'; '.join(changed)}: results may differ in the last bits")
        if self.ranks.is_main:
            again = evaluation_key(state.step, self.epoch(state), self.measured.prefix) if self.pending else None
            self.folder.rewind(state.step, but=again)

    def stop(self, state: State) -> None:
        """Save and end the loop after a signal to any process, or a collapse at which the run is to stop."""
        stops = [self.signals.received or 0, self.run.stop_on_collapse and bool(self.collapse)]
        received, collapsed = self.ranks.all_reduce_max(stops, self.device)
        if (received or collapsed) and not state.done:
            self.signals.received = int(received) or None
            self.collapse = self.collapse or ("features have collapsed" if collapsed else "")
            self.save(state)
            state.halt = True

    def interrupted(self, state: State) -> Interrupted:
        """What a stopped run says."""
        code = 128 + int(self.signals.received or 0)
        return Interrupted(self.stopped_at(state), f"continue with --resume --out {self.folder.path}", code)

    def collapsed(self, state: State) -> CollapseError:
        """Return the error of a run that stops at a collapse: the alarm, and the setting that it names."""
        finding, _, setting = self.collapse.partition(": ")
        return CollapseError(f"{self.stopped_at(state)}: {finding}", f"start again in another --out: {setting}")

    def stopped_at(self, state: State) -> str:
        """Return the step at which a run stopped, and whether its checkpoint is there."""
        is_saved = self.checkpointer.saved == state.images
        saved = "saved" if is_saved else "not saved: the newest checkpoint is an older one"
        return f"stopped at step {state.step} of {self.run.steps}, {saved}"

    def finish(self, state: State) -> dict[str, Any]:
        """Write the bundle, judge it as `evaluate` would, and return the summary. Raises ResourceError where the run's
        folder is gone."""
        run = self.run
        if self.ranks.is_main and not self.folder.path.is_dir():
            raise ResourceError(f"the run folder {self.folder.path} is gone", "start again, and leave it in place")
        epoch, step = self.epoch(state), self.take_best(state)
        model = merged(state.flat.averaged())
        seen = self.best.epoch if step != state.step else epoch
        data = public_name(run.data.source)
        provenance = {"init": run.init, "recipe": run.recipe, "data": data, "epochs": seen, "seed": run.seed}
        parts = None
        if run.objective.ships_features:
            parts = ObjectiveParts(to_plain(run.objective), state.flat.unshipped())
        if self.ranks.is_main:
            task = state.objective.task()
            Bundle(model, task, run.preprocess, provenance, parts=parts).save(self.folder.bundle)
        val, train = None, {"loss": last_value(self.folder.metrics, "train/loss") if self.ranks.is_main else None}
        if self.measured.evaluators:
            try:
                self.last, figures = self.judged(model, "auto")
            except Interrupted:
                raise self.interrupted(state) from None
            val = self.last.summary() if self.measured.prefix == VAL else None
            train |= {} if val else self.last.figures
            if self.ranks.is_main and step == state.step:
                self.folder.rewind(state.step, but=evaluation_key(state.step, epoch, self.measured.prefix))
                self.folder.append({"step": state.step, "epoch": epoch, **figures, "seconds": self.meter.seconds})
            self.warn(state, self.start | validation.feature_history(self.last, self.measured, self.folder.metrics))
        return {
            "model": name_of(run.model),
            "parameters": sum(p.numel() for p in model.parameters()),
            "data": run.data.source,
            "steps": state.step,
            "epochs": epoch,
            "seed": run.seed,
            **self.meter.totals(state),
            "skipped": state.skipped,
            "train": train,
            "val": val,
            "test": None,
            "selection": best.describe(run, self.best, step, state.step),
            "run": str(self.folder.path),
            "bundle": str(self.folder.bundle),
        }

    def take_best(self, state: State) -> int:
        """Give the state the weights that the bundle is to have; returns the step that they are of."""
        if not self.run.keep_best or self.best.step in (0, state.step):
            return state.step
        if take_weights(state, self.checkpointer.store, self.best.step):
            return self.best.step
        self.tell(
            f"the checkpoint of step {self.best.step}, the best, is not there or damaged: the last weights are kept "
            "instead"
        )
        return state.step
