"""The verb `train`: plan, train, judge, save."""

from __future__ import annotations

import json
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitreous.config import differences, from_yaml
from vitreous.data.screen import fits_in_memory, refuse, screen, without
from vitreous.data.sources import Arrays, Data, open_data
from vitreous.errors import DataError, UsageError
from vitreous.evaluation.engine import How
from vitreous.machine import default_workers, environment, warning
from vitreous.models.names import configure, name_of
from vitreous.recipes.derive import Facts, apply, derive
from vitreous.recipes.options import TrainOptions
from vitreous.training.evaluate import evaluate
from vitreous.training.folder import Folder
from vitreous.training.run import Run
from vitreous.training.session import Inputs, Listener, Session, Silent
from vitreous.weights.adopt import starting_point
from vitreous.weights.bundle import write_text

LATEST = "runs/latest"
PARALLEL = 2_000  # pictures from which it pays to start processes for a first look at them
SCREENED = 20_000  # files up to which a data set is decoded once before training, to name what cannot be read


def train(data: str, listener: Listener | None = None, **options: Any) -> dict[str, Any]:
    """Train on a data set and return the run's summary; `options` are the fields of `TrainOptions`, as on the command line.

    With a test split, the trained model is judged on it once, at the end. Raises UsageError, DataError, WeightsError,
    NonFiniteError, ResourceError or Interrupted, each with its way out.
    """
    unknown = set(options) - set(TrainOptions.__dataclass_fields__)
    if unknown:
        raise UsageError(f"train has no option {', '.join(sorted(unknown))}")
    return carry_out(TrainOptions(data, **options), listener or Silent())


def carry_out(options: TrainOptions, listener: Listener) -> dict[str, Any]:
    """The same from an options object."""
    begun = continued(options) if options.resume else None
    if begun:
        if begun.summary.is_file():
            listener.note(f"{begun.path} is already complete")
            return json.loads(begun.summary.read_text("utf-8"))
    elif options.out:
        Folder(Path(options.out)).refuse_existing()
    folder, run, inputs, opened = plan(options, listener, begun)
    if not begun:
        documents = {"environment": environment(), "data": facts_of(run, opened)}
        folder.create(run, shlex.join(["vitreous", *sys.argv[1:]]), documents)
    if slow := warning(run.precision, run.device):
        listener.note(slow)
    with folder.locked():
        summary = Session(run, inputs, folder, listener).train()
        if "test" in opened.splits:
            judged = evaluate(folder.path, workers=run.data.workers, how=How(run.device), bad_images=run.data.bad_images, listener=listener)
            summary["test"] = judged["test"]
        write_text(folder.summary, json.dumps(summary, indent=2) + "\n")
    return summary


def plan(options: TrainOptions, listener: Listener, begun: Folder | None = None) -> tuple[Folder, Run, Inputs, Data]:
    """Everything that is decided before the first step: the folder, the run, its pictures and the data set.

    `begun` is the folder of a run to continue, if `continued` found it already.
    """
    if options.resume:
        folder = begun or continued(options)
        stored = folder.run()
        opened, _, inputs = pictures(stored.data.source, stored, options, listener)
        if opened.fingerprint() != stored.data.fingerprint:
            raise DataError(f"{options.data} is not what it was when the run began", "restore the files, or start a new run")
        return folder, stored, inputs, opened
    base = from_yaml(Run, read_config(options.config)) if options.config else None
    opened, run, inputs = pictures(options.data, base, options, listener)
    out = options.out or f"runs/{time.strftime('%Y-%m-%d-%H%M%S')}-{label(run, opened)}"
    return Folder(Path(out)), run, inputs, opened


def continued(options: TrainOptions) -> Folder:
    """The folder of the run to continue. Raises UsageError for options that its settings contradict, listing them."""
    folder = Folder(Path(options.out or LATEST))
    stored = folder.run()
    changed = differences(stored, apply(stored, options))
    changed += contradictions(stored, options)
    if Path(options.data) != Path(stored.data.source):
        changed.append(f"data: {stored.data.source} -> {options.data}")
    if changed:
        listing = "".join(f"\n    {line}" for line in changed)
        raise UsageError(f"a resumed run keeps its settings; these differ:{listing}", "leave them out")
    return folder


def contradictions(run: Run, options: TrainOptions) -> list[str]:
    """Where options that say what the model is disagree with the model of a run that is already made."""
    own = {"model": name_of(run.model), "image_size": run.model.image[0], "patch_size": run.model.patch[0]}
    said = {
        "model": options.model and name_of(configure(options.model)),
        "image_size": options.image_size,
        "patch_size": options.patch_size,
    }
    return [f"{name}: {own[name]} -> {said[name]}" for name in own if said[name] not in (None, own[name])]


def pictures(source: str, base: Run | None, options: TrainOptions, listener: Listener) -> tuple[Data, Run, Inputs]:
    """Open the data, complete the run (or take `base` with the options applied), and look at every picture where there are few."""
    seed = options.split_seed if options.split_seed is not None else base.data.split_seed if base else 0
    opened = open_data(source, seed)
    for note in opened.notes:
        listener.note(note)
    split = opened.split("train")
    if base is None:
        start = starting_point(options.init) if options.init else None
        run = derive(options, opened, facts(opened, start.config.channels if start else None), start)
        run = replace(run, data=replace(run.data, split_seed=seed, bad_images=options.bad_images))
        run = replace(run, data=replace(run.data, cache=fits_in_memory(split, run.preprocess)))
        if run.data.cache and options.workers is None:
            run = replace(run, data=replace(run.data, workers=0))
    else:
        if contradictions(base, options):
            raise UsageError(f"the config has a model already; {', '.join(contradictions(base, options))}", "leave one of them out")
        run = apply(base, options)
    cached, bad = None, {}
    if run.data.cache or run.data.bad_images == "skip" or (len(split) <= SCREENED and not isinstance(split, Arrays)):
        workers = options.workers if options.workers is not None else default_workers() * (len(split) > PARALLEL)
        cached, bad = screen(split, run.preprocess, workers, keep=run.data.cache)
    if bad:
        if run.data.bad_images == "stop":
            raise refuse(bad, len(split))
        listener.note(f"{len(bad)} of {len(split)} training images cannot be read and are left out")
        total, split = len(split), without(split, bad)
        cached = cached[[row for row in range(total) if row not in bad]] if cached is not None else None
        run = replace(run, data=replace(run.data, images=len(split)))
    return opened, run, Inputs(split, opened.splits.get("val"), cached)


def facts(opened: Data, channels: int | None) -> Facts:
    """What the recipe has to know of the data: its first readable picture stands for all."""
    split = opened.split("train")
    for sample in range(min(len(split), 100)):
        try:
            picture = split.picture(sample, 3)
        except DataError:
            continue
        grey = isinstance(split, Arrays) and split.pixels.ndim == 3
        return Facts(len(split), (picture.height, picture.width), channels or (1 if grey else 3))
    raise DataError(f"{opened.name}: none of the first 100 images can be read", "mend or remove them")


def facts_of(run: Run, opened: Data) -> dict[str, Any]:
    """`data.json`: what the run was trained on."""
    return {
        "source": run.data.source,
        "fingerprint": run.data.fingerprint,
        "classes": list(opened.classes),
        "split_seed": run.data.split_seed,
        "splits": {name: len(split) for name, split in opened.splits.items()},
        "images_trained_on": run.data.images,
        "notes": opened.notes,
    }


def label(run: Run, opened: Data) -> str:
    """What to call a run: model and data, fit for a file name."""
    words = f"{name_of(run.model)}-{Path(opened.name).name}"
    return "".join(c if c.isalnum() or c in "-+._" else "-" for c in words)


def read_config(path: str) -> str:
    """The text of a config file. Raises UsageError where there is none."""
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the config {path} ({type(error).__name__})", "give the path of a config.yaml") from None
