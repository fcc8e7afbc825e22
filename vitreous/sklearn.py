"""Vision Transformers as scikit-learn estimators, for pipelines, grid search, cross-validation and pickles.

    VitreousClassifier    classifies images, trained as by `vitreous train`
    VitreousRegressor     predicts one or several values per image, trained as by `vitreous train`
    VitreousEmbedder      extracts features of images, with loaded weights or with a model trained without labels

`fit` and all other methods accept n images in one of these forms:

- an array (n, H, W) or (n, H, W, C) of images; uint8 with C of 1 or 3 are 8-bit colours, all other arrays are numeric
  values, whose mean and standard deviation are measured
- an array or data frame (n, features), reshaped to images of `image_shape`; if that is not set, tabular data, of which
  each value is a token
- a list of paths of image files, or one column of them
- a list of PIL images, or of arrays (H, W[, C]), of any sizes

Standardise tabular data first: `make_pipeline(StandardScaler(), VitreousClassifier())`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeAlias

import numpy as np
from numpy.typing import ArrayLike
from PIL import Image
from sklearn.base import (
    BaseEstimator,
    ClassifierMixin,
    ClassNamePrefixFeaturesOutMixin,
    RegressorMixin,
    TransformerMixin,
)
from sklearn.utils import Tags, check_array, check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data

from vitreous.config import apply_keyword_options
from vitreous.data.memory import create_memory_data
from vitreous.errors import DataError, UsageError
from vitreous.inference.inputs import build_items
from vitreous.inference.options import InferenceOptions
from vitreous.inference.predict import Predictor, build_predictor, load
from vitreous.inference.sources import Item
from vitreous.jobs.in_memory import train_in_memory
from vitreous.progress import NullListener, ProgressDisplay
from vitreous.recipes.options import TrainOptions
from vitreous.weights.bundle import Bundle

ROW_MODEL = "ViT-32x2/1"  # default model for tabular data
MAX_ROW_TOKENS = 64  # maximum number of tokens per row: in longer rows, a token has several values
IMAGE_CHANNELS = (1, 3, 4)  # numbers of channels of grey, RGB and RGBA images
MIN_ROW_TOKENS = 4  # minimum number of tokens per row, by zero-padding: some recipes mask tokens
SEED_RANGE = 2**31  # seeds are 0 to SEED_RANGE - 1
# options of `train` that estimators do not support
UNSUPPORTED_TRAIN_OPTIONS = ("out", "resume", "override", "dry_run", "data", "seed")

Picture: TypeAlias = str | Image.Image | np.ndarray
Images: TypeAlias = np.ndarray | list[Picture]
#: inputs of estimators: an array or a data frame, paths, or images
ImagesLike: TypeAlias = ArrayLike | Sequence[str | os.PathLike[str] | Image.Image]


class ImageEstimator(BaseEstimator):
    """Base class of the estimators: conversion of X, training, and storage of the model.

    `bundle_` is the trained model with its task and preprocessing. `predictor_` predicts with it and is the object that
    `vitreous.load` returns.
    """

    image_shape: tuple[int, ...] | None
    augment: bool | str
    random_state: int | np.random.RandomState | None
    verbose: bool
    train_options: Mapping[str, object] | None
    bundle_: Bundle
    predictor_: Predictor

    def fit_model(
        self,
        images: Images,
        labels: np.ndarray | None,
        options: Mapping[str, object],
        classes: Sequence[str] = (),
        targets: Sequence[str] = (),
    ) -> None:
        """Train a model, and set `bundle_`, `predictor_`, `summary_` and `history_`. `labels` are indices into
        `classes`, (n,) int64; or values of `targets`, (n, T) float64; or None for training without labels. `options` of
        `vitreous.train` override the parameters of this estimator. Raises the errors of `vitreous.train`."""
        run_options = self.build_train_options(options)
        display = ProgressDisplay() if self.verbose else None
        try:
            outcome = train_in_memory(
                create_memory_data(images, labels, classes, targets),
                run_options,
                display or NullListener(),
                self.should_augment(images),
            )
        finally:
            if display is not None:
                display.close()
        bundle, self.summary_, self.history_ = outcome
        self.keep(bundle)

    def build_train_options(self, options: Mapping[str, object]) -> TrainOptions:
        """Build the options of a run from this estimator's parameters, `options`, and `train_options`. If several set
        an option, the last of these applies. Raises UsageError for an unsupported option, and as `vitreous.train`."""
        parameters = {name: getattr(self, name, None) for name in ("model", "epochs", "batch_size", "lr", "init")}
        fit_options: dict[str, Any] = dict(options)
        train_options: dict[str, Any] = dict(self.train_options or {})
        if unsupported := sorted(set(train_options) & set(UNSUPPORTED_TRAIN_OPTIONS)):
            hint = "use random_state for the seed; the run folder is temporary, so use save(FOLDER) to keep the model"
            raise UsageError(f"train_options cannot have {', '.join(unsupported)}", hint)
        settings = {**fit_options.pop("settings", {}), **train_options.pop("settings", {})}
        seed = int(check_random_state(self.random_state).randint(SEED_RANGE))
        parameters = {name: value for name, value in parameters.items() if value is not None}
        merged = {**parameters, **fit_options, **train_options, "seed": seed, "settings": settings}
        return apply_keyword_options("train_options", merged, TrainOptions("memory"))[0]

    def should_augment(self, images: Images) -> bool:
        """Return the parameter `augment`; if it is "auto", whether the images are 8-bit colours."""
        if self.augment != "auto":
            return bool(self.augment)
        return isinstance(images, list) or images.dtype == np.uint8

    def keep(self, bundle: Bundle) -> None:
        """Store a model as `bundle_`, and build its `predictor_`."""
        device = str((self.train_options or {}).get("device") or "auto")
        self.bundle_ = bundle
        self.predictor_ = build_predictor("", bundle, InferenceOptions(device=device))

    def read_images(self, X: ImagesLike, reset: bool) -> Images:
        """Convert X to an array (n, H, W[, C]), uint8 or float32, or to a list of paths, PIL images or arrays. Channels
        of X may come first or last. `reset` is that of scikit-learn's `validate_data`: True in `fit`. Raises ValueError
        and TypeError as `validate_data`, and UsageError for an `image_shape` that does not fit."""
        if (image_list := as_image_list(X)) is not None:
            if not image_list:
                raise ValueError("Found array with 0 sample(s) while a minimum of 1 is required.")
            return [move_channels_last(image) if isinstance(image, np.ndarray) else image for image in image_list]
        if getattr(X, "ndim", 2) > 2:
            options: dict[str, Any] = {"allow_nd": True, "dtype": None, "ensure_2d": False, "estimator": self}
            array: np.ndarray = check_array(X, **options)
            if array.ndim > 4:
                raise ValueError(
                    f"Found array with dim {array.ndim}, expected (n, H, W), (n, H, W, C) or (n, C, H, W)."
                )
            if array.ndim == 3 and array.dtype == np.uint8 and array.shape[2] in (3, 4):
                raise ValueError(f"X of shape {array.shape} is a single colour image: pass X[None]")
            return as_pixel_array(array)
        untyped_input: Any = X
        table: Any = validate_data(self, untyped_input, reset=reset, dtype=None if is_numeric(X) else "numeric")
        if self.image_shape is None:
            if not reset and self.bundle_.preprocess.image[0] != 1:
                raise ValueError(f"X has {table.shape[1]} features, but the model needs images: set image_shape")
            return as_token_rows(table)
        shape = tuple(self.image_shape)
        if int(np.prod(shape)) != table.shape[1] or len(shape) not in (2, 3):
            problem = f"image_shape={shape} does not have {table.shape[1]} values, the number of features of X"
            raise UsageError(problem, "set image_shape to (H, W) or (H, W, C) whose product is the number of features")
        return as_pixel_array(table.reshape(len(table), *shape))

    def items(self, X: ImagesLike) -> list[Item]:
        """Convert X to input items of the predictor. Raises as `read_images`."""
        images, preprocess = self.read_images(X, reset=False), self.predictor_.card.preprocess
        if isinstance(images, np.ndarray):
            images = list(preprocess.cast_pixels(images))
        return build_items(images, preprocess)

    def compute_rows(self, X: ImagesLike, compute: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Compute outputs (n, ...) of the model for the n images of X. `compute` maps a batch of pixels (B, C, *image)
        to outputs (B, ...). Raises DataError for an unreadable file."""
        chunks = self.predictor_.iterate_outputs(self.items(X), compute, "stop")
        return np.stack([output for chunk in chunks for _, output in chunk if not isinstance(output, DataError)])

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Save the model as a bundle for all commands and `vitreous.load`. Raises UsageError if the path exists."""
        check_is_fitted(self, "bundle_")
        folder = Path(path)
        if folder.exists() or folder.is_symlink():
            raise UsageError(f"{folder} already exists and is not overwritten", "use another path")
        self.bundle_.save(folder)
        return folder

    def __getstate__(self) -> dict[str, object]:
        """Return the state without the predictor, which is rebuilt after unpickling."""
        state: Any = super().__getstate__()  # the state of scikit-learn, which contains its version
        return {name: value for name, value in state.items() if name != "predictor_"}

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        if hasattr(self, "bundle_"):
            self.keep(self.bundle_)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        tags.input_tags.string = True
        return tags


class SupervisedEstimator(ImageEstimator):
    """Base class of classifier and regressor, with their parameters; `VitreousClassifier` documents these."""

    def __init__(
        self,
        model: str | None = None,
        *,
        init: str | None = None,
        image_shape: tuple[int, ...] | None = None,
        epochs: float | None = None,
        batch_size: int | None = None,
        lr: float | None = None,
        augment: bool | str = "auto",
        random_state: int | np.random.RandomState | None = None,
        verbose: bool = False,
        train_options: Mapping[str, object] | None = None,
    ) -> None:
        self.model, self.init, self.image_shape = model, init, image_shape
        self.epochs, self.batch_size, self.lr, self.augment = epochs, batch_size, lr, augment
        self.random_state, self.verbose, self.train_options = random_state, verbose, train_options

    def read_training_images(self, X: ImagesLike, y: ArrayLike | None) -> Images:
        """Convert the X of `fit` to images. Raises ValueError if y is None, and as `read_images`."""
        images = self.read_images(X, reset=True)
        if y is None:
            raise ValueError("requires y to be passed, but the target y is None")
        return images


def check_equal_lengths(images: Images, labels: np.ndarray) -> None:
    """Raise ValueError, in the wording of scikit-learn, unless there are as many labels, (n,) or (n, T), as images."""
    if len(labels) != len(images):
        raise ValueError(f"Found input variables with inconsistent numbers of samples: {len(images)}, {len(labels)}")


class VitreousClassifier(ClassifierMixin, SupervisedEstimator):
    """A Vision Transformer that classifies images, trained as by `vitreous train` with its default recipe for the data.

    `model`: a name that `vitreous models` lists (None: chosen for the data). `init`: initial weights, as in `vitreous
    train --init`. `image_shape`: the shape, (H, W) or (H, W, C), of the images in an X of shape (n, features).
    `epochs`, `batch_size` and `lr`: None for the values of the recipe. `augment`: whether images are augmented as in
    the recipe; "auto": 8-bit colours only. `random_state`: an int for reproducible weights. `verbose` shows progress.
    `train_options`: any other option of `vitreous.train` by name, and `settings`, values of the run by path:
    `{"recipe": "deit3", "device": "cpu", "settings": {"optimizer.betas": ["0.9", "0.95"]}}`.

    Fitted attributes: `classes_`, `bundle_` (model, task, preprocessing), `predictor_` (the object that `vitreous.load`
    returns), `summary_`, and `history_`, the metrics per epoch. `fit` raises the errors of `vitreous.train`.
    """

    def fit(self, X: ImagesLike, y: ArrayLike) -> Self:
        """Train on n images with classes y, (n,) of any type. Raises ValueError for other y, and for a single class."""
        images = self.read_training_images(X, y)
        check_classification_targets(y)
        column = column_or_1d(y, warn=True)
        check_equal_lengths(images, column)
        self.classes_, labels = np.unique(column, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError("Classifier can't train when only one class is present.")
        names = [str(name) or "(empty)" for name in self.classes_]
        self.fit_model(images, labels.astype(np.int64), get_token_row_options(self, images), classes=names)
        return self

    def predict(self, X: ImagesLike) -> np.ndarray:
        """Predict the class of each image, (n,), as a value of `classes_`."""
        best = self.predict_proba(X).argmax(1)
        return self.classes_[best]

    def predict_proba(self, X: ImagesLike) -> np.ndarray:
        """Predict the probability of each class, (n, classes) float64, in the order of `classes_`. Raises
        NotFittedError before `fit`, and DataError for an unreadable file."""
        check_is_fitted(self, "bundle_")
        return self.compute_rows(X, self.predictor_.activations)


class VitreousRegressor(RegressorMixin, SupervisedEstimator):
    """A Vision Transformer that predicts values of images, trained as by `vitreous train` (recipe `regression`).

    The parameters are those of `VitreousClassifier`, and `train_options={"loss": "huber"}` sets the loss. Several
    targets are columns of y; missing values of one of several targets are NaN.

    Fitted attributes: `targets_`, the names of the targets, and those of `VitreousClassifier` except `classes_`. `fit`
    raises the errors of `vitreous.train`.
    """

    def fit(self, X: ImagesLike, y: ArrayLike) -> Self:
        """Train on n images with values y, numbers (n,) or (n, T). Raises ValueError for y of another shape or type,
        for NaN with a single target, and for fewer than two images."""
        images = self.read_training_images(X, y)
        names = list(map(str, getattr(y, "columns", [getattr(y, "name", None) or "target"])))
        check_options: dict[str, Any] = {"ensure_2d": False, "dtype": np.float64, "input_name": "y", "estimator": self}
        nan_check_options: dict[str, Any] = {**check_options, "ensure_all_finite": "allow-nan"}
        values: np.ndarray = check_array(y, **nan_check_options)
        if values.ndim == 1 or values.shape[1] == 1:
            check_array(values, **check_options)
        check_equal_lengths(images, values)
        if len(values) < 2:
            raise ValueError("Regressor can't train on n_samples = 1.")
        self.is_one_column_ = values.ndim == 1
        values = values.reshape(len(values), -1)
        num_targets = values.shape[1]
        self.targets_ = names if len(names) == num_targets else [f"target {index}" for index in range(num_targets)]
        options = {"recipe": "regression", **get_token_row_options(self, images)}
        self.fit_model(images, values, options, targets=self.targets_)
        return self

    def predict(self, X: ImagesLike) -> np.ndarray:
        """Predict the values of each image, float64 of shape (n,) or (n, T), as y had. Raises NotFittedError before
        `fit`, and DataError for an unreadable file."""
        check_is_fitted(self, "bundle_")
        values = self.compute_rows(X, self.predictor_.activations)
        return values[:, 0] if self.is_one_column_ else values

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


class VitreousEmbedder(ClassNamePrefixFeaturesOutMixin, TransformerMixin, ImageEstimator):
    """A transformer that computes features of images, (n, D) float32: the input of a Vision Transformer's head.

    `weights`: a run, a bundle, or foreign weights, as for `vitreous.load`; `fit` then loads them. If it is None, `fit`
    trains a model on X without labels, by `recipe` (`mae`, `dino`, …; `vitreous recipes` lists all). The other
    parameters are those of `VitreousClassifier`.
    """

    def __init__(
        self,
        weights: str | os.PathLike[str] | None = None,
        *,
        recipe: str = "mae",
        model: str | None = None,
        image_shape: tuple[int, ...] | None = None,
        epochs: float | None = None,
        batch_size: int | None = None,
        augment: bool | str = "auto",
        random_state: int | np.random.RandomState | None = None,
        verbose: bool = False,
        train_options: Mapping[str, object] | None = None,
    ) -> None:
        self.weights, self.recipe, self.model, self.image_shape = weights, recipe, model, image_shape
        self.epochs, self.batch_size, self.augment = epochs, batch_size, augment
        self.random_state, self.verbose, self.train_options = random_state, verbose, train_options

    def fit(self, X: ImagesLike, y: ArrayLike | None = None) -> Self:
        """Load the weights, or train a model without labels; y is ignored. Raises UsageError for an exported file, and
        the errors of `vitreous.load` and `vitreous.train`."""
        images = self.read_images(X, reset=True)
        if self.weights is None:
            self.fit_model(images, None, {"recipe": self.recipe, **get_token_row_options(self, images)})
        else:
            bundle = load(self.weights, headless=True).bundle
            if bundle is None:
                raise UsageError(f"{self.weights} is an exported file", "use the run that it was exported from")
            self.keep(bundle)
        return self

    def transform(self, X: ImagesLike) -> np.ndarray:
        """Compute features, (n, D) float32. Raises NotFittedError before `fit`, DataError for an unreadable file."""
        check_is_fitted(self, "bundle_")
        return self.compute_rows(X, self.predictor_.engine.features)

    @property
    def _n_features_out(self) -> int:
        """Return the number of features D, from which scikit-learn makes column names."""
        return self.bundle_.model.config.width

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = []  # features are float32
        return tags


def as_image_list(X: Any) -> list[Picture] | None:
    """Return X as a list if it contains paths, PIL images, or arrays (H, W[, C]) of different sizes; otherwise None.
    Paths may also be an array of texts, (n,) or (n, 1), or a column of a data frame. Raises ValueError for a single
    image, and for a list of mixed types."""
    column = X
    if hasattr(X, "iloc") or isinstance(X, np.ndarray):
        column = np.asarray(X)
        if column.dtype.kind not in "OUT" or column.ndim > 2 or (column.ndim == 2 and column.shape[1] != 1):
            return None
        column = column.ravel()
    if isinstance(X, str | os.PathLike | bytes | Image.Image):
        raise ValueError(f"X is a single image ({type(X).__name__}): pass [X]")
    if not isinstance(column, np.ndarray | list | tuple):
        return None
    images = [os.fspath(image) if isinstance(image, str | os.PathLike) else image for image in column]
    if all(isinstance(image, str) for image in images) or all(isinstance(image, Image.Image) for image in images):
        return images
    if any(isinstance(image, str | Image.Image) for image in images) and isinstance(X, list | tuple):
        type_names = sorted({type(image).__name__ for image in images})
        raise ValueError(f"X mixes {' and '.join(type_names)}: pass images of one type")
    arrays = all(isinstance(image, np.ndarray) and image.ndim in (2, 3) for image in images)
    return images if arrays and len({image.shape for image in images if isinstance(image, np.ndarray)}) > 1 else None


def is_numeric(X: Any) -> bool:
    """Return whether X is an array of numbers, which scikit-learn need not convert."""
    return isinstance(X, np.ndarray) and X.dtype.kind in "buif"


def as_pixel_array(array: np.ndarray) -> np.ndarray:
    """Convert images (n, H, W[, C]) or (n, C, H, W) to (n, H, W[, C]), without the channel axis if C is 1. uint8 arrays
    keep their dtype; others become float32."""
    array = move_channels_last(array) if array.ndim == 4 else array
    array = array[..., 0] if array.ndim == 4 and array.shape[-1] == 1 else array
    return array if array.dtype == np.uint8 else array.astype(np.float32)


def move_channels_last(array: np.ndarray) -> np.ndarray:
    """Move channels last, (..., C, H, W) -> (..., H, W, C), if only the third axis from the
    end can be channels, with a length of 1, 3 or 4. Other arrays are unchanged."""
    is_first = array.ndim >= 3 and array.shape[-3] in IMAGE_CHANNELS and array.shape[-1] not in IMAGE_CHANNELS
    return np.moveaxis(array, -3, -1) if is_first else array


def as_token_rows(table: np.ndarray) -> np.ndarray:
    """Convert tabular data (n, features) to images with one row of tokens, (n, 1, tokens, C) float32. A token has C
    values; if C is 1, the result is (n, 1, tokens). The last token is zero-padded."""
    values_per_token = -(-table.shape[1] // MAX_ROW_TOKENS)
    tokens = max(MIN_ROW_TOKENS, -(-table.shape[1] // values_per_token))
    token_rows = np.zeros((len(table), 1, tokens * values_per_token), np.float32)
    token_rows[:, 0, : table.shape[1]] = table
    return token_rows if values_per_token == 1 else token_rows.reshape(len(table), 1, tokens, values_per_token)


def get_token_row_options(estimator: ImageEstimator, images: Images) -> dict[str, object]:
    """Return the options of `train` for tabular data: default model and patch size 1; an empty dict for images."""
    if not isinstance(images, np.ndarray) or estimator.image_shape is not None or images.shape[1] != 1:
        return {}
    model = {} if getattr(estimator, "model", None) or getattr(estimator, "init", None) else {"model": ROW_MODEL}
    settings = {"model.patch": ["1", "1"]}
    if getattr(estimator, "recipe", "") == "mae":  # a patch of one value has a standard deviation of 0
        settings["objective.normalise"] = ["false"]
    return {**model, "settings": settings}
