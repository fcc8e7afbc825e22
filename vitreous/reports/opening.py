"""Opening what is judged: a model from wherever it is, and data with labels in its class order."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from torch import Tensor

from vitreous.data.annotations.target import kind_of
from vitreous.data.keys import permutation
from vitreous.data.layouts.imagenet import is_ilsvrc2012
from vitreous.data.layouts.video import open_sample
from vitreous.data.preprocess import Preprocess
from vitreous.data.sources import open_data, open_data_of_run
from vitreous.data.split import Data, Split, require_labels
from vitreous.errors import DataError, ResourceError, UsageError, check_path
from vitreous.models.dense import Dense
from vitreous.models.packed import check_packs
from vitreous.nn.sizes import grid_of
from vitreous.training.folder import Folder
from vitreous.training.model_paths import find_newest_run, holds_images, is_run
from vitreous.weights.adopt import bundle_in, open_weights
from vitreous.weights.bundle import Bundle, load_bundle
from vitreous.weights.options import WeightsSource, known_of
from vitreous.weights.published import nearest_name, published_row
from vitreous.weights.tasks import Features


def open_bundle(
    run: str | os.PathLike[str],
    headless: bool = False,
    note: Callable[[str], None] = lambda text: None,
    dense: bool = False,
) -> Bundle:
    """Return the bundle of a run folder, of a bundle's folder, or of foreign weights; `note` hears assumptions.

    A model without a head is refused unless `headless`. One that answers for pixels or with objects is refused unless
    `dense`; of it the backbone is returned where it may be `headless`. Raises WeightsError or UsageError.
    """
    bundle = find_bundle(run, note)
    if bundle.makes_images:
        raise UsageError(f"{run} makes images, and answers nothing about others", f"use `vitreous sample {run}`")
    return answering(run, bundle, headless, note, dense)


def open_generator(run: str | os.PathLike[str], note: Callable[[str], None] = lambda text: None) -> Bundle:
    """Return the bundle of a model that makes images. Raises UsageError for another, and as `open_bundle`."""
    bundle = find_bundle(run, note)
    if not bundle.makes_images:
        raise UsageError(f"{run} answers about images, and makes none", "train one: vitreous train DATA --recipe dit")
    return bundle


def find_bundle(run: str | os.PathLike[str], note: Callable[[str], None]) -> Bundle:
    """Return the bundle of a run folder, of a bundle's folder, or of foreign weights, whatever it answers. Raises
    WeightsError or UsageError."""
    check_path(run, "a run")
    path = Path(run)
    if ":" not in os.fspath(run) and not path.exists() and not published_row(run):
        near, newest = nearest_name(os.fspath(run)), find_newest_run()
        hint = f"the newest run here is {newest}" if newest else "`vitreous train` makes one"
        raise UsageError(f"no run at {path}", f"did you mean {near}? {hint}" if near else hint)
    if not is_run(path) and holds_images(os.fspath(run)):
        newest = find_newest_run()
        hint = f"name one; the newest run here is {newest}" if newest else "`vitreous train` makes one"
        raise UsageError(f"{path} holds images, and is no model", hint)
    if (path / "config.yaml").is_file() and not (path / "model").is_dir():
        raise UsageError(f"the run in {path} did not finish", f"continue it: vitreous train --resume --out {path}")
    folder = bundle_in(path)
    bundle = load_bundle(folder) if folder and not known_of(run) else open_weights(run).bundle()
    for text in bundle.notes:
        note(text)
    bundle = replace(bundle, preprocess=preprocess_for(run, bundle))
    if bundle.preprocess.native:
        bundle.model.any_size = True  # type: ignore[union-attr]
    return bundle


def preprocess_for(run: str | os.PathLike[str], bundle: Bundle) -> Preprocess:
    """Return how a bundle reads pictures: at their own aspect ratio where the source of the weights says so. Raises
    UsageError for a model that cannot take such."""
    own, config = bundle.preprocess, bundle.model.config
    if not isinstance(run, WeightsSource) or not (run.native_aspect or run.tokens is not None):
        return own
    if not (run.native_aspect or own.native):
        problem = f"--tokens is about pictures at their own aspect ratio, and {run} reads squares"
        raise UsageError(problem, "add --native-aspect, or leave it out")
    check_packs(config)
    tokens = run.tokens or own.tokens or math.prod(grid_of(own.image, config.patch))
    return replace(own, fit="native", tokens=tokens, patch=config.patch)


def answering(
    run: str | os.PathLike[str], bundle: Bundle, headless: bool, note: Callable[[str], None], dense: bool
) -> Bundle:
    """Return the bundle, or that of its backbone, where it answers as it is asked to. Raises UsageError."""
    if isinstance(bundle.model, Dense):
        if dense:
            return bundle
        answer = "gives boxes and classes to objects" if bundle.object_classes else "gives a class to every pixel"
        if not headless:
            hint = "use `vitreous evaluate RUN` and `vitreous predict RUN IMAGES --out FOLDER`"
            raise UsageError(f"{run} {answer}, not to an image", hint)
        note(f"of a model that {answer}, its backbone alone is used")
        bundle = replace(bundle, model=bundle.model.backbone.eval(), task=Features())
    if not bundle.classes and not headless:
        hint = f"use `vitreous embed`, or train one: vitreous train DATA --init {run}"
        raise UsageError(f"{run} has no head: it gives features, not classes", hint)
    return bundle


def data_for(
    run: str | os.PathLike[str],
    data: str | os.PathLike[str] | None,
    split: str | None,
    labelled: bool = True,
    stills: bool = False,
    preprocess: Preprocess | None = None,
) -> tuple[str, Data]:
    """Return name and data set to judge a run on: the run's own, split as the run split it, or `data`; with `stills`
    as `open_data` has it.

    A folder of classes that is named is judged whole, as its test split, unless `split` is another one; its files are
    taken for volumes or signals where the model takes these, as `preprocess` or else the run says. Raises
    UsageError for a bundle without data, and, if `labelled`, DataError for data without labels.
    """
    folder, source = Folder(Path(run)), os.fspath(data) if data is not None else None
    split_seed, share, group_by, axes, ignore_index = 0, None, None, None, None
    if folder.config.is_file():
        trained, preprocess = folder.run().data, preprocess or folder.run().preprocess
        source, split_seed = source or trained.source, trained.split_seed
        own = (trained.hold_out, trained.group_by, trained.axes)
        share, group_by, axes = own if data is None else (None, None, None)
        ignore_index = trained.ignore_index
    if source is None:
        problem = f"{run} is a bundle without a run: there are no data to judge it on"
        raise UsageError(problem, "name a data set after it")
    opened = (
        open_data_of_run(
            run, source, split_seed=split_seed, group_by=group_by, stills=stills, axes=axes, ignore_index=ignore_index
        )
        if data is None
        else open_for(
            source, split_seed, preprocess.kind if preprocess is not None else "pictures", stills, ignore_index
        )
    )
    if labelled:
        require_labels(opened)
    opened = opened.holding_out(share, split_seed)
    return source, everything(opened) if data is not None and opened.unsplit and split in (None, "test") else opened


def open_for(source: str, split_seed: int, kind: str, stills: bool = False, ignore_index: int | None = None) -> Data:
    """Open data for a model of pictures, clips, volumes or signals: what could be pictures too is taken for volumes and
    signals by models of these; `stills` and `ignore_index` as `open_data` has them. Raises as `open_data`."""
    axes, opened = {"signals": 1, "volumes": 3}.get(kind), None
    try:
        opened = open_data(source, split_seed, stills=stills, ignore_index=ignore_index)
        if axes is None or kind_of(next(iter(opened.splits.values()))) != "pictures":
            return opened
        return open_data(source, split_seed, axes=axes, ignore_index=ignore_index)
    except DataError:
        if opened is not None:
            return opened  # pictures, which are refused by what they are
        if axes is None:
            raise
    return open_data(source, split_seed, axes=axes, ignore_index=ignore_index)


def choose_split(data: Data, split: str | None, note: Callable[[str], None]) -> str:
    """Return the split to judge: the one asked for, else test, else val, which `note` hears.

    Raises DataError, naming the splits there are, where there is neither.
    """
    if split is not None or "test" in data.splits or "val" not in data.splits:
        data.split(split or "test")
        return split or "test"
    drawn = ", held out of its training images" if data.unsplit else ""
    note(f"{data.name} has no test split: judged on its {len(data.splits['val'])} val images{drawn}")
    return "val"


def examples(data: Data, preprocess: Preprocess) -> Iterator[Tensor]:
    """Yield pictures (C, *image) to calibrate int8 on, in a fixed random order, of train if there is one."""
    split = data.splits.get("train") or next(iter(data.splits.values()))
    for sample in permutation(len(split), 0, 0):
        try:
            yield preprocess.pixels(preprocess.decoded(open_sample(split, int(sample)), split.name(int(sample))))
        except DataError:
            continue


def training(run: str | os.PathLike[str], opened: Data | None = None) -> Data | None:
    """Return data with a training split, which nothing is judged on: those open, or the run's own, or None."""
    if opened is None:
        try:
            opened = data_for(run, None, "test")[1]
        except (UsageError, DataError, ResourceError):
            return None
    return opened if "train" in opened.splits and len(opened.splits) > 1 else None


def calibrating(
    run: str | os.PathLike[str], preprocess: Preprocess, others: Callable[[], Iterable[Tensor]]
) -> Iterator[Tensor]:
    """Yield pictures (C, *image) to calibrate int8 on: training images of the run, so that answers do not depend on the
    data judged; those of `others` where they cannot be opened."""
    data = training(run)
    yield from others() if data is None else examples(data, preprocess)


def everything(data: Data) -> Data:
    """Return all images of data without splits of their own as the test split."""
    splits = {"test": data.whole or data.split("train")}
    return Data(data.name, data.classes, splits, titles=data.titles, frequency=data.frequency)


def places(data: Data, classes: tuple[str, ...]) -> np.ndarray:
    """Return the index of each class of the data among the model's, (K,) int64: by its name, or by a unique title.

    A title is also known by its first words (`tench` of `tench, Tinca tinca`). Heads with numbers for classes fit the
    1,000 synsets of ImageNet in order, and nothing else. Raises DataError for an unknown class.
    """
    if classes == tuple(map(str, range(len(classes)))) and is_ilsvrc2012(data.classes):
        return np.arange(len(classes), dtype=np.int64)
    place = {name: index for index, name in enumerate(classes)}
    titles = [data.titles.get(name, "").split(",")[0] for name in data.classes]
    short = Counter(name.split(",")[0] for name in classes)
    called = {name.split(",")[0]: index for index, name in enumerate(classes) if short[name.split(",")[0]] == 1}
    once = {title for title, times in Counter(titles).items() if title and times == 1}
    indices = [
        place.get(name, called.get(title, -1) if title in once else -1)
        for name, title in zip(data.classes, titles, strict=True)
    ]
    times = Counter(indices)
    unknown = [name for name, index in zip(data.classes, indices, strict=True) if index < 0 or times[index] > 1]
    if unknown:
        problem = f"the model does not know the classes {', '.join(unknown[:20])}"
        raise DataError(problem, f"it knows {', '.join(classes[:20])}")
    return np.array(indices, dtype=np.int64)


def matched(split: Split, data: Data, classes: tuple[str, ...], multilabel: bool = False) -> Split:
    """Return the split with labels in the model's class order: (n, K) for several labels an image or `multilabel`.

    Raises DataError for a class the model does not know.
    """
    order = places(data, classes)
    labels = np.zeros((len(split), len(classes)), dtype=np.float32)
    if split.labels.ndim == 2:
        labels[:, order] = split.labels
    elif multilabel:
        labels[np.arange(len(split)), order[split.labels]] = 1
    else:
        labels = order[split.labels]
    return split.take(np.arange(len(split)), labels)
