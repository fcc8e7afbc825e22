"""The `Recipe` class, and settings shared by recipes."""

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
from vitreous.objectives.supervised import SupervisedConfig
from vitreous.recipes.options import TrainOptions
from vitreous.training.run import OptimizerConfig, Run

LRScalingRule = Literal["linear", "sqrt", "fixed"]
PublishedResult = tuple[str, str, str]  # model, dataset, result

#: the paper's crop for pre-training and fine-tuning: Inception's, without antialiasing, and a flip (Google's
#: input_pipeline.py)
INCEPTION_VIEWS = Augment(crop=(0.05, 1.0), ratio=(0.75, 1.33), crop_style="inception", crop_filter="aliased", flip=0.5)
#: default share of the training images that --lr-grid holds out below a number of images: Pets',
#: CIFAR's, ImageNet's
HOLD_OUT_SHARES = ((10_000, 0.1), (200_000, 0.02), (math.inf, 0.01))
MIN_SCRATCH_IMAGES = 10_000  # photographs; fewer are few for a Vision Transformer from scratch
CENTER_CROP_SHARE = 224 / 256  # of the short side: the centre crop for evaluation of pre-trained models


PHOTO_PREPROCESS, CLIP_PREPROCESS = ImagePreprocess((1, 1)), ClipPreprocess((1, 1, 1))  # of any size


@dataclass(frozen=True)
class DatasetInfo:
    """Properties of the training data.

    `images` is the number of training images, `size` their size as in `Preprocess.image`. `template` is the
    preprocessing with the settings derived from the files. `masks`: objects have masks. `has_stills`: some clips are
    single-frame images. `map_statistics`: statistics of the class maps, for recipes that need them.
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


#: dataset -> description and classes; the sizes of photographs are examples
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
    "photographs": (DatasetInfo(10_000, (375, 500), 3), 10),
}


@dataclass(frozen=True)
class TrainingLength:
    """Epochs from the number of training images: `num_samples` samples in total, rounded to a tenth, between
    `min_epochs` and `max_epochs`."""

    num_samples: float
    least: float
    max_epochs: float

    def epochs(self, images: int) -> float:
        """Return the epochs of a run on this number of training images."""
        return round(min(self.max_epochs, max(self.least, self.num_samples / images)), 1)

    @property
    def text(self) -> str:
        """Return the range, for a table."""
        return f"{self.least:g} to {self.max_epochs:g} epochs"


RunBuilder = Callable[[ModelConfig, DatasetInfo, TrainOptions], Run]


@dataclass(frozen=True)
class Recipe:
    """A named set of published or tuned hyperparameters.

    `make` builds the run of a model on data; its docstring cites the table and contains the command, with NAME for the
    name. `lr_scaling`: how the learning rate scales with the batch size; below `floor` images it is constant.
    `published`: results of the authors, verbatim. `data`: the set, of `REFERENCE_DATASETS`, that it was designed for.
    `objective`: the config of the loss. `models`: the models of its table, the first is the default; `image`: their
    image size in pixels, from the model's name and the data (None: from the data or the weights). `by_steps`: the
    length is in steps, not epochs; `warmup_in_epochs`: the warm-up is in epochs. `small`: the model for images up to 64
    pixels at their size, if there are hyperparameters for these; `few`: the model for fewer than `MIN_SCRATCH_IMAGES`
    photographs, if its table has none; `solid`: the model for volumes, if supported; `clips`: the model for clips up to
    64 pixels, if it is not a classifier; `mixed`: the model for such clips and images together. `lengths`: if the
    number of images determines the epochs, the length for each type of model; the first is that of the first model.
    `grid`: the learning rates for a grid search; `hold_out`: the validation share of the training images, if its table
    has one. `by_maps`: augmentation and class weights are chosen from the class maps (`DatasetInfo.maps`). `enlarges`:
    from scratch, images of less than 224 pixels are enlarged to that size.
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
        """Return the description, the differences from the publication, and the command."""
        return (getdoc(self.make) or "").replace("NAME", self.name)

    @property
    def is_for_clips(self) -> bool:
        """Return whether the recipe supports only clip models."""
        return bool(self.models) and len(config_from_name(self.models[0]).image) == 3

    def require_data_source(self, dataset_info: DatasetInfo) -> None:
        """Raise UsageError for data of another modality than a clip recipe needs."""
        if self.is_for_clips and not dataset_info.template.is_animated:
            problem = f"{self.name} is for clips, but the data are {dataset_info.template.noun}"
            raise UsageError(problem, "use --recipe mae, or use clips")


def fixed_image_side(pixels: int) -> Callable[[str, DatasetInfo], int]:
    """Return a function with the same image size for every model."""
    return lambda name, facts: pixels


def build_pretraining_recipe(
    name: str,
    make: RunBuilder,
    about: str,
    source: str,
    published: tuple[PublishedResult, ...] = (),
    side: int | Callable[[str, DatasetInfo], int] = 224,
    **overrides: Any,
) -> Recipe:
    """Build a recipe for ImageNet-sized data: `side` pixels, 1 % of the images held out, for ViTs unless it is BiT's.

    `overrides` are further fields of `Recipe`.
    """
    image = side if callable(side) else fixed_image_side(side)
    for_models = "bit" if name.startswith("bit-") else "vit"
    settings: dict[str, Any] = {"image": image, "for_models": for_models, "hold_out": 0.01} | overrides
    return Recipe(name, make, about, source, published=published, **settings)


def base_run_fields(model: ModelConfig, dataset_info: DatasetInfo) -> dict[str, Any]:
    """Return the common fields of every run: data, model, and preprocessing of pixels to [-1, 1]."""
    return {
        "data": DataOptions("", tuple(map(str, range(model.classes))), dataset_info.images, ""),
        "model": model,
        "preprocess": dataset_info.template.for_model(model.image, model.channels),
    }


def make_muon_optimizer(options: TrainOptions, lr: float, beta2: float = 0.999) -> OptimizerConfig:
    """Return Muon's settings for segmentation and detection datasets of a few hundred images. With --init, the learning
    rate decays by 0.75 per block from the heads down (layer-wise decay)."""
    decay = 0.75 if options.init else 1.0
    return OptimizerConfig("muon", lr, matrix_lr=0.02, betas=(0.9, beta2), weight_decay=0.05, layer_decay=decay)


def google_run_fields(model: ModelConfig, dataset_info: DatasetInfo, squash: bool = False) -> dict[str, Any]:
    """Return the common fields of Google's code: bilinear resizing, and a centre crop or the squashed image."""
    run_fields = base_run_fields(model, dataset_info)
    resize_options = {"fit": "squash"} if squash else {"share": CENTER_CROP_SHARE}
    return run_fields | {"preprocess": replace(run_fields["preprocess"], filter="bilinear", **resize_options)}


def apply_google_settings(
    model: ModelConfig, options: TrainOptions, dropout: float = 0.0, representation: bool = True
) -> ModelConfig:
    """Return a ViT with the settings of Google's code: dropout, no stochastic depth, and a representation layer of the
    model's width before the head (arXiv:2010.11929, section 3.2). From scratch, it uses tanh GELU and resizes positions
    with aligned corners; weights keep their settings. A ResNet is returned unchanged."""
    details = {} if options.init else {"mlp.gelu": "tanh", "positions.resize": "zoom"}
    width = model.width if representation else None
    return replace_known_fields(
        model,
        {"head.representation": width, "regularization.dropout": dropout, "regularization.drop_path": 0.0, **details},
    )


def sigmoid_head_bias(classes: int) -> float:
    """Return the initial head bias for the sigmoid loss: -ln K rounded to a tenth, big_vision's -10 for 21,843 and -6.9
    for 1000."""
    return -round(math.log(classes), 1)
