"""The verb `train`: plan, train, judge, save."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vitreous.config import apply_options, differences, from_yaml, set_paths
from vitreous.cores import default_workers
from vitreous.data.copies.listing import excluded as names_in
from vitreous.data.copies.listing import staying
from vitreous.data.pace import workers_for
from vitreous.data.screen import fits_in_memory, readable, refuse, screen
from vitreous.data.sources import open_data, open_data_of_run, resolve_source
from vitreous.data.split import Arrays, Data, Split
from vitreous.disk import write_text
from vitreous.errors import DataError, UsageError, check_path, printable
from vitreous.evaluation.classification import judge
from vitreous.evaluation.engine import InferenceOptions
from vitreous.evaluation.forward import CHUNK
from vitreous.jobs.transfer import TRIALS, check, opening, prepare, transfer
from vitreous.machine import environment, pick_device, warning
from vitreous.models.cost import macs
from vitreous.models.names import configure, name_of
from vitreous.progress import Display, Listener, NullListener
from vitreous.recipes.channels import channelwise, facts
from vitreous.recipes.derive import advise_weights, apply, derive
from vitreous.recipes.options import TrainOptions
from vitreous.reports.answers import Computing, answered
from vitreous.reports.evaluate import record, write_page
from vitreous.training import best, parts
from vitreous.training.folder import Folder
from vitreous.training.peak import quick_peak
from vitreous.training.probe import fitted
from vitreous.training.ranks import Ranks, together
from vitreous.training.run import DataOptions, Run
from vitreous.training.session import Inputs, Session
from vitreous.weights.adopt import starting_point
from vitreous.weights.writable import exports_note

LATEST = "runs/latest"
#: names that other libraries have for options of `train`
ALIASES = {
    "learning_rate": "lr",
    "lr0": "lr",
    "num_epochs": "epochs",
    "num_train_epochs": "epochs",
    "img_size": "image_size",
    "imgsz": "image_size",
    "input_size": "image_size",
    "batch": "batch_size",
    "num_workers": "workers",
    "output_dir": "out",
    "output": "out",
    "project": "out",
    "pretrained": "init",
    "weights": "init",
    "initial_checkpoint": "init",
    "opt": "optimizer",
    "smoothing": "label_smoothing",
    "warmup": "warmup_steps",
    "amp": "precision",
    "checkpoint": "resume",
}
#: settings that a run cannot change: they say what it is, or where it is in its stream of pictures
FIXED = (
    "model.",
    "data.source",
    "data.classes",
    "data.split_seed",
    "data.group_by",
    "data.exclude",
    "seed",
    "init",
    "tune.",
    "loss:",
    "preprocess.",
    "batch_size:",
    "accumulate:",
)
FREE = ("timeout:", "data.workers:", "keep:", "device:", "micro_batch:")  # those that cannot change a result
PARALLEL = 2_000  # pictures from which it pays to start processes for a first look at them
UTILISED = 0.6  # of the machine's peak that a training step reaches
SCREENED = 20_000  # files up to which a data set is decoded once before training, to name what cannot be read


Announce = Callable[[Run, Data], None]  # is given a run and its data before the first step


def train(
    data: str | os.PathLike[str] = "", listener: Listener | None = None, progress: bool = True, **options: Any
) -> dict[str, Any]:
    """Train on a data set and return the run's summary; `options` are the fields of `TrainOptions`, as on the command
    line.

    With `resume=True` the data set may be left out: it is that of the run. `progress` shows on stderr how far the run
    is, as a bar in a terminal and as lines elsewhere, and what it notes; `progress=False` is silent. A `listener` hears
    both in its place.

    With a test split, the trained model is judged on it once, at the end. Raises UsageError (also for an unknown
    option, with the nearest one), DataError, WeightsError, NonFiniteError, ResourceError or Interrupted, each with its
    way out.
    """
    check_path(data, "train(data)")
    refuse_modules(options)
    known = ("data", "listener", "progress")
    (wanted,) = apply_options("train", options, TrainOptions(os.fspath(data)), known=known, aliases=ALIASES)
    if listener is not None or not progress:
        return carry_out(wanted, listener or NullListener())
    display = Display()
    try:
        return carry_out(wanted, display)
    finally:
        display.close()


def refuse_modules(options: dict[str, Any]) -> None:
    """Raise UsageError for a torch.nn.Module as the value of an option: a run makes its model, from a name."""
    for name, option in options.items():
        if isinstance(option, torch.nn.Module):
            way = "give model='ViT-S/16', a name that `vitreous models` lists"
            way += "; for weights of your own vitreous.save(module, FOLDER), and init=FOLDER"
            raise UsageError(f"train({name}=…) is a name, not a module ({type(option).__name__})", way)


def carry_out(options: TrainOptions, listener: Listener, announce: Announce = lambda run, data: None) -> dict[str, Any]:
    """The same from an options object; by every process that `torchrun` started, of which the leading one speaks and
    writes."""
    options = with_data(options)
    with together(pick_device(options.device or "auto"), options.timeout or Run.timeout) as ranks:
        return carried_out(options, listener if ranks.leads else NullListener(), ranks, announce)


def with_data(options: TrainOptions) -> TrainOptions:
    """The options with the data set of the run to continue, where none is named. Raises UsageError where no run is
    continued."""
    options.check_data()
    return options if options.data else replace(options, data=Folder(Path(options.out or LATEST)).run().data.source)


def carried_out(options: TrainOptions, listener: Listener, ranks: Ranks, announce: Announce) -> dict[str, Any]:
    """The same by one process among `ranks`."""
    begun = None
    if options.resume:
        options = replace(options, out=ranks.share(options.out or str(Path(LATEST).resolve())))
        begun = continued(options, listener)
        check(options, begun)
        if begun.summary.is_file():
            listener.note(f"{begun.path} is already complete")
            return json.loads(begun.summary.read_text("utf-8"))
    else:
        check(options)
        if options.out and ranks.leads:
            Folder(Path(options.out)).refuse_existing()
    folder, run, inputs, opened = plan(options, listener, begun)
    folder = Folder(Path(ranks.share(str(folder.path))))
    if options.micro_batch == "auto":
        run = fitted(run, inputs, folder, ranks, listener.note)
    parts.check(run, ranks)
    if options.lr_grid is None:  # whose protocol refuses it
        best.check(run, inputs.val)
    if ranks.leads:
        trials = {} if options.lr_grid is None or begun else {"trials": opening(prepare(run, opened, inputs, options))}
        listed = {"excluded": sorted(names_in(run.data.exclude))} if run.data.exclude and not begun else {}
        begin(folder, run, {"data": facts_of(run, opened), **trials, **listed}, begun)
        announce(run, opened)
    ranks.wait()
    if slow := warning(run.precision, run.device):
        listener.note(slow)
    if begun is None:
        listener.note(exports_note(run.model))
    with folder.locked() if ranks.leads else nullcontext():
        if (folder.path / TRIALS).is_file():
            summary = transfer(folder, run, inputs, opened, listener, ranks, options.ray)
        else:
            summary = Session(run, inputs, folder, listener, ranks).train()
        if ranks.leads:
            judged(folder, run, opened, summary, listener)
    return summary


def judged(folder: Folder, run: Run, opened: Data, summary: dict[str, Any], listener: Listener) -> None:
    """Judge the model that was trained, write the summary, to which figures of the test split are added, and the page.

    Where there is no test split, or a grid left it unread, the page shows the validation images.
    """
    read = "test" in opened.splits and "lr_grid" not in summary
    found = report = None
    computing = Computing(
        CHUNK, run.data.workers, InferenceOptions(run.device), run.data.bad_images if read else "skip", listener
    )
    if read or ("val" in opened.splits and len(opened.splits["val"])):
        with nullcontext() if read else suppress(DataError):  # the page can do without
            found = answered(folder.path, None, "test" if read else "val", computing)
            report = judge(found.logits, found.split.labels, found.bundle.classes, found.readable)
    if read and found is not None and report is not None:
        summary["test"] = report.summary()
        record(folder.path, found.source, "test", summary["test"])
    write_text(folder.summary, json.dumps(summary, indent=2) + "\n")
    write_page(folder.path / "report.html", folder, found, report, listener)


def begin(folder: Folder, run: Run, documents: dict[str, Any], begun: Folder | None) -> None:
    """Make the folder of a new run, or note in an old one what it goes on with."""
    command = shlex.join(["vitreous", *sys.argv[1:]])
    if begun is None:
        folder.create(run, command, {"environment": environment(), **documents})
    elif differences(begun.run(), run):
        folder.renew(run, command, documents)


def plan(options: TrainOptions, listener: Listener, begun: Folder | None = None) -> tuple[Folder, Run, Inputs, Data]:
    """Everything that is decided before the first step: the folder, the run, its pictures and the data set.

    `begun` is the folder of a run to continue, if `continued` found it already.
    """
    if options.resume:
        folder = begun or continued(options, listener)
        stored = folder.run()
        source = options.data if is_moved(options.data, stored.data.source) else stored.data.source
        opened, run, inputs = pictures(source, stored, options, listener, folder)
        if source != stored.data.source:
            run = replace(run, data=replace(run.data, source=resolve_source(source)))
        if (found := opened.fingerprint()) != stored.data.fingerprint:
            if not options.allow_data_change or opened.classes != stored.data.classes:
                way = "restore the files, or start a new run" + (
                    ", or --allow-data-change" if opened.classes == stored.data.classes else ""
                )
                raise DataError(f"{options.data} is not what it was when the run began", way)
            listener.note(f"{options.data} is not what it was when the run began; going on with what is there now")
            run = replace(run, data=replace(run.data, fingerprint=found, images=len(inputs.train)))
        return folder, run, inputs, opened
    base = from_yaml(Run, read_config(options.config)) if options.config else None
    opened, run, inputs = pictures(options.data, base, options, listener)
    out = options.out or f"runs/{time.strftime('%Y-%m-%d-%H%M%S')}-{label(run, opened)}"
    return Folder(Path(out)), run, inputs, opened


def continued(options: TrainOptions, listener: Listener | None = None) -> Folder:
    """The folder of the run to continue. Raises UsageError for options that its settings contradict, listing them.

    With `--override` they are told instead, but for those that say what the model, its data and their order are.
    """
    folder = Folder(Path(options.out or LATEST))
    stored = folder.run()
    changed = [line for line in differences(stored, apply(stored, options)) if not line.startswith(FREE)]
    fixed = [line for line in changed if line.startswith(FIXED)] + contradictions(stored, options)
    if resolve_source(options.data) != resolve_source(stored.data.source) and not is_moved(
        options.data, stored.data.source
    ):
        fixed.append(f"data: {stored.data.source} -> {options.data}")
    refused = fixed if options.override else [*dict.fromkeys([*changed, *fixed])]
    if refused:
        listing = "".join(f"\n    {line}" for line in refused)
        word = "cannot change these" if options.override else "keeps its settings; these differ"
        raise UsageError(f"a resumed run {word}:{listing}", "leave them out" + ("" if fixed else ", or use --override"))
    if changed and listener:
        listener.note("going on with other settings: " + "; ".join(changed))
    return folder


def is_moved(source: str, stored: str) -> bool:
    """Whether `source` may be a run's data at another place: what the run has `stored` is gone. Their fingerprint then
    decides."""
    return resolve_source(source) != resolve_source(stored) and not os.path.lexists(stored) and os.path.exists(source)


def contradictions(run: Run, options: TrainOptions) -> list[str]:
    """Where options that say what the model or the recipe is disagree with a run that is already made."""
    own = {
        "model": name_of(run.model),
        "image_size": run.model.image[0],
        "patch_size": run.model.patch[0],
        "recipe": run.recipe,
    }
    said = {
        "model": options.model and name_of(configure(options.model)),
        "image_size": options.image_size,
        "patch_size": options.patch_size,
        "recipe": options.recipe,
    }
    return [f"{name}: {own[name]} -> {said[name]}" for name in own if said[name] not in (None, own[name])]


def pictures(
    source: str, base: Run | None, options: TrainOptions, listener: Listener, begun: Folder | None = None
) -> tuple[Data, Run, Inputs]:
    """Open the data, complete the run (or take `base` with the options applied), and look at every picture where there
    are few."""
    if (options.resize or options.source_size) and not (options.init or (base and base.init)):
        raise UsageError(
            "--resize and --source-size are about the weights of --init, and there are none", "leave them out"
        )
    seed, share, group_by = splitting(base, options)
    opened = (
        open_data(source, seed, group_by) if begun is None else open_data_of_run(begun.path, source, seed, group_by)
    )
    opened = opened.holding_out(share, seed)
    for note in opened.notes:
        listener.note(note)
    exclude = options.exclude or (base.data.exclude if base else None)
    if exclude:
        names = frozenset(json.loads((begun.path / "excluded.json").read_text("utf-8"))) if begun else names_in(exclude)
        opened = without(opened, names, exclude, listener)
    split = opened.split("train")
    workers = options.workers if options.workers is not None else default_workers() * (len(split) > PARALLEL)
    if base is None:
        start = starting_point(options.source(options.init)) if options.init else None
        for note in start.notes if start else ():
            listener.note(note)
        told = facts(opened, options, start)
        run = derive(options, opened, told, start, listener.note)
        if few := advise_weights(run):
            listener.note(few)
        run = channelwise(run, told, split, start, options, workers, listener.note)
        run = replace(run, data=replace(run.data, split_seed=seed, hold_out=share, group_by=group_by, exclude=exclude))
        run = replace(run, data=replace(run.data, source=resolve_source(opened.name)))
        run = replace(run, data=replace(run.data, bad_images=options.bad_images, exact=options.exact))
        run = replace(run, data=replace(run.data, cache=fits_in_memory(split, run.preprocess)))
        if options.workers is None:
            run = replace(run, data=replace(run.data, workers=0 if run.data.cache else processes(run, split)))
    else:
        if contradictions(base, options):
            raise UsageError(
                f"the config says these already; {', '.join(contradictions(base, options))}", "leave one of them out"
            )
        run = apply(base, options)
        if begun is None:
            run = replace(run, data=replace(run.data, source=resolve_source(opened.name)))
        if (share, group_by, exclude) != (base.data.hold_out, base.data.group_by, base.data.exclude):
            split_by = {"hold_out": share, "group_by": group_by, "exclude": exclude}
            run = replace(run, data=replace(run.data, **split_by, images=len(split), fingerprint=opened.fingerprint()))
    cached, bad, rows = None, {}, None
    if run.data.cache or run.data.bad_images == "skip" or (len(split) <= SCREENED and not isinstance(split, Arrays)):
        cached, bad = screen(split, run.preprocess, workers, keep=run.data.cache)
    if bad:
        if run.data.bad_images == "stop":
            raise refuse(bad, len(split))
        listener.note(f"{len(bad)} of {len(split)} training images cannot be read and are left out")
        rows = readable(split, bad)
        split, cached = split.take(rows), cached[rows] if cached is not None else None
        run = replace(run, data=replace(run.data, images=len(split)))
    return opened, run, Inputs(split, opened.splits.get("val"), cached, rows)


def without(opened: Data, names: frozenset[str], exclude: str, listener: Listener) -> Data:
    """The data less the training images of these names. Raises DataError where none is left."""
    split = opened.split("train")
    rows = staying(split, names)
    if not len(rows):
        raise DataError(f"{exclude} leaves no training image", "is it the list of other data?")
    if (
        names
        and len(rows) == len(split)
        and not any(len(staying(part, names)) < len(part) for part in opened.splits.values())
    ):
        first = printable(min(names))
        raise DataError(
            f"none of the {len(names)} names in {exclude} is in the data; the first is {first}", "name the data as then"
        )
    listener.note(f"{len(split) - len(rows)} of {len(split)} training images are left out, as {exclude} says")
    # else they are those of `whole`
    groups = opened.groups[rows] if opened.groups is not None and opened.whole is None else opened.groups
    return replace(
        opened, splits=opened.splits | {"train": split.take(rows)}, groups=groups, identity=opened.fingerprint()
    )


def processes(run: Run, split: Split) -> int:
    """Processes that decode for a run: by what its pictures cost, and what the model takes at a usual share of the
    machine's peak."""
    device = pick_device(run.device)
    rate = UTILISED * quick_peak(device, run.precision) / (3 * 2 * macs(run.model))
    return workers_for(split, run.preprocess, run.augment, rate, shares_cores=device == "cpu", exact=run.data.exact)


def splitting(base: Run | None, options: TrainOptions) -> tuple[int, float | None, str | None]:
    """The seed of the split, the share of all training images that `val` is (None: the data's own, or the usual tenth),
    and what names the groups that are not to be drawn apart."""
    said = {path.removeprefix("data."): words for path, words in options.settings.items() if path.startswith("data.")}
    stored = set_paths(base.data if base else DataOptions("", (), 0, ""), said, "data.")
    seed = options.split_seed if options.split_seed is not None else stored.split_seed
    return seed, stored.hold_out if options.lr_grid is None else 0.0, options.group_by or stored.group_by


def facts_of(run: Run, opened: Data) -> dict[str, Any]:
    """`data.json`: what the run was trained on."""
    return {
        "source": run.data.source,
        "fingerprint": run.data.fingerprint,
        "classes": list(opened.classes),
        "titles": opened.titles,
        "split_seed": run.data.split_seed,
        "splits": {name: len(split) for name, split in opened.splits.items()},
        "images_trained_on": run.data.images,
        "left_out_by": run.data.exclude,
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
        raise UsageError(
            f"cannot read the config {path} ({type(error).__name__})", "give the path of a config.yaml"
        ) from None
