"""Measurements of runs for studies, in addition to validation metrics. PyTorch is imported only to measure."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vitreous.apps.studies.study import MeasuredRun, Measurement

if TYPE_CHECKING:
    from vitreous.reports.answers import EvaluationSettings
    from vitreous.reports.figures.subject import FigureContext

FEW_SHOT_COUNTS = (1, 5, 10, 25)
NUM_INSPECTED_IMAGES = 128  # validation images that are inspected, as in the paper
ROLLOUT_MASS = 0.5  # fraction of the rollout's sum that the counted patches contain
# images per timed forward pass, and number of passes, of which the fastest counts
TIMED_BATCH_SIZE, TIMED_PASSES = 64, 5


def make_compute_settings(subject: MeasuredRun) -> EvaluationSettings:
    """Make the evaluation settings of a run: its device, precision and listener, without a cache."""
    from vitreous.inference.options import InferenceOptions
    from vitreous.reports.answers import EvaluationSettings

    precision = "auto" if subject.precision == "fp16" else subject.precision
    return EvaluationSettings(
        inference_options=InferenceOptions(subject.device, precision), listener=subject.listener, cache=False
    )


def measure_few_shot_accuracy(subject: MeasuredRun, shots: Sequence[int] = FEW_SHOT_COUNTS) -> list[Measurement]:
    """Measure few-shot accuracy (arXiv:2010.11929, section 4.1), averaged over the target datasets, for each number of
    shots. Raises the errors of `evaluate --protocol fewshot`."""
    from vitreous.reports.protocols.protocols import run_protocol
    from vitreous.reports.protocols.task import ProtocolOptions

    options, top1 = ProtocolOptions("fewshot", shots=tuple(shots), cache=False), dict[int, list[float]]()
    for dataset in subject.other_datasets:
        document = run_protocol(
            options, subject.trained_run_folder, dataset.source, "val", make_compute_settings(subject)
        )
        for result in document["results"]:
            top1.setdefault(result["shots"], []).append(result["top1"])
    return [Measurement((f"{count}",), float(np.mean(values))) for count, values in top1.items()]


def measure_five_shot_accuracy(subject: MeasuredRun) -> list[Measurement]:
    """Measure 5-shot accuracy, averaged over the target datasets."""
    return [Measurement((), measurement.value) for measurement in measure_few_shot_accuracy(subject, (5,))]


def draw_inspect_figure(subject: MeasuredRun, name: str) -> dict[str, np.ndarray]:
    """Draw a figure of `vitreous inspect` into the run's folder of figures. Return its arrays, of any shape, by
    name."""
    from vitreous.reports.inspect import inspect

    inspect(
        subject.trained_run_folder,
        out=subject.album,
        figures=(name,),
        count=NUM_INSPECTED_IMAGES,
        device=subject.device,
        split="val",
    )
    with np.load(subject.album / f"{name}.npz", allow_pickle=False) as arrays:
        return dict(arrays)


def measure_filter_variance(subject: MeasuredRun) -> list[Measurement]:
    """Measure the fraction of the patch filters' variance that the first principal components explain, for several
    numbers of components (arXiv:2010.11929, Fig. 7 left)."""
    share = draw_inspect_figure(subject, "filters")["share"].astype(np.float64)
    counts = [count for count in (1, 2, 4, 8, 16, 28) if count <= len(share)]
    return [Measurement((f"{count}",), float(share[:count].sum())) for count in counts]


def measure_position_contrast(subject: MeasuredRun) -> list[Measurement]:
    """Measure the mean similarity of positions in the same row or column, minus that of other pairs (arXiv:2010.11929,
    Figs. 7 centre and 10)."""
    row, column, other_similarity, contrast = draw_inspect_figure(subject, "positions")["structure"][0]
    return [
        Measurement((), float(contrast), {"row": float(row), "column": float(column), "other": float(other_similarity)})
    ]


def measure_attention_distance(subject: MeasuredRun) -> list[Measurement]:
    """Measure attention distance in pixels by block: the minimum, mean and maximum over heads (arXiv:2010.11929, Figs.
    7 right and 11)."""
    arrays = draw_inspect_figure(subject, "distance")
    measurements = []
    for layer, heads, uniform in zip(arrays["layers"], arrays["distance"], arrays["uniform"], strict=True):
        distances_by_head = {"nearest": np.nanmin(heads), "mean": np.nanmean(heads), "farthest": np.nanmax(heads)}
        measured = {"uniform": float(uniform)}
        measurements += [
            Measurement((name, f"{layer + 1}"), float(value), measured) for name, value in distances_by_head.items()
        ]
    return measurements


def open_run_scene(subject: MeasuredRun) -> FigureContext:
    """Open the model of a run and its validation images for inspection."""
    from vitreous.inference.open_model import open_bundle
    from vitreous.progress import NullListener
    from vitreous.reports.figures.subject import FigureContext, InspectOptions
    from vitreous.system.machine import pick_device

    bundle, options = (
        open_bundle(subject.trained_run_folder, headless=True),
        InspectOptions(split="val", count=NUM_INSPECTED_IMAGES),
    )
    device = pick_device(subject.device)
    return FigureContext(
        str(subject.trained_run_folder),
        bundle,
        options=options,
        preprocess=bundle.preprocess,
        device=device,
        images=(),
        listener=NullListener(),
    )


def measure_rollout_spread(subject: MeasuredRun) -> list[Measurement]:
    """Measure the smallest fraction of patches that contain half of the rollout, by block, averaged over images
    (arXiv:2010.11929, Figs. 6 and 14). It is about 0.5 for uniform attention."""
    from vitreous.inspection.attention import threshold_attention_mass
    from vitreous.inspection.rollout import compute_rollout

    draw_inspect_figure(subject, "rollout")
    context = open_run_scene(subject)
    shares = [
        threshold_attention_mass(compute_rollout(context.model, images).maps.flatten(2).cpu(), ROLLOUT_MASS)
        .double()
        .mean(-1)
        .numpy()
        for images in context.iterate_batches(context.take_images(NUM_INSPECTED_IMAGES))
    ]
    return [Measurement((f"{block}",), float(value)) for block, value in enumerate(np.concatenate(shares).mean(0), 1)]


def measure_norm_ratio(subject: MeasuredRun) -> list[Measurement]:
    """Measure the ratio of the largest to the median norm of an image's patch tokens, before the final norm layer,
    averaged over images (arXiv:2309.16588)."""
    from vitreous.inspection.hooks import ResidualState, visit_residual_states

    context, ratios = open_run_scene(subject), []
    for images in context.iterate_batches(context.take_images(NUM_INSPECTED_IMAGES)):
        states: list[ResidualState] = []
        visit_residual_states(context.model, images, states.append)
        norms = states[-1].patches.flatten(1, -2).norm(dim=-1)
        ratios.append((norms.amax(1) / norms.median(1).values).cpu().double().numpy())
    return [Measurement((), float(np.concatenate(ratios).mean()))]


def measure_token_merging(subject: MeasuredRun, counts: Sequence[int] = ()) -> list[Measurement]:
    """Measure top-1 accuracy and throughput with token merging (arXiv:2210.09461). `counts` are the tokens merged per
    block, by default five values from 0 to the maximum."""
    import torch

    from vitreous.inference.engine import TorchEngine
    from vitreous.inference.open_model import open_bundle
    from vitreous.inference.options import InferenceOptions
    from vitreous.reports.answers import predict_split
    from vitreous.tasks.classification_metrics import evaluate_classification

    config, measurements = subject.run.model, []
    max_merged = math.prod(config.grid) // config.depth
    for count in counts or sorted({round(share * max_merged) for share in (0, 0.25, 0.5, 0.75, 1)}):
        inference_options = InferenceOptions(subject.device, "fp32", merge_tokens=count)
        settings = make_compute_settings(subject)
        outputs = predict_split(
            subject.trained_run_folder,
            None,
            "val",
            type(settings)(inference_options=inference_options, listener=subject.listener),
        )
        report = evaluate_classification(outputs.logits, outputs.split.labels, outputs.bundle.classes, outputs.readable)
        bundle = open_bundle(subject.trained_run_folder)
        engine = TorchEngine(bundle.model, bundle.preprocess, pick_run_device(subject), "fp32", merge_tokens=count)
        pixels = torch.zeros(TIMED_BATCH_SIZE, config.channels, *config.image, dtype=torch.uint8)
        throughput = TIMED_BATCH_SIZE / time_fastest_call(lambda engine=engine, pixels=pixels: engine(pixels))
        measurements.append(Measurement((f"{count}",), report.metrics["top1"], {"images_per_second": throughput}))
    return measurements


def pick_run_device(subject: MeasuredRun) -> str:
    """Return the device on which a run is measured."""
    from vitreous.system.machine import pick_device

    return pick_device(subject.device)


def time_fastest_call(call: Any) -> float:
    """Return the seconds of the fastest of `TIMED_PASSES` calls, after one warm-up call."""
    times = []
    for _ in range(TIMED_PASSES + 1):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times[1:])


def measure_frechet_distance(subject: MeasuredRun, samples: int = 500) -> list[Measurement]:
    """Measure the Fréchet distance between generated images and validation images in pixel space, and the GFLOPs of a
    forward pass."""
    from vitreous.reports.generated import GenerationOptions, measure_generator

    options = GenerationOptions(samples=samples, guidance=1.0, seed=subject.seed)
    document = measure_generator(subject.trained_run_folder, None, "val", options, make_compute_settings(subject))
    return [Measurement((), document["val"]["frechet_distance"], {"gflops": 2 * subject.run.model.macs() / 1e9})]


def measure_throughput(subject: MeasuredRun, image_sizes: Sequence[int], seconds: float) -> list[Measurement]:
    """Measure the inference throughput with the fastest batch size, and the largest batch, by image size
    (arXiv:2010.11929, D.5 and Fig. 12). Image sizes that exceed the time limit of `seconds` per model are skipped."""
    import torch

    from vitreous.inspection.cost import measure_inference_costs, round_image_sizes
    from vitreous.models.zoo import build_model
    from vitreous.nn.frozen import freeze_for_inference

    torch.manual_seed(subject.seed)
    model: Any = freeze_for_inference(build_model(subject.run.model).to(pick_run_device(subject)))
    model.any_size = True
    return [
        Measurement(
            (f"{cost.image[-1]}",),
            cost.find_fastest[1],
            {"largest": float(cost.largest_batch_size), "memory": float(cost.memory)},
        )
        for cost in measure_inference_costs(model, round_image_sizes(model, image_sizes), (), seconds)
    ]


def measure_largest_batch(subject: MeasuredRun, image_sizes: Sequence[int]) -> list[Measurement]:
    """Measure the largest batch by image size. On a GPU, batch sizes are tried; on a CPU, the largest is estimated from
    80 % of the free memory, at most 4096."""
    import torch

    from vitreous.inspection.cost import measure_inference_costs, round_image_sizes
    from vitreous.models.zoo import build_model

    torch.manual_seed(subject.seed)
    model = build_model(subject.run.model).to(pick_run_device(subject)).eval()
    model.any_size = True
    batches = () if pick_run_device(subject) != "cpu" else (1,)
    return [
        Measurement((f"{cost.image[-1]}",), float(cost.largest_batch_size), {"memory": float(cost.memory)})
        for cost in measure_inference_costs(model, round_image_sizes(model, image_sizes), batches)
    ]
