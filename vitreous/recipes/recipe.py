"""The `Recipe` class, the description of a dataset, and settings that several recipes share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from inspect import getdoc
from typing import Any, Literal

from vitreous.data.annotations.map_statistics import MapStatistics
from vitreous.data.augmentation.augment import Augment
from vitreous.data.latents import Latents
from vitreous.data.modalities.base import Preprocess
from vitreous.data.modalities.clips import ClipPreprocess
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.data.options import DataOptions
from vitreous.errors import UsageError
from vitreous.models.config import ModelConfig, replace_known_fields
from vitreous.models.names import config_from_name
from vitreous.objectives.base import ObjectiveConfig
from vitreous.objectives.regression import RegressionConfig
from vitreous.objectives.supervised import SupervisedConfig
from vitreous.recipes.options import TrainOptions
from vitreous.training.run import OptimizerConfig, Run

LRScalingRule = Literal["linear", "sqrt", "fixed"]
PublishedResult = tuple[str, str, str]  # model, dataset, result

#: augmentation of the ViT paper for pre-training and fine-tuning: Inception's crop, without antialiasing, and a flip
#: (Google's input_pipeline.py)
INCEPTION_VIEWS = Augment(crop=(0.05, 1.0), ratio=(0.75, 1.33), crop_style="inception", crop_filter="aliased", flip=0.5)
#: (number of training images, default share of them that --lr-grid holds out below this number), from the papers'
#: shares of Pets, CIFAR and ImageNet
HOLD_OUT_SHARES = ((10_000, 0.1), (200_000, 0.02), (math.inf, 0.01))
MIN_SCRATCH_IMAGES = 10_000  # number of photographs below which training from scratch is not recommended
CENTER_CROP_SHARE = 224 / 256  # share of the short side that the centre crop for evaluation covers


PHOTO_PREPROCESS, CLIP_PREPROCESS = ImagePreprocess((1, 1)), ClipPreprocess((1, 1, 1))  # templates for any size


@dataclass(frozen=True)
class DatasetInfo:
    """Properties of a training dataset from which recipes derive settings.

    - `images`: the number of training images.
    - `size`: the size of the first image, in the order of `Preprocess.image`.
    - `channels`: the number of channels of an image.
    - `template`: preprocessing with the settings that were derived from the files, for any image size.
    - `masks`: whether objects have masks.
    - `latents`: the description of the latents if the images are encoded by an autoencoder.
    - `has_stills`: whether some clips are single images.
    - `map_statistics`: statistics of the class maps, for recipes with `by_maps`.
    - `vocabulary`, `text_length`: the token ids, and the tokens of a text, of a tokenizer that was trained on the
      captions of image-text pairs; 0 without such a tokenizer.
    """

    images: int
    size: tuple[int, ...]
    channels: int
    template: Preprocess = PHOTO_PREPROCESS
    _: KW_ONLY
    masks: bool = False
    latents: Latents | None = None
    has_stills: bool = False
    map_statistics: MapStatistics | None = None
    vocabulary: int = 0
    text_length: int = 0


#: dataset -> description and number of classes; the sizes of photographs are examples
REFERENCE_DATASETS = {
    "ImageNet": (DatasetInfo(1_281_167, (375, 500), 3), 1000),
    "ImageNet-21k": (DatasetInfo(14_200_000, (375, 500), 3), 21_843),
    "JFT-300M": (DatasetInfo(303_000_000, (375, 500), 3), 18_291),
    "CIFAR-10": (DatasetInfo(50_000, (32, 32), 3), 10),
    "Pets": (DatasetInfo(3_680, (375, 500), 3), 37),
    "Flowers": (DatasetInfo(2_040, (500, 667), 3), 102),
    "VTAB": (DatasetInfo(1_000, (375, 500), 3), 100),
    "digits": (DatasetInfo(1_439, (8, 8), 1), 10),
    "ADE20K": (DatasetInfo(20_210, (512, 683), 3), 150),
    "COCO": (DatasetInfo(118_287, (480, 640), 3, masks=True), 80),
    "LVIS": (DatasetInfo(100_170, (480, 640), 3, masks=True), 1203),
    "Kinetics-400": (DatasetInfo(240_436, (300, 256, 340), 3, CLIP_PREPROCESS), 400),
    "WIT-400M": (DatasetInfo(400_000_000, (375, 500), 3), 0),
    "photographs": (DatasetInfo(10_000, (375, 500), 3), 10),
}


@dataclass(frozen=True)
class TrainingLength:
    """The length of a run as a function of the number of training images: `num_samples` samples in total, but at least
    `least` and at most `max_epochs` epochs."""

    num_samples: float
    least: float
    max_epochs: float

    def epochs(self, images: int) -> float:
        """Return the number of epochs for this number of training images, rounded to a tenth."""
        return round(min(self.max_epochs, max(self.least, self.num_samples / images)), 1)

    @property
    def text(self) -> str:
        """The range of epochs as text for a table."""
        return f"{self.least:g} to {self.max_epochs:g} epochs"


RunBuilder = Callable[[ModelConfig, DatasetInfo, TrainOptions], Run]


@dataclass(frozen=True)
class Recipe:
    """A named set of published or tuned hyperparameters.

    - `make`: the function that builds the run of a model on a dataset. Its docstring cites the source and contains the
      command, with NAME for the recipe's name.
    - `about`, `source`: a short description, and the publication.
    - `published`: results that the authors report.
    - `data`: the dataset that the recipe was designed for, a key of `REFERENCE_DATASETS`.
    - `objective`: the class of the objective config.
    - `models`: the models that the recipe has hyperparameters for; the first is the default.
    - `for_models`: the only model family that the recipe supports, or "any".
    - `small`: the model for images up to 64 pixels, if the recipe has hyperparameters for these; their size is kept.
    - `few`: the model for fewer than `MIN_SCRATCH_IMAGES` photographs, if it differs from the default.
    - `solid`: the model for volumes, if the recipe supports them.
    - `clips`: the model for clips up to 64 pixels, if the recipe does not train a classifier.
    - `mixed`: the model for such clips and images together.
    - `image`: function (model name, dataset) -> image size in pixels; None: from the data or the weights.
    - `from_weights`: whether the recipe requires initial weights.
    - `lr_scaling`: the rule by which the learning rate scales with the batch size. Batch sizes below `floor` count as
      `floor`.
    - `by_steps`: whether the length of a run is given in steps instead of epochs.
    - `warmup_in_epochs`: whether the warm-up is given in epochs instead of steps.
    - `lengths`: if the number of images determines the epochs, the length for each type of model; the first is that of
      the default model.
    - `grid`: the learning rates of a grid search.
    - `hold_out`: the share of the training images that the publication holds out for validation, if it does.
    - `by_maps`: whether augmentation and class weights are derived from `DatasetInfo.map_statistics`.
    - `enlarges`: whether images of less than 224 pixels are enlarged to that size in training from scratch.
    """

    name: str
    make: RunBuilder
    about: str
    source: str
    _: KW_ONLY
    lr_scaling: LRScalingRule = "linear"
    published: tuple[PublishedResult, ...] = ()
    data: str = "ImageNet"
    models: tuple[str, ...] = ()
    small: str | None = None
    few: str | None = None
    solid: str | None = None
    clips: str | None = None
    mixed: str | None = None
    image: Callable[[str, DatasetInfo], int] | None = None
    objective: type[ObjectiveConfig] = SupervisedConfig
    for_models: Literal["vit", "bit", "swin", "any"] = "any"
    from_weights: bool = False
    by_steps: bool = False
    warmup_in_epochs: bool = False
    floor: int = 1
    lengths: tuple[tuple[str, TrainingLength], ...] = ()
    grid: tuple[float, ...] = (0.001, 0.003, 0.01, 0.03)
    hold_out: float | None = None
    by_maps: bool = False
    enlarges: bool = True

    @property
    def text(self) -> str:
        """The description of the recipe: the docstring of `make`, with its settings, differences from the publication,
        and command."""
        return (getdoc(self.make) or "").replace("NAME", self.name)

    @property
    def task(self) -> str:
        """The task of the recipe, a key of `TASK_TITLES` of the command line."""
        if self.objective.annotated:
            return {"classes": "segmentation", "objects": "detection"}[self.objective.annotated]
        if self.objective.generates:
            return "generation"
        if issubclass(self.objective, RegressionConfig):
            return "regression"
        return "classification" if self.objective.labelled else "pretraining"

    @property
    def is_for_clips(self) -> bool:
        """Whether the recipe supports only models for clips."""
        return bool(self.models) and len(config_from_name(self.models[0]).image) == 3

    def require_data_source(self, dataset_info: DatasetInfo) -> None:
        """Raise UsageError if the recipe is for clips, and the data are of another modality."""
        if self.is_for_clips and not dataset_info.template.is_animated:
            problem = f"{self.name} is for clips, but the data are {dataset_info.template.noun}"
            raise UsageError(problem, "use --recipe mae, or use clips")


def fixed_image_side(pixels: int) -> Callable[[str, DatasetInfo], int]:
    """Return a function for `Recipe.image` that returns the same image size for every model."""
    return lambda name, dataset_info: pixels


def build_pretraining_recipe(
    name: str,
    make: RunBuilder,
    about: str,
    source: str,
    published: tuple[PublishedResult, ...] = (),
    side: int | Callable[[str, DatasetInfo], int] = 224,
    **overrides: Any,
) -> Recipe:
    """Build a recipe for ImageNet-sized data: image size `side`, 1 % of the images held out, for ResNets if the name
    starts with bit-, else for ViTs.

    `overrides` are further fields of `Recipe`.
    """
    image = side if callable(side) else fixed_image_side(side)
    for_models = "bit" if name.startswith("bit-") else "vit"
    settings: dict[str, Any] = {"image": image, "for_models": for_models, "hold_out": 0.01} | overrides
    return Recipe(name, make, about, source, published=published, **settings)


def base_run_fields(model: ModelConfig, dataset_info: DatasetInfo) -> dict[str, Any]:
    """Return the common fields of all runs: data, model, and preprocessing of pixels to [-1, 1]."""
    return {
        "data": DataOptions("", tuple(map(str, range(model.classes))), dataset_info.images, ""),
        "model": model,
        "preprocess": dataset_info.template.for_model(model.image, model.channels),
    }


def make_muon_optimizer(options: TrainOptions, lr: float, beta2: float = 0.999) -> OptimizerConfig:
    """Return Muon's settings for segmentation and detection datasets of a few hundred images.

    With --init, layer decay multiplies the learning rate by 0.75 from each block to the block before it.
    """
    decay = 0.75 if options.init else 1.0
    return OptimizerConfig("muon", lr, matrix_lr=0.02, betas=(0.9, beta2), weight_decay=0.05, layer_decay=decay)


def google_run_fields(model: ModelConfig, dataset_info: DatasetInfo, squash: bool = False) -> dict[str, Any]:
    """Return the common fields of runs as in Google's code: bilinear resizing, and a centre crop; with `squash`, the
    full image resized to a square."""
    run_fields = base_run_fields(model, dataset_info)
    resize_options = {"fit": "squash"} if squash else {"share": CENTER_CROP_SHARE}
    return run_fields | {"preprocess": replace(run_fields["preprocess"], filter="bilinear", **resize_options)}


def apply_google_settings(
    model: ModelConfig, options: TrainOptions, dropout: float = 0.0, representation: bool = True
) -> ModelConfig:
    """Return a ViT with the settings of Google's code: dropout, no stochastic depth, and a representation layer of the
    model's width before the head (arXiv:2010.11929, section 3.2).

    A model from scratch also uses tanh GELU, and resizes positions with aligned corners; pre-trained weights keep their
    settings. A ResNet is returned unchanged.
    """
    details = {} if options.init else {"mlp.gelu": "tanh", "positions.resize": "zoom"}
    width = model.width if representation else None
    return replace_known_fields(
        model,
        {"head.representation": width, "regularization.dropout": dropout, "regularization.drop_path": 0.0, **details},
    )


def sigmoid_head_bias(classes: int) -> float:
    """Return the initial head bias for the sigmoid loss, -ln K for K classes rounded to a tenth, as in big_vision: -10
    for 21,843 classes, -6.9 for 1000."""
    return -round(math.log(classes), 1)
