"""`predict` and `embed`: names and probabilities, or features, of images."""

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
from vitreous.inference.card import Card
from vitreous.inference.class_maps import ClassMap, iterate_class_maps
from vitreous.inference.exported import is_exported_file, open_exported_file
from vitreous.inference.inputs import build_items, is_image
from vitreous.inference.notebook import format_card_html, format_card_text
from vitreous.inference.objects import DEFAULT_THRESHOLD, DetectOptions, ImageObjects, iterate_image_objects
from vitreous.inference.options import InferenceOptions
from vitreous.inference.pipeline import ItemOutput, choose_chunk_size, run_pipeline
from vitreous.inference.sources import Item, read_item, read_views
from vitreous.tasks.base import PredictionFormat, PredictionOptions
from vitreous.tasks.classification import Prediction
from vitreous.tasks.predictions import Predictions
from vitreous.tasks.regression import ValuePrediction
from vitreous.weights.options import WeightsSource, get_source_options

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

    from vitreous.inference.engine import Engine, Pixels
    from vitreous.inference.inputs import ImageInput
    from vitreous.keywords import ComputeKeywords, DetectKeywords, PredictKeywords, SegmentKeywords
    from vitreous.models.config import PositionResize
    from vitreous.models.zoo import Model
    from vitreous.weights.bundle import Bundle


ImagePrediction: TypeAlias = Prediction | ValuePrediction
AnyPrediction: TypeAlias = ImagePrediction | ClassMap | ImageObjects


@dataclass(frozen=True, eq=False)
class Embedding:
    """One image's features, (D,) float32; or why there are none."""

    path: str
    values: np.ndarray | None = None
    error: str | None = None


def stack_embeddings(rows: Sequence[Embedding]) -> np.ndarray:
    """(n, D) float32 values, NaN where there are none; D is 0 where no image has any."""
    width = next((len(row.values) for row in rows if row.values is not None), 0)
    table = np.full((len(rows), width), np.nan, np.float32)
    for number, row in enumerate(rows):
        if row.values is not None:
            table[number] = row.values
    return table


@dataclass(eq=False)
class Predictor:
    """A model ready to answer. `bundle` has its weights, for looking inside; an exported file has none. `origin`: the
    run, file or name that it was loaded from."""

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
        the answers here.

        Raises UsageError for an exported file, which has no modules.
        """
        if self.bundle is None:
            message = f"an exported file of {self.card.name} has no torch.nn.Module"
            raise UsageError(message, "load the run that it was exported from")
        return copy.deepcopy(self.bundle.model).float().eval().requires_grad_(True)

    @property
    def transform(self) -> Callable[[Image.Image], Tensor]:
        """A PIL image, path, bytes or array (H, W[, C]) -> (C, *image) float32 for `model`; for a Dataset."""
        return self.card.preprocess.transform

    def choose_engine(self, total_images: float = math.inf, features: bool = False) -> None:
        """Replace PyTorch by the fastest installed engine, if the engine is `auto` and `total_images` are enough to
        repay the measurement. `features`: for `embed`. Outputs change by at most
        `engine_choice.MAX_OUTPUT_DIFFERENCE`."""
        engine: Any = self.engine
        if getattr(engine, "options", None) is None or engine.options.engine != "auto":
            return
        from vitreous.inference.engine_choice import choose_chunk_engine

        if features:
            engine.feature_engine = chosen = choose_chunk_engine(engine.feature_engine, total_images)
            engine.options, engine.note = chosen.options, chosen.note
        else:
            self.engine = choose_chunk_engine(engine, total_images)

    @overload  # a str is an Iterable[str] too
    def predict(  # pyright: ignore[reportOverlappingOverload]
        self, images: ImageInput, **options: Unpack[PredictKeywords]
    ) -> AnyPrediction:
        """One image -> one answer."""
        ...

    @overload
    def predict(self, images: Iterable[ImageInput], **options: Unpack[PredictKeywords]) -> list[AnyPrediction]:
        """Several images -> a list."""
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
        """The `top` classes of an image (5 if not said) of a probability above `threshold`: one answer for one image,
        and a list for several, in the order given. Of a detector this is `detect`, with the same threshold, and of a
        model that gives a class to every pixel `segment`: `ImageObjects` and `ClassMap` in the place of `Prediction`.

        A regression model returns a `ValuePrediction`: the value of each target, in its unit.

        An image is a path, the bytes of a file, a PIL image, an array (H, W[, C]) or a tensor (C, H, W), as
        `vitreous.inference.inputs` says; a list may mix them. A tensor of four axes is refused: give `list(batch)`.

        Where an image may have several classes, and neither is said: all of a probability above 0.5. With the softmax
        loss probabilities are shared out among the classes, with the others each is a question of its own. Logits are
        divided by the model's temperature first. An image whose highest probability is below `abstain`, in (0, 1], is
        `unsure`. Raises UsageError for an `abstain` that cannot be, and DataError for a file that cannot be read; with
        `bad_images="skip"` its prediction has an `error` instead.
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
        """`predict` of a model whose head gives K numbers for a whole image."""
        answers = Predictions()
        form = self.prediction_format(options.top, options.threshold, options.abstain)
        for chunk in self.predictions(build_items(images, self.card.preprocess), form, bad_images):
            answers += chunk
            on_images(len(answers))
        return answers[0] if is_image(images) else answers

    def embed(
        self,
        images: ImageInput | Iterable[ImageInput],
        bad_images: Literal["stop", "skip"] = "stop",
        on_images: Callable[[int], None] = lambda done: None,
    ) -> np.ndarray:
        """What the head reads: an image -> (D,) float32, several -> (n, D) in the order given. Images are those of
        `predict`.

        Raises DataError for a file that cannot be read; with `bad_images="skip"` its row is NaN.
        """
        rows: list[Embedding] = []
        for chunk in self.embeddings(build_items(images, self.card.preprocess), bad_images):
            rows += chunk
            on_images(len(rows))
        vectors = stack_embeddings(rows)
        return vectors[0] if is_image(images) else vectors

    @overload  # a str is an Iterable[str] too
    def segment(  # pyright: ignore[reportOverlappingOverload]
        self, images: ImageInput, **options: Unpack[SegmentKeywords]
    ) -> ClassMap:
        """One image -> one answer."""
        ...

    @overload
    def segment(self, images: Iterable[ImageInput], **options: Unpack[SegmentKeywords]) -> list[ClassMap]:
        """Several images -> a list."""
        ...

    def segment(
        self,
        images: ImageInput | Iterable[ImageInput],
        bad_images: Literal["stop", "skip"] = "stop",
        pictures: bool = False,
    ) -> ClassMap | list[ClassMap]:
        """The class of each pixel, at the image's own size: one answer for one image, and a list for several.

        Raises UsageError for a model that names classes of images, and DataError for a file that cannot be read; with
        `bad_images="skip"` its answer has an `error` instead. `pictures`: keep them, for `draw_overlay`.
        """
        answers = list(
            iterate_class_maps(self.card, self.engine, build_items(images, self.card.preprocess), bad_images, pictures)
        )
        return answers[0] if is_image(images) else answers

    @overload  # a str is an Iterable[str] too
    def detect(  # pyright: ignore[reportOverlappingOverload]
        self, images: ImageInput, **options: Unpack[DetectKeywords]
    ) -> ImageObjects:
        """One image -> one answer."""
        ...

    @overload
    def detect(self, images: Iterable[ImageInput], **options: Unpack[DetectKeywords]) -> list[ImageObjects]:
        """Several images -> a list."""
        ...

    def detect(
        self,
        images: ImageInput | Iterable[ImageInput],
        threshold: float = DEFAULT_THRESHOLD,
        tiles: bool = False,
        bad_images: Literal["stop", "skip"] = "stop",
        pictures: bool = False,
    ) -> ImageObjects | list[ImageObjects]:
        """The objects on an image whose score is at least `threshold`, the highest first: boxes, names, scores and, of
        instances, masks, at the image's own size. One answer for one image, and a list for several.

        The image is scaled to fit into the model's size; with `tiles` a larger one is answered at its own resolution by
        tiles that overlap. `pictures`: keep them, for `draw_overlay`. Raises UsageError for a model that finds no
        objects, and DataError for a file that cannot be read; with `bad_images="skip"` its answer has an `error`.
        """
        items, options = build_items(images, self.card.preprocess), DetectOptions(threshold, tiles)
        answers = list(
            iterate_image_objects(
                self.card, self.engine, items=items, options=options, bad_images=bad_images, pictures=pictures
            )
        )
        return answers[0] if is_image(images) else answers

    def predictions(
        self, items: Iterable[Item], form: PredictionFormat, bad_images: str = "skip"
    ) -> Iterator[list[ImagePrediction]]:
        """Items -> answers in order, at most a few hundred in memory. Raises UsageError for a model without a head."""
        self.require_outputs()
        for chunk in self.rows(items, self.activations, bad_images):
            yield [
                form.fail(item.name, row.message) if isinstance(row, DataError) else form.predict(row, item.name)
                for item, row in chunk
            ]

    def embeddings(self, items: Iterable[Item], bad_images: str = "skip") -> Iterator[list[Embedding]]:
        """Items -> features (D,) in order, some at a time."""
        features = self.clip_views.mean(self.engine.features) if self.clip_views else self.engine.features
        for chunk in self.rows(items, features, bad_images):
            yield [
                Embedding(item.name, error=row.message) if isinstance(row, DataError) else Embedding(item.name, row)
                for item, row in chunk
            ]

    def rows(
        self, items: Iterable[Item], compute: Callable[[np.ndarray], np.ndarray], bad_images: str
    ) -> Iterator[list[ItemOutput]]:
        """Items with their row of `compute`, (B, C, *image) -> (B, ...), or a DataError; raised where `bad_images` is
        stop."""
        size = max(1, choose_chunk_size(self.card.preprocess) // (self.clip_views.count if self.clip_views else 1))
        for chunk in run_pipeline(items, self.picture, compute, size):
            if bad_images == "stop" and (bad := next((row for _, row in chunk if isinstance(row, DataError)), None)):
                raise bad
            yield chunk

    def picture(self, item: Item) -> np.ndarray | DataError:
        """An item as (C, *image) pixels, or its views (V, C, *image), or why it cannot be read."""
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
        """How outputs become predictions, with the model's defaults for unset options; `usual`: the number of classes
        where `top` is unset. Raises UsageError for options that the task does not have, for an `abstain` that cannot
        be, and as `require_outputs`."""
        self.require_outputs()
        return self.card.task.prediction_format(PredictionOptions(top, threshold, abstain, usual))

    def activations(self, pixels: Pixels) -> np.ndarray:
        """(B, C, *image) pixels, or views (B, V, C, *image) -> (B, K) float64: probabilities of classes, or values of
        targets."""
        if self.clip_views is None:
            return self.card.task.activate(self.engine.logits(pixels))
        assert isinstance(pixels, np.ndarray)  # clips are of one size
        return self.card.task.activate(self.clip_views.mean(self.engine.logits)(pixels))


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
    """A trained model, ready for `.predict("dog.jpg")` and `.embed("dog.jpg")`: of a run folder, a bundle, an exported
    file or foreign weights. `.model` is its torch.nn.Module, and `.transform` makes its input of a picture.

    `options` are `device`, `precision`, `engine`, `merge_tokens` and `clip_views`: what computes, as on the command
    line; `how` has the same. int8 is calibrated on the run's training images, and on the files `examples` where those
    cannot be opened.
    `engine="auto"` measures the installed engines (`Predictor.choose_engine`); unset, PyTorch computes.
    `exact` decodes every JPEG at its full size. A model without a head is refused unless it may be `headless`. `quick`
    answers one image alone sooner, many later. `resize`, a rule of `nn.grid.RESIZE_MODES`, and `source_size`, pixels of
    one side or (height, width), say of the positions of foreign weights what their files do not tell (docs/weights.md).
    `native_aspect` reads every picture at its own aspect ratio, of at most `tokens` patches. Raises UsageError where
    there is no run and for an unknown option, WeightsError where the bundle is damaged.
    """
    if options:
        known = ("exact", "headless", "quick", "examples", "resize", "source_size", "native_aspect", "tokens")
        (how,) = apply_keyword_options("load", dict(options), how or InferenceOptions(), known=known)
    check_path_argument(run, "load(run)")
    if (source := WeightsSource(os.fspath(run), resize, source_size, native_aspect, tokens=tokens)).words:
        run = source
    if is_exported_file(run):
        if words := get_source_options(run):
            message = f"{run} is an exported file, in which positions and the size of images are fixed"
            raise UsageError(message, f"leave {words[0]} out, and export it again")
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


def build_predictor(
    run: str | os.PathLike[str],
    bundle: Bundle,
    how: InferenceOptions | None = None,
    examples: Iterable[str | os.PathLike[str] | bytes] = (),
    exact: bool = False,
    quick: bool = False,
) -> Predictor:
    """The bundle of `run`, ready to answer about images; the options are those of `load`. Raises UsageError for options
    that do not go together."""
    from vitreous.data.run_data import iterate_calibration_images
    from vitreous.inference.card import build_card
    from vitreous.inference.engine import make_engine

    def given() -> Iterator[Tensor]:
        for example in examples:
            with suppress(DataError):
                yield bundle.preprocess.to_tensor(bundle.preprocess.decode(example))

    how = how or InferenceOptions()
    views, alone = parse_clip_views(how.clip_views, bundle.preprocess), replace(how, clip_views=SINGLE_VIEW)
    engine = make_engine(
        bundle.model, bundle.preprocess, alone, lambda: iterate_calibration_images(run, bundle.preprocess, given)
    )
    engine.low_latency = quick
    return Predictor(build_card(bundle), engine, bundle=bundle, exact=exact, clip_views=views, origin=os.fspath(run))
