"""Load a trained model for inference: `load` and `Predictor`, with `predict`, `embed`, `segment` and `detect`."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, Unpack, overload

import numpy as np

from vitreous.config import apply_keyword_options
from vitreous.data.clip_views import SINGLE_VIEW, ClipViews, parse_clip_views
from vitreous.errors import DataError, UsageError, check_path_argument
from vitreous.inference.card import Card, format_card_html, format_card_text
from vitreous.inference.class_maps import ClassMap, iterate_class_maps
from vitreous.inference.exported import is_exported_file, open_exported_file
from vitreous.inference.inputs import build_items, is_image
from vitreous.inference.objects import DEFAULT_THRESHOLD, DetectOptions, ImageObjects, iterate_image_objects
from vitreous.inference.options import InferenceOptions
from vitreous.inference.pipeline import ItemOutput, choose_chunk_size, run_pipeline
from vitreous.inference.sources import Item, read_item, read_views
from vitreous.tasks.base import PredictionFormat, PredictionOptions
from vitreous.tasks.classification import Prediction
from vitreous.tasks.predictions import Predictions
from vitreous.tasks.regression import ValuePrediction
from vitreous.weights.options import WeightsSource, get_label_source, get_source_options

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

    from vitreous.inference.engine import Engine, Pixels
    from vitreous.inference.inputs import ImageInput
    from vitreous.inference.zero_shot import TextEmbedder
    from vitreous.keywords import ComputeKeywords, DetectKeywords, PredictKeywords, SegmentKeywords
    from vitreous.models.config import PositionResize
    from vitreous.models.zoo import Model
    from vitreous.weights.bundle import Bundle


ImagePrediction: TypeAlias = Prediction | ValuePrediction
AnyPrediction: TypeAlias = ImagePrediction | ClassMap | ImageObjects


@dataclass(frozen=True, eq=False)
class Embedding:
    """The features of one image, (D,) float32, or the error if it could not be read."""

    path: str
    values: np.ndarray | None = None
    error: str | None = None


def stack_embeddings(embeddings: Sequence[Embedding]) -> np.ndarray:
    """Stack embeddings to (n, D) float32, with NaN for unreadable images; D is 0 if no image is readable."""
    width = next((len(embedding.values) for embedding in embeddings if embedding.values is not None), 0)
    matrix = np.full((len(embeddings), width), np.nan, np.float32)
    for index, embedding in enumerate(embeddings):
        if embedding.values is not None:
            matrix[index] = embedding.values
    return matrix


@dataclass(eq=False)
class Predictor:
    """A model ready for inference. `bundle` holds its weights, None for an exported file. `exact`: decode every JPEG at
    full size. `clip_views`: views of each clip whose outputs are averaged, None for one view. `origin`: the run, file
    or name that it was loaded from."""

    card: Card
    engine: Engine
    bundle: Bundle | None = None
    exact: bool = False
    _: KW_ONLY
    clip_views: ClipViews | None = None
    origin: str = ""

    def __repr__(self) -> str:
        return format_card_text(self.card, self.origin, self.engine.precision)

    def _repr_html_(self) -> str:
        count = sum(p.numel() for p in self.bundle.model.parameters()) if self.bundle else None
        return format_card_html(self.card, self.origin, count, self.engine.precision)

    @cached_property
    def model(self) -> Model:
        """A copy of the model, a torch.nn.Module: float32, trainable, in evaluation mode. Training it does not change
        the predictions of this object.

        Raises UsageError for an exported file, which has no modules.
        """
        if self.bundle is None:
            message = f"an exported file of {self.card.name} has no torch.nn.Module"
            raise UsageError(message, "load the run that it was exported from")
        return copy.deepcopy(self.bundle.model).float().eval().requires_grad_(True)

    @property
    def transform(self) -> Callable[[Image.Image], Tensor]:
        """The preprocessing of `model` as a transform for a Dataset: PIL image, path, bytes or array (H, W[, C]) -> (C,
        *image) float32."""
        return self.card.preprocess.transform

    @cached_property
    def text_embedder(self) -> TextEmbedder:
        """The text encoder of the model, which caches embeddings. Raises UsageError for a model without one,
        WeightsError without a tokenizer."""
        if self.bundle is None:
            raise UsageError(
                f"an exported file of {self.card.name} has no text encoder", "use the weights of the model"
            )
        from vitreous.inference.zero_shot import TextEmbedder  # imports PyTorch

        return TextEmbedder(self.bundle, self.origin)

    def embed_texts(self, texts: Sequence[str]) -> np.ndarray:
        """Compute normalised embeddings of texts, (T, E) float32, which can be compared with those of images by their
        inner product. Raises UsageError for a model without a text encoder, and for a text that is too long."""
        return self.text_embedder.embed_texts(texts)

    def choose_engine(self, total_images: float = math.inf, features: bool = False) -> None:
        """Replace the PyTorch engine by the fastest installed one for a job of `total_images` images, if the option
        `engine` is `auto` and the job is long enough to justify the measurement. `features`: the job is `embed`.
        Outputs change by at most `engine_choice.MAX_OUTPUT_DIFFERENCE`."""
        engine: Any = self.engine
        if getattr(engine, "options", None) is None or engine.options.engine != "auto":
            return
        from vitreous.inference.engine_choice import choose_chunk_engine

        if features:
            engine.feature_engine = feature_engine = choose_chunk_engine(engine.feature_engine, total_images)
            engine.options, engine.note = feature_engine.options, feature_engine.note
        else:
            self.engine = choose_chunk_engine(engine, total_images)

    @overload  # a str is an Iterable[str] too
    def predict(  # pyright: ignore[reportOverlappingOverload]
        self, images: ImageInput, **options: Unpack[PredictKeywords]
    ) -> AnyPrediction:
        """Return one prediction for one image."""
        ...

    @overload
    def predict(self, images: Iterable[ImageInput], **options: Unpack[PredictKeywords]) -> list[AnyPrediction]:
        """Return a list of predictions for several images."""
        ...

    def predict(
        self,
        images: ImageInput | Iterable[ImageInput],
        top: int | None = None,
        bad_images: Literal["stop", "skip"] = "stop",
        on_images: Callable[[int], None] = lambda done: None,
        threshold: float | None = None,
        abstain: float | None = None,
    ) -> AnyPrediction | list[AnyPrediction]:
        """Predict the `top` classes of images (default 5) with a probability above `threshold`.

        Returns one prediction for one image, and a list for several, in order. For a detector this is `detect` with the
        same threshold, and for a segmentation model `segment`; they return `ImageObjects` and `ClassMap`.

        A regression model returns a `ValuePrediction`: the value of each target, in its unit.

        An image is a path, the bytes of a file, a PIL image, an array (H, W[, C]) or a tensor (C, H, W), see
        `vitreous.inference.inputs`; a list may mix them. A tensor with four axes is rejected: give `list(batch)`.

        Default for multi-label models: all classes with a probability above 0.5. Probabilities are a softmax over the
        classes for the softmax loss, and one sigmoid per class for the other losses. Logits are first divided by the
        model's temperature. An image whose highest probability is below `abstain`, in (0, 1], is `unsure`. Raises
        UsageError for an invalid `abstain`, and DataError for an unreadable file; with `bad_images="skip"` its
        prediction has an `error` instead.
        """
        options = PredictionOptions(top, threshold, abstain)
        return self.card.task.predict_images(self, images, options, bad_images, on_images)

    def predict_outputs(
        self,
        images: ImageInput | Iterable[ImageInput],
        options: PredictionOptions,
        bad_images: Literal["stop", "skip"] = "stop",
        on_images: Callable[[int], None] = lambda done: None,
    ) -> ImagePrediction | list[ImagePrediction]:
        """Run `predict` for a task with K outputs per image: classification or regression."""
        predictions = Predictions()
        prediction_format = self.prediction_format(options.top, options.threshold, options.abstain)
        for chunk in self.predictions(build_items(images, self.card.preprocess), prediction_format, bad_images):
            predictions += chunk
            on_images(len(predictions))
        return predictions[0] if is_image(images) else predictions

    def embed(
        self,
        images: ImageInput | Iterable[ImageInput],
        bad_images: Literal["stop", "skip"] = "stop",
        on_images: Callable[[int], None] = lambda done: None,
    ) -> np.ndarray:
        """Compute the features (the head's input) of images: (D,) float32 for one image, (n, D) for several, in order.
        Images are as in `predict`. Raises DataError for an unreadable file; with `bad_images="skip"` its row is NaN."""
        embeddings: list[Embedding] = []
        for chunk in self.embeddings(build_items(images, self.card.preprocess), bad_images):
            embeddings += chunk
            on_images(len(embeddings))
        vectors = stack_embeddings(embeddings)
        return vectors[0] if is_image(images) else vectors

    @overload  # a str is an Iterable[str] too
    def segment(  # pyright: ignore[reportOverlappingOverload]
        self, images: ImageInput, **options: Unpack[SegmentKeywords]
    ) -> ClassMap:
        """Return one class map for one image."""
        ...

    @overload
    def segment(self, images: Iterable[ImageInput], **options: Unpack[SegmentKeywords]) -> list[ClassMap]:
        """Return a list of class maps for several images."""
        ...

    def segment(
        self,
        images: ImageInput | Iterable[ImageInput],
        bad_images: Literal["stop", "skip"] = "stop",
        keep_images: bool = False,
    ) -> ClassMap | list[ClassMap]:
        """Predict the class of each pixel at the native image size: one class map for one image, a list for several.
        `keep_images` keeps the images for `draw_overlay`. Raises UsageError for a model that does not segment images,
        and DataError for an unreadable file; with `bad_images="skip"` its result has an `error` instead."""
        class_maps = list(
            iterate_class_maps(
                self.card, self.engine, build_items(images, self.card.preprocess), bad_images, keep_images
            )
        )
        return class_maps[0] if is_image(images) else class_maps

    @overload  # a str is an Iterable[str] too
    def detect(  # pyright: ignore[reportOverlappingOverload]
        self, images: ImageInput, **options: Unpack[DetectKeywords]
    ) -> ImageObjects:
        """Return the detected objects of one image."""
        ...

    @overload
    def detect(self, images: Iterable[ImageInput], **options: Unpack[DetectKeywords]) -> list[ImageObjects]:
        """Return a list of detected objects per image for several images."""
        ...

    def detect(
        self,
        images: ImageInput | Iterable[ImageInput],
        threshold: float = DEFAULT_THRESHOLD,
        tiles: bool = False,
        bad_images: Literal["stop", "skip"] = "stop",
        keep_images: bool = False,
    ) -> ImageObjects | list[ImageObjects]:
        """Detect objects with scores of at least `threshold`, highest first: boxes, class names, scores and instance
        masks, at the native image size. Returns one result for one image, a list for several.

        The image is resized to fit the model's size; with `tiles` a larger one is processed at its native resolution in
        overlapping tiles. `keep_images` keeps the images for `draw_overlay`. Raises UsageError for a model that is not
        a detector, and DataError for an unreadable file; with `bad_images="skip"` its result has an `error` instead.
        """
        items, options = build_items(images, self.card.preprocess), DetectOptions(threshold, tiles)
        detections = list(
            iterate_image_objects(
                self.card, self.engine, items=items, options=options, bad_images=bad_images, keep_images=keep_images
            )
        )
        return detections[0] if is_image(images) else detections

    def predictions(
        self, items: Iterable[Item], prediction_format: PredictionFormat, bad_images: str = "skip"
    ) -> Iterator[list[ImagePrediction]]:
        """Yield the predictions of items in order, chunk by chunk of a few hundred. Raises UsageError for a model
        without outputs for whole images."""
        self.require_outputs()
        for chunk in self.iterate_outputs(items, self.activations, bad_images):
            yield [
                prediction_format.format_error(item.name, output.message)
                if isinstance(output, DataError)
                else prediction_format.predict(output, item.name)
                for item, output in chunk
            ]

    def embeddings(self, items: Iterable[Item], bad_images: str = "skip") -> Iterator[list[Embedding]]:
        """Yield the features (D,) of items in order, chunk by chunk."""
        features = self.clip_views.average_over_views(self.engine.features) if self.clip_views else self.engine.features
        for chunk in self.iterate_outputs(items, features, bad_images):
            yield [
                Embedding(item.name, error=output.message)
                if isinstance(output, DataError)
                else Embedding(item.name, output)
                for item, output in chunk
            ]

    def iterate_outputs(
        self, items: Iterable[Item], compute: Callable[[np.ndarray], np.ndarray], bad_images: str
    ) -> Iterator[list[ItemOutput]]:
        """Yield items with their output, a row of `compute` (B, C, *image) -> (B, ...), or their DataError, chunk by
        chunk. If `bad_images` is stop, the DataError is raised instead."""
        size = max(1, choose_chunk_size(self.card.preprocess) // (self.clip_views.count if self.clip_views else 1))
        for chunk in run_pipeline(items, self.read_pixels, compute, size):
            if bad_images == "stop" and (
                read_error := next((output for _, output in chunk if isinstance(output, DataError)), None)
            ):
                raise read_error
            yield chunk

    def read_pixels(self, item: Item) -> np.ndarray | DataError:
        """Read an item as (C, *image) pixels, or its views (V, C, *image); return the error if it cannot be read."""
        try:
            preprocess = self.card.preprocess
            if self.clip_views:
                return read_views(item, preprocess, self.clip_views)
            return read_item(item, preprocess, self.exact)
        except DataError as error:
            return error

    def require_outputs(self) -> None:
        """Raise UsageError for a model without outputs for whole images."""
        if self.card.task.outputs:
            return
        problem, hint = self.card.task.missing_outputs
        raise UsageError(f"{self.card.name} {problem}", hint)

    def prediction_format(
        self, top: int | None = None, threshold: float | None = None, abstain: float | None = None, usual: int = 5
    ) -> PredictionFormat:
        """Return the format of predictions for the task, with the model's defaults for unset options. `usual`: the
        default for `top`. Raises UsageError for options that the task does not support, for an invalid `abstain`, and
        for a model without outputs for whole images."""
        self.require_outputs()
        return self.card.task.prediction_format(PredictionOptions(top, threshold, abstain, usual))

    def activations(self, pixels: Pixels) -> np.ndarray:
        """Compute (B, K) float64 probabilities of classes, or values of regression targets, from (B, C, *image) pixels
        or views (B, V, C, *image)."""
        if self.clip_views is None:
            return self.card.task.activate(self.engine.logits(pixels))
        assert isinstance(pixels, np.ndarray)  # clips have the same size
        return self.card.task.activate(self.clip_views.average_over_views(self.engine.logits)(pixels))


def load(
    run: str | os.PathLike[str],
    how: InferenceOptions | None = None,
    examples: Iterable[str | os.PathLike[str] | bytes] = (),
    exact: bool = False,
    headless: bool = False,
    quick: bool = False,
    resize: PositionResize | None = None,
    source_size: int | tuple[int, int] | None = None,
    native_aspect: bool = False,
    tokens: int | None = None,
    **options: Unpack[ComputeKeywords],
) -> Predictor:
    """Load a trained model for `.predict("dog.jpg")` and `.embed("dog.jpg")`, from a run folder, a bundle, an exported
    file or foreign weights. `.model` is its torch.nn.Module, and `.transform` its preprocessing transform.

    `options` are `device`, `precision`, `engine`, `merge_tokens` and `clip_views`, as on the command line; `how` has
    the same fields. int8 is calibrated on the run's training images, or on the files `examples` if the training data
    are not available. `engine="auto"` measures the installed engines (`Predictor.choose_engine`); the default is
    PyTorch.

    `exact` decodes every JPEG at its full size. A model without a head is rejected unless `headless`. `quick` optimises
    the latency of single images over throughput. `resize`, a rule of `nn.grid.RESIZE_MODES`, and `source_size`, pixels
    of one side or (height, width), describe the position embeddings of foreign weights if their files do not
    (docs/reference/weights.md). `native_aspect` keeps the aspect ratio of every image, with at most `tokens` patches.
    Raises UsageError for a missing run or an unknown option, WeightsError for a damaged bundle.
    """
    if options:
        known_keywords = ("exact", "headless", "quick", "examples", "resize", "source_size", "native_aspect", "tokens")
        (how,) = apply_keyword_options("load", dict(options), how or InferenceOptions(), extra_names=known_keywords)
    check_path_argument(run, "load(run)")
    if (source := WeightsSource(os.fspath(run), resize, source_size, native_aspect, tokens=tokens)).to_command_options:
        run = source
    if is_exported_file(run):
        if get_label_source(run):
            raise UsageError(f"{run} is an exported file, which has no text encoder", "use the weights of the model")
        if source_options := get_source_options(run):
            message = f"{run} is an exported file, whose position embeddings and image size are fixed"
            raise UsageError(message, f"leave {source_options[0]} out, and export it again")
        file = open_exported_file(run, how, quick)
        views = parse_clip_views(how.clip_views if how else SINGLE_VIEW, file.card.preprocess)
        return Predictor(file.card, file, exact=exact, clip_views=views, origin=os.fspath(run))
    from vitreous.inference.open_model import open_bundle

    predictor = build_predictor(
        run, open_bundle(run, headless, dense=True), how=how, examples=examples, exact=exact, quick=quick
    )
    if "engine" in options:
        predictor.choose_engine()
    return predictor


def build_zero_shot_classifier(
    run: str | os.PathLike[str],
    labels: Sequence[str],
    templates: str | Sequence[str] = (),
    multilabel: bool = False,
    **options: Unpack[ComputeKeywords],
) -> Predictor:
    """Build a classifier for `labels` from a model with a text encoder: `.predict("photo.jpg")` returns probabilities.

    `templates`: a name such as `openai`, or texts with `{}` (default: that of the model). `multilabel`: a sigmoid per
    label instead of a softmax over all. `options` as for `load`. Raises UsageError for invalid labels and for a model
    without a text encoder, WeightsError without a tokenizer.
    """
    base = run if isinstance(run, WeightsSource) else WeightsSource(os.fspath(run))
    names = (templates,) if isinstance(templates, str) else tuple(templates)
    return load(replace(base, labels=tuple(labels), templates=names, multilabel=multilabel), **options)


def build_predictor(
    run: str | os.PathLike[str],
    bundle: Bundle,
    how: InferenceOptions | None = None,
    examples: Iterable[str | os.PathLike[str] | bytes] = (),
    exact: bool = False,
    quick: bool = False,
) -> Predictor:
    """Build a predictor from the bundle of `run`, with the options of `load`. Raises UsageError for incompatible
    options."""
    from vitreous.data.run_data import iterate_calibration_images
    from vitreous.inference.card import build_card
    from vitreous.inference.engine import make_engine

    def iterate_example_tensors() -> Iterator[Tensor]:
        """Yield the readable example images as model input."""
        for example in examples:
            with suppress(DataError):
                yield bundle.preprocess.to_tensor(bundle.preprocess.decode(example))

    how = how or InferenceOptions()
    views, single_view = parse_clip_views(how.clip_views, bundle.preprocess), replace(how, clip_views=SINGLE_VIEW)
    engine = make_engine(
        bundle.model,
        bundle.preprocess,
        single_view,
        lambda: iterate_calibration_images(run, bundle.preprocess, iterate_example_tensors),
    )
    engine.low_latency = quick
    return Predictor(build_card(bundle), engine, bundle=bundle, exact=exact, clip_views=views, origin=os.fspath(run))
