"""What a recipe is, and what recipes have in common."""

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
PublishedResult = tuple[str, str, str]  # model, data set, figure

#: the paper's pre-training and fine-tuning crop: Inception's, read without antialiasing, and a flip (Google's
#: input_pipeline.py)
INCEPTION_VIEWS = Augment(crop=(0.05, 1.0), ratio=(0.75, 1.33), crop_style="inception", crop_filter="aliased", flip=0.5)
#: share of the training images that --lr-grid holds out below so many of them, where a recipe's table has none: Pets',
#: CIFAR's, ImageNet's
HOLD_OUT_SHARES = ((10_000, 0.1), (200_000, 0.02), (math.inf, 0.01))
MIN_SCRATCH_IMAGES = 10_000  # photographs: fewer are few for a Vision Transformer from scratch
CENTER_CROP_SHARE = 224 / 256  # of the short side: the centre that a pre-trained model is judged on


PHOTO_PREPROCESS, CLIP_PREPROCESS = ImagePreprocess((1, 1)), ClipPreprocess((1, 1, 1))  # of any size


@dataclass(frozen=True)
class DatasetInfo:
    """What the data say: how many training images, their size, as `Preprocess.image` has it, their channels, a
    `template` of the preprocessing with the settings that follow from the files, whether they have masks of objects,
    of what they are latents, if any, whether some of the clips are pictures, of one frame, and for recipes that choose
    by them the statistics of the class maps."""

    images: int
    size: tuple[int, ...]
    channels: int
    template: Preprocess = PHOTO_PREPROCESS
    _: KW_ONLY
    masks: bool = False
    latents: Latents | None = None
    stills: bool = False
    maps: MapStatistics | None = None


#: data set -> what it is, and its classes; the sizes of photographs are examples
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
    """Epochs by the number of training images: as many as show `shown` images, rounded to a tenth, from `least` to
    `most`."""

    shown: float
    least: float
    most: float

    def epochs(self, images: int) -> float:
        """The epochs of a run on so many training images."""
        return round(min(self.most, max(self.least, self.shown / images)), 1)

    @property
    def text(self) -> str:
        """The range, for a table."""
        return f"{self.least:g} to {self.most:g} epochs"


RunBuilder = Callable[[ModelConfig, DatasetInfo, TrainOptions], Run]


@dataclass(frozen=True)
class Recipe:
    """Numbers by which somebody trained, by name.

    `make` builds the run of a model on data; its docstring cites the table and gives the command, with NAME for the
    name. `rule`: how the learning rate follows the images of a step; below `floor` images it no longer falls.
    `published` is what the authors printed, as they printed it. `data`: the set, of `REFERENCE_DATASETS`, that it was
    written for. `objective` is the config of what it minimises. `models` are those that its table names, the first of
    them the default; `image` their side in pixels, of the model's name and the data (None: whatever the data or the
    weights have). `by_steps`: its length is counted in steps, not epochs; `warmup_in_epochs`: so is its warm-up.
    `small`: the model that it trains on images up to 64 pixels, which it takes as they are, if it has numbers for such;
    `few`: the one for fewer than `MIN_SCRATCH_IMAGES` photographs, where its table has none for these; `solid`: the one
    for volumes, if it takes any; `clips`: the one for clips up to 64 pixels, where that is no classifier; `mixed`: the
    one for such clips and pictures together. `lengths`: where the number of images decides the epochs, how, for each
    kind of model; the first is that of the first model. `grid` holds the learning rates to choose from, and `hold_out`
    the share of the training images to choose on, if its table has one. `by_maps`: its augmentation and class weights
    are chosen by the class maps (`DatasetInfo.maps`).
    """

    name: str
    make: RunBuilder
    about: str
    source: str
    _: KW_ONLY
    rule: LRScalingRule = "linear"
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

    @property
    def text(self) -> str:
        """What the recipe is, what vitreous does otherwise, and the command."""
        return (getdoc(self.make) or "").replace("NAME", self.name)

    @property
    def of_clips(self) -> bool:
        """Whether its table names models of clips, and it takes nothing else."""
        return bool(self.models) and len(config_from_name(self.models[0]).image) == 3

    def require_data_source(self, facts: DatasetInfo) -> None:
        """Raise UsageError for data of another modality than a recipe of clips needs."""
        if self.of_clips and not facts.template.is_animated:
            problem = f"{self.name} is for clips, and the data are {facts.template.noun}"
            raise UsageError(problem, "use --recipe mae, or name clips")


def fixed_image_side(pixels: int) -> Callable[[str, DatasetInfo], int]:
    """An image side that is the same for every model."""
    return lambda name, facts: pixels


def build_pretraining_recipe(
    name: str,
    make: RunBuilder,
    about: str,
    source: str,
    published: tuple[PublishedResult, ...] = (),
    side: int | Callable[[str, DatasetInfo], int] = 224,
    **others: Any,
) -> Recipe:
    """A recipe of ImageNet-sized data: `side` pixels, a hundredth of the images held out, for ViTs unless it is BiT's.

    `others` are further fields of `Recipe`.
    """
    image = side if callable(side) else fixed_image_side(side)
    for_models = "bit" if name.startswith("bit-") else "vit"
    settings: dict[str, Any] = {"image": image, "for_models": for_models, "hold_out": 0.01} | others
    return Recipe(name, make, about, source, published=published, **settings)


def base_run_fields(model: ModelConfig, facts: DatasetInfo) -> dict[str, Any]:
    """What every run starts from: data, model, and preprocessing, of pixels to [-1, 1]."""
    return {
        "data": DataOptions("", tuple(map(str, range(model.classes))), facts.images, ""),
        "model": model,
        "preprocess": facts.template.for_model(model.image, model.channels),
    }


def make_muon_optimizer(options: TrainOptions, lr: float, beta2: float = 0.999) -> OptimizerConfig:
    """Muon for masks and boxes of a few hundred images; the blocks of weights that go in (--init) move more slowly than
    the heads, the first most."""
    decay = 0.75 if options.init else 1.0
    return OptimizerConfig("muon", lr, matrix_lr=0.02, betas=(0.9, beta2), weight_decay=0.05, layer_decay=decay)


def google_run_fields(model: ModelConfig, facts: DatasetInfo, squash: bool = False) -> dict[str, Any]:
    """The same as Google's code has it: read bilinearly, the centre of the picture or all of it squashed."""
    parts = base_run_fields(model, facts)
    fit = {"fit": "squash"} if squash else {"share": CENTER_CROP_SHARE}
    return parts | {"preprocess": replace(parts["preprocess"], filter="bilinear", **fit)}


def apply_google_settings(
    model: ModelConfig, options: TrainOptions, dropout: float = 0.0, representation: bool = True
) -> ModelConfig:
    """A ViT as Google's code trains it: dropout, no stochastic depth, and a representation layer of the model's width
    before the head (arXiv:2010.11929, section 3.2). From scratch its GELU is by tanh and its positions are resized with
    aligned corners; weights keep their own. A ResNet stays."""
    details = {} if options.init else {"mlp.gelu": "tanh", "positions.resize": "zoom"}
    width = model.width if representation else None
    return replace_known_fields(
        model,
        {"head.representation": width, "regularization.dropout": dropout, "regularization.drop_path": 0.0, **details},
    )


def sigmoid_head_bias(classes: int) -> float:
    """What the head's biases start at under the sigmoid loss: -ln K to a tenth, big_vision's -10 for 21,843 and -6.9
    for 1000."""
    return -round(math.log(classes), 1)
