"""The served model: its warm-up, self-check and description. A reload creates another `ServedModel`."""

from __future__ import annotations

import os
import time
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from vitreous.apps.server.batcher import DEFAULT_BATCH_SIZE
from vitreous.apps.server.child import DecodeSettings
from vitreous.apps.server.sample_request import SampleLimits, make_sample_limits
from vitreous.apps.server.settings import ServerLimits
from vitreous.data.annotations.drawing import create_class_colours
from vitreous.errors import UsageError, VitreousError, WeightsError
from vitreous.generation.settings import count_forward_passes
from vitreous.inference.generators import get_generator
from vitreous.inference.predict import Predictor

if TYPE_CHECKING:
    from vitreous.generation.samplers import SamplerState
    from vitreous.inference.index import NeighbourIndex
    from vitreous.inference.samples import Generator, Sample


MAX_BATCH_SIZE = 64  # images per batch
FAST_STEP_SECONDS = 0.5  # if two denoising steps of an image take less, a batch is timed, too


@dataclass(eq=False)
class ServedModel:
    """A model that is ready to serve: it returned identical outputs for a noise image twice.

    `images_per_second` is the throughput with full batches, `note` a warning for the log. A generative model has a
    `generator`, request limits (`sampling`) and `step_seconds`, the seconds per denoising step of an image.
    """

    predictor: Predictor
    decode_settings: DecodeSettings
    images_per_second: float
    batch_size: int
    _: KW_ONLY
    has_features: bool = False
    index: NeighbourIndex | None = None
    note: str = ""
    generator: Generator | None = None
    sampling: SampleLimits | None = None
    step_seconds: float = 0.0
    cache: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def capabilities(self) -> dict[str, bool]:
        """Return which kinds of requests the model supports, by name."""
        from vitreous.apps.server import attention as attention_api

        bundle, card = self.predictor.bundle, self.predictor.card
        inspections = dict.fromkeys(("attention", "positions", "filters"), False) | (
            attention_api.detect_inspections(bundle) if bundle and card.task.inspectable else {}
        )
        return {
            **{name: card.task.supports_endpoint(name) for name in ("predict", "segment", "detect")},
            "embed": self.has_features,
            "frames": card.preprocess.is_animated,
            "sample": self.generator is not None,
            **inspections,
            "neighbours": self.index is not None,
            "zero_shot": can_embed_texts(self.predictor),
        }

    def describe(self) -> dict[str, Any]:
        """Return the document of GET /v1/model, without the server's limits."""
        from vitreous.version import __version__

        card, bundle = self.predictor.card, self.predictor.bundle
        config = bundle.model.config if bundle is not None else None
        patch, grid, depth, heads, prefix, pool = (
            getattr(config, name, None) for name in ("patch", "grid", "depth", "heads", "prefix", "pool")
        )
        return {
            "name": card.name,
            "version": card.version,
            "parameters": sum(p.numel() for p in bundle.model.parameters()) if bundle is not None else None,
            "classes": list(card.task.classes),
            "class_colours": create_class_colours(card.task.overlay_classes).tolist(),
            "image_size": list(card.preprocess.image),
            "channels": card.preprocess.channels,
            "patch_size": size_to_list(patch),
            "grid": size_to_list(grid),
            "layers": depth,
            "heads": heads if isinstance(heads, int) else None,
            "prefix_tokens": prefix,
            "pool": pool,
            "task": card.task.name,
            "targets": list(card.task.label_columns),
            "multilabel": card.classification.multilabel,
            "temperature": card.classification.temperature,
            "precision": self.predictor.engine.precision,
            "engine": self.predictor.engine.name,
            "provenance": card.provenance,
            "capabilities": self.capabilities,
            "sampling": self.sampling.describe() if self.sampling is not None else None,
            "vitreous": __version__,
        }


def size_to_list(value: Any) -> list[int] | None:
    """Convert a tuple or list of two numbers, or three for clips, to a list; None for other values."""
    return [int(n) for n in value] if isinstance(value, (tuple, list)) and len(value) in (2, 3) else None


def warm_up_predictor(
    predictor: Predictor, limits: ServerLimits, run: str | os.PathLike[str] | None = None
) -> ServedModel:
    """Warm up a predictor, check its outputs, and measure its throughput. `run` may contain an index of training
    images.

    Raises WeightsError if its outputs are not finite, have a wrong shape, or differ the second time; UsageError for a
    model of volumes or signals.
    """
    if (generator := get_generator(predictor)) is not None:
        return warm_up_generator(predictor, generator, limits)
    if not predictor.card.preprocess.is_browsable:
        problem = f"{predictor.card.name} takes {predictor.card.preprocess.noun}; the server supports images and clips"
        raise UsageError(problem, "use `vitreous predict RUN FILE …`")
    size = min(choose_batch_size(predictor), limits.queue or MAX_BATCH_SIZE)
    noise, card = predictor.card.preprocess.noise(), predictor.card
    compute_output = partial(card.task.compute, predictor.engine)
    shape = (1, *card.task.output_shape(card.preprocess.image))
    try:
        first_output, repeated = compute_output(noise), compute_output(noise)
    except VitreousError:
        raise
    except Exception as error:
        message = f"{card.name} fails: {str(error).splitlines()[0][:200]}"
        raise WeightsError(message, "check the model with `vitreous predict`") from error
    is_finite = bool(np.isfinite(first_output).all())
    axes_match = [expected in (None, length) for expected, length in zip(shape, first_output.shape, strict=False)]
    is_shaped = first_output.ndim == len(shape) and all(axes_match)
    if not is_shaped or not is_finite or not np.array_equal(first_output, repeated):
        symptom = "different outputs for the same input" if is_finite else "outputs that are not finite"
        message = f"{card.name} {card.version} returns {symptom}, shape {first_output.shape}"
        raise WeightsError(message, "train or export the model again")
    full_batch, seconds = predictor.card.preprocess.noise(size), []
    for _ in range(2):
        start = time.perf_counter()
        compute_output(full_batch)
        seconds.append(max(time.perf_counter() - start, 1e-6))
    index, note = open_run_index(predictor, run)
    served = ServedModel(
        predictor,
        DecodeSettings(card.preprocess, predictor.exact, limits.pixels),
        images_per_second=size / min(seconds),
        batch_size=size,
        has_features=can_compute_features(predictor),
        index=index,
        note=note,
    )
    served.describe()  # at startup, since it imports the inspection code
    return served


def warm_up_generator(predictor: Predictor, generator: Generator, limits: ServerLimits) -> ServedModel:
    """Warm up a generator by two denoising steps of an image, and measure its throughput. Raises WeightsError if the
    image is not finite, or differs the second time."""
    from vitreous.inference.samples import SampleOptions

    card, options, finite_steps = predictor.card, SampleOptions(steps=2), list[bool]()

    def record_finiteness(batch_slice: slice, state: SamplerState) -> None:
        """Record after each step whether the images are finite."""
        finite_steps.append(bool(state.image.isfinite().all()))

    def time_generation(count: int) -> tuple[list[Sample], float]:
        """Generate `count` images; return them and the elapsed seconds."""
        start, pairs = time.perf_counter(), [(0, index) for index in range(count)]
        samples = list(generator.generate(pairs, options, on_step=record_finiteness))
        return samples, max(time.perf_counter() - start, 1e-6)

    (first_samples, _), (repeated, seconds) = time_generation(1), time_generation(1)
    if not all(finite_steps) or not np.array_equal(first_samples[0].image, repeated[0].image):
        symptom = "different images for the same seed" if all(finite_steps) else "images that are not finite"
        raise WeightsError(f"{card.name} {card.version} returns {symptom}", "train the model again")
    passes = count_forward_passes(*options.resolve_sampler(generator.process))
    count = DEFAULT_BATCH_SIZE if seconds < FAST_STEP_SECONDS else 1
    batch_seconds = time_generation(count)[1] if count > 1 else seconds
    default_passes = count_forward_passes(*SampleOptions().resolve_sampler(generator.process))
    inpaint = generator.sampler.decode is None
    return ServedModel(
        predictor,
        DecodeSettings(card.preprocess, False, limits.pixels),
        images_per_second=count / (batch_seconds / passes * default_passes),
        batch_size=1,
        generator=generator,
        sampling=make_sample_limits(
            generator.classes, generator.process, card.preprocess.plane, limits.pixels, inpaint
        ),
        step_seconds=seconds / passes,
    )


def open_run_index(predictor: Predictor, run: str | os.PathLike[str] | None) -> tuple[NeighbourIndex | None, str]:
    """Open the run's index of training images, if any. Also return a warning, such as for an index of other weights, or
    ""."""
    from vitreous.inference.index import open_index

    if run is None or predictor.bundle is None:
        return None, ""
    try:
        return open_index(run), ""
    except VitreousError as error:
        return None, f"{error.message}: {error.hint}"


def choose_batch_size(predictor: Predictor) -> int:
    """Return the maximum batch size: one chunk per computing thread. Larger batches would only add waiting."""
    import sys

    chunk_size = int(getattr(predictor.engine, "chunk_size", DEFAULT_BATCH_SIZE))
    torch = sys.modules.get("torch")
    return min(chunk_size * (torch.get_num_threads() if torch is not None else 1), max(chunk_size, MAX_BATCH_SIZE))


def can_embed_texts(predictor: Predictor) -> bool:
    """Return whether the model has a text encoder, a tokenizer, and the library that reads it."""
    bundle = predictor.bundle
    has_tokenizer = bundle is not None and bundle.model.config.has_text and bundle.tokenizer is not None
    return has_tokenizer and find_spec("tokenizers") is not None


def can_compute_features(predictor: Predictor) -> bool:
    """Return whether the model has features. A bundle always has them; computing them would pack its weights twice."""
    if predictor.bundle is not None:
        return True
    try:
        return predictor.engine.features(predictor.card.preprocess.noise()).ndim == 2
    except (UsageError, NotImplementedError, AttributeError):
        return False
