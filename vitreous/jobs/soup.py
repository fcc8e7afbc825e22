"""The command `soup`: average the weights of several fine-tuned models (model soups, arXiv:2203.05482), or interpolate
between a model and its fine-tuned version (WiSE-FT, arXiv:2109.01903).

An averaged model has the inference cost of a single model. If all models were fine-tuned from the same initial weights,
it is often better than the best of them.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from vitreous.config import list_differences
from vitreous.data.loader import EvalLoader
from vitreous.data.options import DataOptions
from vitreous.data.run_data import iterate_sample_images
from vitreous.data.screen import check_unreadable_images
from vitreous.data.sources import open_data, open_run_source
from vitreous.data.split import Data, require_labels
from vitreous.errors import UsageError, VitreousError
from vitreous.inference.engine import InferenceOptions, compute_split_logits, make_engine
from vitreous.inference.open_model import open_bundle
from vitreous.models.config import ModelConfig, replace_known_fields
from vitreous.models.zoo import build_without_init
from vitreous.progress import NullListener, ProgressListener
from vitreous.system.cores import default_worker_count
from vitreous.tasks.documents import SoupDocument
from vitreous.tasks.report import Report
from vitreous.training.folder import RunFolder
from vitreous.weights.adopt import locate_bundle
from vitreous.weights.bundle import DESCRIPTION_FILE, WEIGHTS_FILE, Bundle, load_bundle, load_state_dict_strict


@dataclass(frozen=True)
class Ingredient:
    """A model of a soup.

    - `run`: the path of the run or bundle, as the user gave it.
    - `folder`: the folder of its bundle.
    - `sha256`: the hash of its weights.
    - `like`: the bundle without weights.
    - `data`: the data settings of its run; None for a bundle without a run.
    """

    run: str
    folder: Path
    sha256: str
    like: Bundle
    _: KW_ONLY
    data: DataOptions | None

    def bundle(self) -> Bundle:
        """Load the bundle with its weights. It is not kept, so that only a single model is in memory at a time. Raises
        WeightsError."""
        return load_bundle(self.folder)


@dataclass(frozen=True)
class SoupEvaluator:
    """Evaluates models on a split of a dataset, with the same compute settings for all models."""

    source: str
    data: Data
    split: str
    inference_options: InferenceOptions
    _: KW_ONLY
    workers: int
    skip_unreadable: bool  # whether unreadable images count as wrong; otherwise they raise DataError
    listener: ProgressListener

    def evaluate(self, bundle: Bundle, name: str) -> Report:
        """Evaluate a model, with a temperature of 1; `name` is shown with the progress. Raises DataError for unreadable
        images, or if the classes or targets of model and data differ."""
        task = bundle.task.with_temperature(1.0)
        split = task.align_labels(self.data.split(self.split), self.data)
        preprocess, done = bundle.preprocess, 0

        def count_images(images: int) -> None:
            """Show the number of evaluated images."""
            nonlocal done
            done += images
            self.listener.progress(f"evaluate {name}", done, len(split))

        engine = make_engine(
            bundle.model, preprocess, self.inference_options, lambda: iterate_sample_images(self.data, preprocess)
        )
        loader = EvalLoader(split, preprocess, self.workers)
        logits, unreadable = compute_split_logits(engine, loader, on_images=count_images)
        check_unreadable_images(unreadable, len(split), "skip" if self.skip_unreadable else "stop")
        readable = np.array([sample not in unreadable for sample in range(len(split))])
        return task.evaluate(logits, split.labels, readable)


def soup(
    runs: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    greedy: bool = False,
    data: str | os.PathLike[str] | None = None,
    split: str = "val",
    workers: int | None = None,
    how: InferenceOptions | None = None,
    bad_images: str = "stop",
    listener: ProgressListener | None = None,
    alpha: Sequence[float] = (),
) -> SoupDocument:
    """Average the weights of runs or bundles of the same architecture, and save the bundle `out`. Returns a document
    with all metrics.

    With `alpha`, the weights of two models, such as a zero-shot classifier and its fine-tuned version, are
    interpolated: (1 - alpha) times those of the first plus alpha times those of the second. Of several values, the one
    with the best primary metric is chosen; of equal ones, the first.

    A uniform soup averages all models. A greedy soup adds the models one by one, the best first, and keeps each one
    that does not lower the soup's primary metric (top-1, mAP or R²). Models are evaluated on the validation images of
    `data`, never on a test split. By default this is the dataset that all were trained on. A uniform soup works without
    validation images. Without `alpha`, the order of `runs` has no effect. Raises UsageError if the models differ,
    listing the differences, or if `out` exists; DataError and WeightsError for unreadable data and models.
    """
    target, listener = Path(out), listener or NullListener()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{target} already exists", "use another --out")
    if split not in ("val", "train"):
        raise UsageError(f"a soup cannot be selected on the {split} split", "use --split val, then `vitreous evaluate`")
    check_alpha(runs, alpha, greedy)
    ingredients = open_ingredients(runs)
    outputs = check_same_model(ingredients)
    evaluator = None
    try:
        dataset, source = open_evaluation_data(ingredients, None if data is None else os.fspath(data), split, listener)
        evaluator = SoupEvaluator(
            source,
            dataset,
            split=split,
            inference_options=how or InferenceOptions(),
            workers=default_worker_count() if workers is None else workers,
            skip_unreadable=bad_images == "skip",
            listener=listener,
        )
    except VitreousError as error:
        if greedy or data is not None or len(alpha) > 1:
            raise
        listener.note(f"the models are not evaluated: {error.message}")
    trials: list[dict[str, float | None]] = []
    if alpha:
        first_run = os.fspath(runs[0])
        ends = sorted(ingredients, key=lambda ingredient: ingredient.run != first_run)
        records, trials, bundle, report = interpolate_ingredients(ends, outputs, evaluator, alpha)
    else:
        records, bundle, report = average_ingredients(ingredients, outputs, evaluator, greedy)
    document = {
        "soup": "interpolated" if alpha else "greedy" if greedy else "uniform",
        "data": evaluator and evaluator.source,
        "split": evaluator and split,
        split: report and report.summary(),
        "ingredients": records,
        "alphas": trials,
    }
    bundle.provenance = dict(document)
    bundle.save(target)
    num_parameters = sum(parameter.numel() for parameter in bundle.model.parameters())
    document = {"model": bundle.model.config.name(), "parameters": num_parameters, **document, "bundle": str(target)}
    return cast(SoupDocument, document)


def check_alpha(runs: Sequence[str | os.PathLike[str]], alpha: Sequence[float], greedy: bool) -> None:
    """Raise UsageError for values of `alpha` out of range, and if they do not fit the other options."""
    if not alpha:
        return
    if greedy or len(runs) != 2:
        problem = "a greedy soup" if greedy else f"{len(runs)} models"
        raise UsageError(
            f"two models can be interpolated (--alpha), not {problem}",
            "use vitreous soup ZERO-SHOT FINE-TUNED --alpha 0.5 --out BUNDLE",
        )
    if invalid := [value for value in alpha if not 0 <= value <= 1]:
        raise UsageError(f"--alpha must be from 0 to 1, not {invalid[0]:g}", "use --alpha 0.5")


def open_ingredients(runs: Sequence[str | os.PathLike[str]]) -> list[Ingredient]:
    """Open the models of a soup, in the order of their hashes. Raises UsageError for fewer than two models, for the
    same model twice, and for paths that are neither a run nor a bundle."""
    ingredients: dict[str, Ingredient] = {}
    for run in [os.fspath(run) for run in runs]:
        folder, run_folder = locate_bundle(Path(run)), RunFolder(Path(run))
        if folder is None:
            if run_folder.config.is_file() or not (run_folder.path.exists() or ":" in run):
                open_bundle(run)  # raises an error that describes the fault
            raise UsageError(
                f"{run} is neither a run nor a bundle", f"convert it to a bundle: vitreous convert {run} FOLDER"
            )
        bundle = load_bundle(folder)
        if not bundle.task.reads_images:
            raise UsageError(f"{run} is a generative model, which soups do not support", f"leave {run} out")
        digest = json.loads((folder / DESCRIPTION_FILE).read_text("utf-8"))["sha256"][WEIGHTS_FILE]
        if digest in ingredients:
            raise UsageError(f"{ingredients[digest].run} and {run} have the same weights", "give each model once")
        data = run_folder.run().data if run_folder.config.is_file() else None
        template = replace(bundle, model=build_without_init(bundle.model.config), provenance={})
        template.task = template.task.with_temperature(1.0)
        ingredients[digest] = Ingredient(run, folder, digest, template, data=data)
    if len(ingredients) < 2:
        raise UsageError(
            f"a soup needs at least two models, not {len(ingredients)}", "use vitreous soup RUN RUN ... --out BUNDLE"
        )
    return [ingredients[digest] for digest in sorted(ingredients)]


def check_same_model(ingredients: Sequence[Ingredient]) -> tuple[str, ...]:
    """Check that the models can be averaged, and return their output names (classes or targets) in the order of the
    first model. Raises UsageError if the models differ in outputs, input or a setting that affects inference, listing
    the differences, or if they have no outputs."""
    first, *others = ingredients
    reference = first.like
    for ingredient in others:
        candidate = ingredient.like
        lines = list_differences(
            without_dropout(reference.model.config), without_dropout(candidate.model.config)
        ) + list_differences(reference.preprocess, candidate.preprocess, "preprocess.")
        if lines := lines + reference.task.describe_differences(candidate.task):
            listing = "".join(f"\n    {line}" for line in lines)
            raise UsageError(
                f"{first.run} and {ingredient.run} cannot be averaged:{listing}",
                "use runs of the same model and dataset",
            )
    if not reference.task.outputs:
        raise UsageError(f"{first.run} {reference.task.missing_outputs[0]}", "use runs of `vitreous train`")
    return reference.task.outputs


def without_dropout(config: ModelConfig) -> ModelConfig:
    """Return a model config without dropout and stochastic depth. Only training uses these settings, so models of a
    soup may differ in them."""
    return replace_known_fields(
        config, {"regularization.dropout": 0.0, "regularization.drop_path": 0.0, "regularization.drop_path_rises": True}
    )


def open_evaluation_data(
    ingredients: Sequence[Ingredient], requested_source: str | None, split: str, listener: ProgressListener
) -> tuple[Data, str]:
    """Open the dataset on which the models are evaluated, with the validation split that the runs held out. Returns the
    dataset and its name.

    Raises UsageError if the runs have no dataset in common, or held out different images; DataError if the split is
    missing.
    """
    trained_on = [(ingredient.run, ingredient.data) for ingredient in ingredients if ingredient.data is not None]
    sources = {os.path.realpath(data.source): data.source for _, data in trained_on}
    if requested_source is None and len(sources) != 1:
        raise UsageError(
            "the models were not trained on the same dataset", "give a dataset with validation images: --data DATA"
        )
    source = requested_source or next(iter(sources.values()))
    datasets: dict[str, Data] = {}
    for run, data in trained_on:
        if os.path.realpath(data.source) != os.path.realpath(source):
            continue
        full_dataset = open_run_source(
            run,
            source,
            data.split_seed,
            data.group_by,
            axes=data.axes,
            ignore_index=data.ignore_index,
            targets=data.targets,
        )
        dataset = full_dataset.with_holdout(data.hold_out, data.split_seed)
        if data.fingerprint not in (full_dataset.fingerprint(), dataset.fingerprint()):
            listener.note(
                f"{source} has changed since {run} was trained, so validation images may have been training images"
            )
        datasets[dataset.fingerprint()] = dataset
    if len(datasets) > 1:
        raise UsageError(
            f"the runs held out different images of {source}", "give a dataset with a separate val folder: --data DATA"
        )
    columns = ingredients[0].like.task.label_columns
    evaluation_data = next(iter(datasets.values())) if datasets else open_data(source, targets=columns)
    require_labels(evaluation_data)
    evaluation_data.split(split)
    return evaluation_data, source


def average_ingredients(
    ingredients: Sequence[Ingredient], outputs: tuple[str, ...], evaluator: SoupEvaluator | None, greedy: bool
) -> tuple[list[dict[str, Any]], Bundle, Report | None]:
    """Average the models of a soup: all of them, or greedily by Recipe 1 of arXiv:2203.05482.

    Returns a record per model, best first; the bundle of the soup; and its report, None without an evaluator.
    """
    single_reports = (
        {ingredient.sha256: evaluator.evaluate(ingredient.bundle(), ingredient.run) for ingredient in ingredients}
        if evaluator
        else {}
    )
    records: list[dict[str, Any]] = []
    total: dict[str, Tensor] = {}
    count, report, template = 0, None, ingredients[0].like
    # ties are broken by hash
    for ingredient in sorted(
        ingredients, key=lambda ingredient: -get_primary_score(single_reports.get(ingredient.sha256))
    ):
        new_total, new_report, is_selected = add_weights(total, ingredient.bundle(), outputs), None, True
        if greedy and evaluator:
            new_report = (
                evaluator.evaluate(average_weights(template, new_total, count + 1), f"soup with {ingredient.run}")
                if count
                else single_reports[ingredient.sha256]
            )
            is_selected = get_primary_score(new_report) >= get_primary_score(report)
            report = new_report if is_selected else report
        if is_selected:
            total, count = new_total, count + 1
        score, score_with = (
            None if r is None else r.headline[1] for r in (single_reports.get(ingredient.sha256), new_report)
        )
        records.append(
            {
                "run": ingredient.run,
                "sha256": ingredient.sha256,
                "score": score,
                "score_with": score_with,
                "selected": is_selected,
            }
        )
    for record in records:
        record["weight"] = 1 / count if record["selected"] else 0.0
    averaged_bundle = average_weights(template, total, count)
    return records, averaged_bundle, report or (evaluator.evaluate(averaged_bundle, "soup") if evaluator else None)


def interpolate_ingredients(
    ingredients: Sequence[Ingredient],
    outputs: tuple[str, ...],
    evaluator: SoupEvaluator | None,
    alphas: Sequence[float],
) -> tuple[list[dict[str, Any]], list[dict[str, float | None]], Bundle, Report | None]:
    """Interpolate between the weights of two models (arXiv:2109.01903, section 3): (1 - alpha) times the first plus
    alpha times the second, for each of `alphas`.

    Returns a record per model, one per value of alpha, the best bundle, and its report, None without an evaluator.
    """
    first, second = (ingredient.bundle() for ingredient in ingredients)
    trials: list[dict[str, float | None]] = []
    best: tuple[float, Bundle, Report | None] | None = None
    for alpha in alphas:
        total = add_weights(add_weights({}, first, outputs, 1 - alpha), second, outputs, alpha)
        bundle = average_weights(ingredients[0].like, total, 1)
        report = evaluator.evaluate(bundle, f"alpha {alpha:g}") if evaluator else None
        trials.append({"alpha": alpha, "score": None if report is None else report.headline[1]})
        if best is None or get_primary_score(report) > get_primary_score(best[2]):
            best = alpha, bundle, report
    assert best is not None, "check_alpha rejects an empty list"
    weights = (1 - best[0], best[0])
    records = [
        {
            "run": ingredient.run,
            "sha256": ingredient.sha256,
            "score": evaluator.evaluate(bundle, ingredient.run).headline[1] if evaluator else None,
            "score_with": None,
            "selected": weight > 0,
            "weight": weight,
        }
        for ingredient, bundle, weight in zip(ingredients, (first, second), weights, strict=True)
    ]
    return records, trials, best[1], best[2]


def get_primary_score(report: Report | None) -> float:
    """Return the primary metric of a report, negated if lower is better, so that larger is better; minus infinity
    without a report."""
    return report.score[0] if report else -math.inf


def add_weights(
    total: dict[str, Tensor], bundle: Bundle, outputs: tuple[str, ...], factor: float = 1.0
) -> dict[str, Tensor]:
    """Return the sum of `total`, which may be empty, and `factor` times a model's weights, of the same shapes, in
    float64. Head rows are reordered to the order of `outputs`."""
    order = torch.tensor([bundle.task.outputs.index(name) for name in outputs])
    state = {name: factor * tensor.double() for name, tensor in bundle.model.state_dict().items()}
    state |= {name: tensor[order] for name, tensor in state.items() if name.startswith("head.")}
    return {name: total[name] + tensor for name, tensor in state.items()} if total else state


def average_weights(template: Bundle, total: dict[str, Tensor], count: int) -> Bundle:
    """Return a bundle like `template` whose weights are the sums `total`, of the same shapes, divided by `count`."""
    model = build_without_init(template.model.config)
    load_state_dict_strict(model, {name: (tensor / count).float() for name, tensor in total.items()}, "the soup")
    return replace(template, model=model.eval())
