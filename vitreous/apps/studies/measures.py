"""What studies measure of their runs beside the figures of validation images. Needs no PyTorch until it measures."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vitreous.apps.studies.study import Reading, Subject

if TYPE_CHECKING:
    from vitreous.reports.answers import Computing
    from vitreous.reports.figures.subject import Scene

SHOTS = (1, 5, 10, 25)
LOOKED_AT = 128  # images, as in the paper
MASS = 0.5  # of a rollout, that the fewest patches hold
BATCH, ROUNDS = 64, 5  # images of a timed pass, and passes of which the fastest counts


def computing_of(subject: Subject) -> Computing:
    """How answers of a subject are computed."""
    from vitreous.inference.options import InferenceOptions
    from vitreous.reports.answers import Computing

    precision = "auto" if subject.precision == "fp16" else subject.precision
    return Computing(how=InferenceOptions(subject.device, precision), listener=subject.listener, cache=False)


def read_few_shots(subject: Subject, shots: Sequence[int] = SHOTS) -> list[Reading]:
    """Few-shot accuracy (arXiv:2010.11929, section 4.1), the mean over the other sets: a reading for each number of
    shots. Raises what `evaluate --protocol fewshot` raises."""
    from vitreous.reports.protocols.protocols import judge_by
    from vitreous.reports.protocols.task import ProtocolOptions

    options, top1 = ProtocolOptions("fewshot", shots=tuple(shots), cache=False), dict[int, list[float]]()
    for other in subject.others:
        document = judge_by(options, subject.home, other.source, "val", computing_of(subject))
        for figures in document["figures"]:
            top1.setdefault(figures["shots"], []).append(figures["top1"])
    return [Reading((f"{count}",), float(np.mean(values))) for count, values in top1.items()]


def read_five_shots(subject: Subject) -> list[Reading]:
    """The paper's 5-shot accuracy, the mean over the other sets."""
    return [Reading((), reading.value) for reading in read_few_shots(subject, (5,))]


def draw_figure(subject: Subject, name: str) -> dict[str, np.ndarray]:
    """The numbers of a figure of `inspect` by name, arrays of any shape; it is drawn into the subject's album."""
    from vitreous.reports.inspect import inspect

    inspect(subject.home, out=subject.album, figures=(name,), count=LOOKED_AT, device=subject.device, split="val")
    with np.load(subject.album / f"{name}.npz", allow_pickle=False) as numbers:
        return dict(numbers)


def read_filters(subject: Subject) -> list[Reading]:
    """The share of the filters' variance in their first components (arXiv:2010.11929, Fig. 7 left)."""
    share = draw_figure(subject, "filters")["share"].astype(np.float64)
    counts = [count for count in (1, 2, 4, 8, 16, 28) if count <= len(share)]
    return [Reading((f"{count}",), float(share[:count].sum())) for count in counts]


def read_positions(subject: Subject) -> list[Reading]:
    """How much more alike positions of one row or column are than others (arXiv:2010.11929, Figs. 7 centre and 10)."""
    row, column, other, contrast = draw_figure(subject, "positions")["structure"][0]
    return [Reading((), float(contrast), {"row": float(row), "column": float(column), "other": float(other)})]


def read_distances(subject: Subject) -> list[Reading]:
    """Mean attention distance by block, of the head that looks nearest, of all, and of that which looks farthest
    (arXiv:2010.11929, Figs. 7 right and 11)."""
    numbers = draw_figure(subject, "distance")
    readings = []
    for layer, heads, uniform in zip(numbers["layers"], numbers["distance"], numbers["uniform"], strict=True):
        of_heads = {"nearest": np.nanmin(heads), "mean": np.nanmean(heads), "farthest": np.nanmax(heads)}
        measured = {"uniform": float(uniform)}
        readings += [Reading((name, f"{layer + 1}"), float(value), measured) for name, value in of_heads.items()]
    return readings


def scene_of(subject: Subject) -> Scene:
    """The model of a run and its validation images, to be looked into."""
    from vitreous.inference.open_model import open_bundle
    from vitreous.progress import NullListener
    from vitreous.reports.figures.subject import InspectOptions, Scene
    from vitreous.system.machine import pick_device

    bundle, options = open_bundle(subject.home, headless=True), InspectOptions(split="val", count=LOOKED_AT)
    device = pick_device(subject.device)
    return Scene(
        str(subject.home),
        bundle,
        options=options,
        preprocess=bundle.preprocess,
        device=device,
        pictures=(),
        listener=NullListener(),
    )


def read_rollouts(subject: Subject) -> list[Reading]:
    """The fewest patches that hold half of the rollout, as a share of all, by block (arXiv:2010.11929, Figs. 6 and
    14): the mean over images. Attention to all patches alike gives about a half."""
    from vitreous.inspection.attention import segments
    from vitreous.inspection.rollout import rollout

    draw_figure(subject, "rollout")
    scene = scene_of(subject)
    shares = [
        segments(rollout(scene.model, images).maps.flatten(2).cpu(), MASS).double().mean(-1).numpy()
        for images in scene.batches(scene.some(LOOKED_AT))
    ]
    return [Reading((f"{block}",), float(value)) for block, value in enumerate(np.concatenate(shares).mean(0), 1)]


def read_norms(subject: Subject) -> list[Reading]:
    """The largest norm of an image's patch tokens over their median, before the last norm (arXiv:2309.16588): the mean
    over images."""
    from vitreous.inspection.hooks import State, states

    scene, ratios = scene_of(subject), []
    for images in scene.batches(scene.some(LOOKED_AT)):
        after: list[State] = []
        states(scene.model, images, after.append)
        norms = after[-1].patches.flatten(1, -2).norm(dim=-1)
        ratios.append((norms.amax(1) / norms.median(1).values).cpu().double().numpy())
    return [Reading((), float(np.concatenate(ratios).mean()))]


def read_merging(subject: Subject, counts: Sequence[int] = ()) -> list[Reading]:
    """Top-1 and images a second of inference with tokens that merge (arXiv:2210.09461), by how many go in a block:
    none, and shares of those that can."""
    import torch

    from vitreous.inference.engine import TorchEngine
    from vitreous.inference.open_model import open_bundle
    from vitreous.inference.options import InferenceOptions
    from vitreous.reports.answers import compute_answers
    from vitreous.tasks.classification_metrics import judge

    config, readings = subject.run.model, []
    most = math.prod(config.grid) // config.depth
    for count in counts or sorted({round(share * most) for share in (0, 0.25, 0.5, 0.75, 1)}):
        how = InferenceOptions(subject.device, "fp32", merge_tokens=count)
        computing = computing_of(subject)
        answers = compute_answers(subject.home, None, "val", type(computing)(how=how, listener=subject.listener))
        report = judge(answers.logits, answers.split.labels, answers.bundle.classes, answers.readable)
        bundle = open_bundle(subject.home)
        engine = TorchEngine(bundle.model, bundle.preprocess, device_of(subject), "fp32", merge_tokens=count)
        pixels = torch.zeros(BATCH, config.channels, *config.image, dtype=torch.uint8)
        rate = BATCH / fastest(lambda engine=engine, pixels=pixels: engine(pixels))
        readings.append(Reading((f"{count}",), report.figures["top1"], {"images_per_second": rate}))
    return readings


def device_of(subject: Subject) -> str:
    """The device that a subject computes on."""
    from vitreous.system.machine import pick_device

    return pick_device(subject.device)


def fastest(turn: Any) -> float:
    """Seconds of the fastest of a few turns, after one to warm up."""
    times = []
    for _ in range(ROUNDS + 1):
        started = time.perf_counter()
        turn()
        times.append(time.perf_counter() - started)
    return min(times[1:])


def read_generated(subject: Subject, samples: int = 500) -> list[Reading]:
    """The Fréchet distance of generated images to the validation images, in the space of pixels, against the operations
    of a forward pass."""
    from vitreous.reports.generated import GenerationOptions, judge_generator

    options = GenerationOptions(samples=samples, guidance=1.0, seed=subject.seed)
    document = judge_generator(subject.home, None, "val", options, computing_of(subject))
    return [Reading((), document["val"]["frechet_distance"], {"gflops": 2 * subject.run.model.macs() / 1e9})]


def read_speed(subject: Subject, sides: Sequence[int], seconds: float) -> list[Reading]:
    """Images a second of the fastest batch by image size, as a model infers, and what the largest batch would hold
    (arXiv:2010.11929, D.5 and Fig. 12). Sizes that take too long are left out."""
    import torch

    from vitreous.inspection.cost import costs, sizes
    from vitreous.models.zoo import build_model
    from vitreous.nn.frozen import frozen

    torch.manual_seed(subject.seed)
    model: Any = frozen(build_model(subject.run.model).to(device_of(subject)))
    model.any_size = True
    return [
        Reading((f"{cost.image[-1]}",), cost.best[1], {"largest": float(cost.largest), "memory": float(cost.memory)})
        for cost in costs(model, sizes(model, sides), (), seconds)
    ]


def read_batches(subject: Subject, sides: Sequence[int]) -> list[Reading]:
    """Images in the largest batch by image size: measured on a GPU, on a processor what 80 % of its free memory would
    hold, at most 4096."""
    import torch

    from vitreous.inspection.cost import costs, sizes
    from vitreous.models.zoo import build_model

    torch.manual_seed(subject.seed)
    model = build_model(subject.run.model).to(device_of(subject)).eval()
    model.any_size = True
    batches = () if device_of(subject) != "cpu" else (1,)
    return [
        Reading((f"{cost.image[-1]}",), float(cost.largest), {"memory": float(cost.memory)})
        for cost in costs(model, sizes(model, sides), batches)
    ]
