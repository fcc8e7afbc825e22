"""Learning what is where: a class for every pixel."""

from __future__ import annotations

from dataclasses import replace

from vitreous.data.augmentation.scenes import Scenes
from vitreous.models.config import ModelConfig, replace_fields
from vitreous.objectives.segmentation import SegmentationConfig
from vitreous.recipes.options import TrainOptions
from vitreous.recipes.recipe import DatasetInfo, Length, Recipe, common, fixed_side
from vitreous.training.run import Optimizer, Run, Schedule

SHOWN = Length(2e4, 5, 200)


def segment(model: ModelConfig, facts: DatasetInfo, options: TrainOptions) -> Run:
    """A class for every pixel, for a few hundred images.

    vitreous train DATA --recipe NAME

    DATA has masks beside its images. Parts of 256 pixels are cut out of images scaled by 1/2 to 2, flipped and turned
    by quarters; cross-entropy and Dice loss. Weights of any kind go in by --init; their blocks then move more slowly
    than the head, by layer decay.
    """
    batch = max(1, min(8, facts.images // 2))
    epochs = SHOWN.epochs(facts.images)
    steps = max(1, round(epochs * facts.images / batch))
    parts = common(replace_fields(model, {"dropout": 0.0, "drop_path": 0.0}), facts)
    return Run(
        **parts | {"preprocess": replace(parts["preprocess"], filter="bilinear")},
        views=Scenes(flip=0.5, flip_vertical=0.5, turn=True, jitter=(0.2, 0.2, 0.2)),
        optimizer=Optimizer("adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.75 if options.init else 1.0),
        schedule=Schedule(round(0.05 * steps)),
        objective=SegmentationConfig(),
        batch_size=batch,
        epochs=epochs,
    )


DENSE = (
    Recipe(
        "segment",
        segment,
        "a class for every pixel, a few hundred images",
        "tuned here",
        models=("ViT-192x6/16",),
        image=fixed_side(256),
        objective=SegmentationConfig,
        lengths=(("images", SHOWN),),
        data="photographs",
        floor=8,
    ),
)
