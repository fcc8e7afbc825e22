"""The verb `vitreous evaluate`: evaluate a model's head, evaluate by a protocol such as k-NN, or compare two runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Literal

from tyro.conf import Positional, arg

from vitreous.cli.console import Console, format_interval_suffix, format_percentage, format_split_metrics
from vitreous.cli.inference import InferenceArguments, select_options
from vitreous.cli.protocol_tables import PROTOCOL_LINES, format_protocol_table
from vitreous.errors import UsageError
from vitreous.reports.options import HEADS_PROTOCOL_OPTIONS, EvaluateOptions, ProtocolOptions
from vitreous.tasks.metrics import DETECTION_ERRORS, METRICS

#: options that only apply to --protocol top1 and one run
HEAD_ANALYSES = ("calibrate", "abstain", "outliers", "against", "suspects", "boundary", "tiles")
HEAD_OPTIONS = (*HEAD_ANALYSES, "zero_shot", "templates", "class_labels")
#: options that do not apply to generative models
CLASSIFIER_OPTIONS = (*HEAD_OPTIONS, "report")
#: options that only apply to generative models
GENERATOR_OPTIONS = (
    *("samples", "features", "reference", "guidance", "guided_channels", "interval", "sampler", "vae"),
    *("size", "frames"),
)
MAX_LISTED_CLASSES = 20  # rows of a table of classes or targets


@dataclass(frozen=True, kw_only=True)
class Options(EvaluateOptions, ProtocolOptions, InferenceArguments):
    """Evaluate a trained model on a split of its dataset, or of another dataset with the same class names; or compare
    two models on the same images.

    Example: vitreous evaluate runs/pets photos/ --split test
    """

    COMMON: ClassVar[tuple[str, ...]] = (
        *("split", "protocol", "calibrate", "abstain", "outliers", "suspects"),
        *("report", "bad_images", "device", "engine"),
    )
    SECTIONS: ClassVar[dict[str, str]] = {
        "protocol": "Evaluation",
        "split": "Evaluation",
        "samples": "Generative models",
        "batch_size": "Loading",
    }

    run: Annotated[Positional[str], arg(metavar="RUN")]
    """A run folder or a bundle."""
    data: Annotated[Positional[str | None], arg(metavar="[RUN|DATA]")] = None
    """A second run or bundle to compare with the first, or a dataset (default: the run's dataset)."""
    more: Annotated[Positional[str | None], arg(metavar="[DATA]")] = None
    """A dataset, after two runs."""
    protocol: Literal["top1", "knn", "linear", "fewshot", "heads", "vtab", "real", "objectnet", "retrieval"] = "top1"
    """top1: the model's head. knn, linear, fewshot: a classifier on frozen features. heads: several heads on frozen
    features. vtab: linear on 19 tasks. real, objectnet: the head, evaluated with the labels of --labels. retrieval:
    captions by images and images by captions, for models with a text encoder."""
    split: Literal["train", "val", "test"] | None = None
    """Split to evaluate (default: test, or val if there is no test split)."""
    samples: int = 1000
    """Generative models: number of generated images, spread evenly over the classes."""
    features: str = "pixels"
    """Feature space of the comparison: `pixels`; a run, a bundle or weights; or a file with the Inception weights of
    FID as stored by torch-fidelity (extra `gen`)."""
    reference: str | None = None
    """Reference statistics instead of a dataset: an .npz file with images or feature moments, such as ADM's reference
    batches."""
    guidance: float = 1.0
    """Classifier-free guidance scale; 1 for none."""
    guided_channels: int | None = None
    """Apply guidance to the first channels only (default: all)."""
    interval: tuple[float, float] = (0.0, 1.0)
    """Apply guidance only between these points of sampling, from noise (0) to image (1)."""
    sampler: Literal["ddim", "ddpm", "dpm-solver", "heun", "euler"] | None = None
    """Sampler (default: as for `vitreous sample`)."""
    vae: str | None = None
    """Latent models: autoencoder that decodes the latents (default: as stored in the run)."""
    size: Annotated[str | None, arg(metavar="HEIGHTxWIDTH")] = None
    """Image size to generate and compare, if the model was trained at several (default: the model's)."""
    frames: int | None = None
    """Frames per generated clip."""
    batch_size: int = 64
    """Batch size for decoding; does not change the results."""
    workers: int | None = None
    """Processes that decode images; does not change the results."""

    def __post_init__(self) -> None:
        """Skip the checks of the base classes: the dataclass that `run` builds checks its options."""


def run(options: Options, console: Console) -> dict[str, Any]:
    """Evaluate a model, or compare two, and print the metrics. Raises UsageError for options that conflict."""
    if (second_run := get_second_run(options)) is not None:
        return print_comparison(options, second_run, console)
    from vitreous.inference.open_model import read_task_type

    if not read_task_type(options.run).reads_images:
        return print_generator_evaluation(options, console)
    check_probe_options(options)
    if names := [name for name in GENERATOR_OPTIONS if getattr(options, name) != getattr(Options, name)]:
        raise UsageError(
            f"--{names[0].replace('_', '-')} applies to generative models only",
            f"remove it: {options.run} is not a generative model",
        )
    from vitreous.reports.evaluate import evaluate

    o, evaluates_head = options, options.protocol == "top1"
    if not evaluates_head and (names := [name for name in HEAD_OPTIONS if getattr(o, name)]):
        message = f"--{names[0].replace('_', '-')} applies to predictions of the head, not to --protocol {o.protocol}"
        raise UsageError(message, "remove one of them")
    keywords: dict[str, Any] = {name: getattr(o, name) for name in ("split", "batch_size", "workers", "bad_images")}
    keywords |= (
        {"settings": select_options(EvaluateOptions, o)}
        if evaluates_head
        else {"protocol": select_options(ProtocolOptions, o)}
    )
    document: dict[str, Any] = {
        **evaluate(o.source(o.run), o.data, how=o.get_inference_options(), listener=console, **keywords)
    }
    metrics = None if o.protocol == "vtab" else document[document["split"]]
    if evaluates_head:
        console.print_line(format_split_metrics(document["split"], metrics))
        if document.get("clip_views", "1x1") != "1x1":
            console.print_line(f"mean logits of {document['clip_views']} views per clip (frames x crops)")
    else:
        console.table(*format_protocol_table(o.protocol, document["results"]))
    if metrics and metrics["unreadable"]:
        console.print_line(f"{metrics['unreadable']} unreadable images count as errors")
    lines = PROTOCOL_LINES.get(o.protocol, lambda document: iter(()))
    for line in print_head_results(document, console) if evaluates_head else lines(document):
        console.print_line(line)
    if document["report"]:
        console.print_line(f"page: {document['report']}")
    return document


def check_probe_options(options: Options) -> None:
    """Raise UsageError for options of a published probe or of heads without their protocol, since they would have no
    effect."""
    if options.protocol == "top1" and (names := [name for name in HEADS_PROTOCOL_OPTIONS if getattr(options, name)]):
        raise UsageError(f"--{names[0].replace('_', '-')} applies to --protocol heads", "add --protocol heads")
    lengths = options.epochs, options.steps, options.probe_batch
    if options.protocol == "top1" and (options.probe != "regression" or any(lengths) or not options.probe_augment):
        problem = "--probe and its training options apply to --protocol linear, not to the head"
        raise UsageError(problem, "add --protocol linear, or remove them")


def get_second_run(options: Options) -> str | None:
    """Return the second run of a comparison, or None. Raises UsageError for options that do not apply to two runs."""
    if options.data is None:
        return None
    from vitreous.reports.compare import is_run_or_bundle

    if options.more is None and not is_run_or_bundle(options.data):
        return None
    if options.more is not None and not is_run_or_bundle(options.data) and ":" not in options.data:
        raise UsageError(f"{options.data} is not a run", "use vitreous evaluate RUN RUN DATA")
    single_run_options = [name for name in HEAD_OPTIONS if getattr(options, name)] + ["protocol"] * (
        options.protocol != "top1"
    )
    if single_run_options:
        option = single_run_options[0].replace("_", "-")
        raise UsageError(f"--{option} applies to one run, not to two", "remove it, or evaluate one run")
    return options.data


def print_comparison(options: Options, second_run: str, console: Console) -> dict[str, Any]:
    """Compare two runs, print the metrics of each and their differences, and return the document."""
    from vitreous.reports.answers import EvaluationSettings
    from vitreous.reports.compare import compare_two_runs, is_run_or_bundle

    evaluation_settings = EvaluationSettings(
        options.batch_size, options.workers, options.get_inference_options(), options.bad_images, listener=console
    )
    runs = (options.run, second_run)  # --resize and --source-size apply to foreign weights, if only one is foreign
    first_source, second_source = (
        path if is_run_or_bundle(path) and not all(map(is_run_or_bundle, runs)) else options.source(path)
        for path in runs
    )
    document = compare_two_runs(first_source, second_source, options.more, options.split, evaluation_settings)
    for metrics in (document["a"], document["b"]):
        console.print_line(format_split_metrics(metrics["run"], metrics))
    if correct := document["correct"]:
        correct_text = f"both correct {correct['both']}, only the first {correct['only_a']}, "
        correct_text += f"only the second {correct['only_b']}"
        console.print_line(f"of {document['images']} images: {correct_text}, neither {correct['neither']}")
    if len(targets := document.get("targets", [])) > 1:
        console.table(*target_differences(targets[:MAX_LISTED_CLASSES]))
    if signs := [*describe_secondary_differences(document)]:
        console.print_line(f"second minus first: {', '.join(signs)}")
    console.print_line(document["verdict"])
    return document


def describe_secondary_differences(document: dict[str, Any]) -> Iterator[str]:
    """Format the differences, with intervals, of metrics that are not fractions, such as NLL. The primary metric is
    omitted: the verdict contains it."""
    differences, intervals = document["difference"], document["interval"]
    for name in (name for name, difference in differences.items() if difference is not None and name in METRICS):
        metric = METRICS[name]
        if not metric.is_share and not metric.is_primary:
            suffix = format_interval_suffix(intervals[name], "+" + metric.format_spec)
            yield f"{metric.label} {differences[name]:+{metric.format_spec}}{suffix}"


def target_differences(targets: list[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Return header and rows for two regression models: per target, the second run's metrics minus the first's."""
    metrics = [METRICS[key] for key in targets[0]["difference"]]
    cells = []
    for target in targets:
        cell = [target["target"], target["images"]]
        for metric in metrics:
            change, ends = target["difference"][metric.key], target["interval"][metric.key]
            number_format = "+" + metric.format_spec
            cell.append(
                "-" if change is None else format(change, number_format) + format_interval_suffix(ends, number_format)
            )
        cells.append(cell)
    return ["second minus first", "images", *(metric.label for metric in metrics)], cells


def print_head_results(document: dict[str, Any], console: Console) -> Iterator[str]:
    """Print the table of the worst classes or, for regression, of the targets; yield the lines to print below it."""
    if document["targets"]:
        console.table(*format_targets_table(document["targets"]))
        return
    from vitreous.tasks.report import get_primary_key

    metric, objects = METRICS[get_primary_key(document[document["split"]])], document.get("objects")
    rank, name = metric.ranking_metric
    class_results = sorted(document["per_class"], key=lambda result: result[rank] if result[rank] is not None else 2.0)
    columns = metric.class_columns(class_results)
    confused_columns = ["confused_with"] if any("confused_with" in result for result in class_results) else []
    console.table(
        ["class", "images", *(column.label for column in columns), *["most confused with"] * len(confused_columns)],
        [
            [
                result["class"],
                result["images"],
                *(format_percentage(result[column.key]) for column in columns),
                *map(result.get, confused_columns),
            ]
            for result in class_results[:MAX_LISTED_CLASSES]
        ],
    )
    if len(class_results) > MAX_LISTED_CLASSES:
        yield f"… and {len(class_results) - MAX_LISTED_CLASSES} classes with a better {name}"
    if objects:
        costs = sorted(objects["errors"].items(), key=lambda pair: -pair[1])
        texts = (f"{DETECTION_ERRORS[key]} {100 * cost:.1f}" for key, cost in costs if key in DETECTION_ERRORS)
        yield f"recall, precision and F1 of predictions with a score of at least {objects['threshold']:.2f}"
        yield f"AP50 points lost per error type: {', '.join(texts)}"
    if document["most_confused"] and (pairs := document["most_confused"]["unordered"]):
        texts = (
            f"{' and '.join(pair['classes'])} ({pair['count']:,} "
            f"{metric.counted_noun.removesuffix('s' * (pair['count'] == 1))}, "
            f"{pair['share']:.1%})"
            for pair in pairs[:5]
        )
        yield f"most confused pairs: {', '.join(texts)}"
    yield from format_calibration_lines(document)
    yield from format_outlier_lines(document)


def format_targets_table(targets: list[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Return header and rows of the table of regression targets: one row per target, with metrics in its unit."""
    metrics = [METRICS[key] for key in targets[0]["interval"]]
    cells = [
        [
            target["target"],
            target["images"],
            *("-" if target[m.key] is None else format(target[m.key], m.format_spec) for m in metrics),
        ]
        for target in targets
    ]
    return ["target", "images", *(metric.label for metric in metrics)], cells


def format_calibration_lines(document: dict[str, Any]) -> Iterator[str]:
    """Yield lines on the temperature with its effect on NLL and ECE, and on the accuracy with --abstain."""
    if calibration := document["calibration"]:
        fit_data = calibration["fitted_on"]
        fit_text = (
            f", fitted on {fit_data['images']} {fit_data['split']} images of {fit_data['data']}" if fit_data else ""
        )
        yield f"temperature {calibration['temperature']:.3f}{fit_text}"
        for name in ("val", "test", "train"):
            if name in calibration:
                before, after = calibration[name]["before"], calibration[name]["after"]
                keys = [key for key in ("nll", "ece") if before[key] is not None]
                changes = (f"{key.upper()} {before[key]:.3f} -> {after[key]:.3f}" for key in keys)
                yield f"  {name}: {', '.join(changes)}"
    if abstain := document["abstain"]:
        top1 = abstain["top1"]
        accuracy_text = (
            "" if top1 is None else f": top-1 {top1:.2%}{format_interval_suffix(abstain['interval'])} on them"
        )
        accepted_text = f"{abstain['accepted']} images predicted ({abstain['coverage']:.1%}){accuracy_text}"
        yield f"unsure below {abstain['threshold']:g}: {accepted_text}; AURC {abstain['aurc']:.2g}"


def format_outlier_lines(document: dict[str, Any]) -> Iterator[str]:
    """Yield lines on the outliers (--outliers), and on the probable label errors (--suspects)."""
    if outliers := document["outliers"]:
        scores = f"{outliers['median']:.1f} (median; training images {outliers['training_median']:.1f})"
        yield f"distance from the training images {scores}; most distant:"
        for sample in outliers["top"][:5]:
            yield f"  {sample['score']:.1f}  {sample['path']}"
        if reference := outliers["against"]:
            rates_text = (
                f"AUROC {reference['auroc']:.3f}, false-positive rate {reference['fpr95']:.1%} at 95 % true positives"
            )
            yield f"compared with {reference['images']} images of {reference['data']}: {rates_text}"
    if suspects := document["suspects"]:
        yield f"{suspects['count']} of {suspects['images']} labels are suspect: {suspects['file']}"
        for sample in suspects["top"][:5]:
            neighbours = f"neighbours {sample['knn_class']} {sample['knn_share']:.0%}"
            prediction_text = f"model {sample['predicted_class']} {sample['probability']:.0%}, {neighbours}"
            yield f"  {sample['path']}: labelled {sample['label']}; {prediction_text}"


def print_generator_evaluation(options: Any, console: Console) -> dict[str, Any]:
    """Evaluate a generative model, print its metrics, and return the document. Raises UsageError for options that do
    not apply to generative models."""
    from vitreous.reports.evaluate import evaluate
    from vitreous.reports.generated import GenerationOptions

    o = options
    if names := [name for name in CLASSIFIER_OPTIONS if getattr(o, name)]:
        raise UsageError(f"--{names[0].replace('_', '-')} does not apply to {o.run}, a generative model", "remove it")
    generation_options = GenerationOptions(
        **{field.name: getattr(o, field.name) for field in fields(GenerationOptions)}
    )
    keywords: dict[str, Any] = {
        name: getattr(o, name) for name in ("split", "batch_size", "workers", "bad_images", "protocol")
    }
    metrics = evaluate(
        o.source(o.run),
        o.data,
        how=o.get_inference_options(),
        listener=console,
        settings=generation_options,
        **keywords,
    )
    document: dict[str, Any] = {**metrics}
    metrics = document[document["split"]]
    compared = f"{metrics['images']:,} {document['split']} images" if metrics["images"] else document["data"]
    reference_text = f"{compared} in feature space {metrics['features']} ({metrics['dimensions']:,} dimensions)"
    sampling_text = f"{document['sampler']} in {document['steps']} steps, guidance {document['guidance']:g}"
    console.print_line(
        f"{metrics['samples']:,} samples of {metrics['size']} ({sampling_text}) compared with {reference_text}"
    )
    train = metrics["frechet_distance_of_train"]
    ratio_text = (
        "" if train is None else f" (training images {train:.4g}: {metrics['frechet_distance'] / train:.2f} times)"
    )
    console.print_line(f"Fréchet distance {metrics['frechet_distance']:.4g}{ratio_text}")
    if metrics.get("fid") is not None:
        spatial = "" if metrics["sfid"] is None else f", sFID {metrics['sfid']:.2f}"
        score = f"Inception score {metrics['inception_score']:.2f}"
        console.print_line(f"FID {metrics['fid']:.2f}{spatial}, {score}, of {metrics['samples']:,} samples")
    if metrics["precision"] is not None:
        shares = {name: format_percentage(metrics[name]) for name in ("precision", "recall")}
        shares |= {"density": f"{metrics['density']:.3f}", "coverage": format_percentage(metrics["coverage"])}
        console.table(list(shares), [list(shares.values())])
    if metrics["classifier_accuracy"] is not None:
        accuracy = format_percentage(metrics["classifier_accuracy"])
        console.print_line(f"classifier accuracy: {accuracy} of the samples are recognised by the feature model")
    if metrics["near_duplicates"] is not None:
        share = format_percentage(metrics["near_duplicates"])
        console.print_line(f"near-duplicates of training images: {share} of the samples (chance: 1 %)")
    return document
