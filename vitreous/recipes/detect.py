"""Learning where objects are."""

from __future__ import annotations

from dataclasses import replace

from vitreous.data.augmentation.scenes import Scenes
from vitreous.models.config import ModelConfig, replace_fields
from vitreous.objectives.detection import DetectionConfig
from vitreous.recipes.options import TrainOptions
from vitreous.recipes.recipe import DatasetInfo, Length, Recipe, common, fixed_side
from vitreous.training.run import Optimizer, Run, Schedule

SHOWN = Length(2e4, 5, 200)


def detect(model: ModelConfig, facts: DatasetInfo, options: TrainOptions) -> Run:
    """Boxes of objects, and their masks where the data have any, for a few hundred images.

    vitreous train DATA --recipe NAME

    Images are scaled to fit into 320 pixels, then by 0.8 to 1.25, and cut, flipped and recoloured. Weights of any kind
    go in by --init; their blocks then move more slowly than the heads, by layer decay.
    """
    batch = max(1, min(8, facts.images // 2))
    epochs = SHOWN.epochs(facts.images)
    steps = max(1, round(epochs * facts.images / batch))
    parts = common(replace_fields(model, {"dropout": 0.0, "drop_path": 0.0}), facts)
    optimizer = Optimizer("muon", lr=2e-3, matrix_lr=0.02, betas=(0.9, 0.95), weight_decay=0.05)
    if options.init:
        optimizer = Optimizer("adamw", lr=2e-4, weight_decay=0.05, layer_decay=0.75)
    return Run(
        **parts | {"preprocess": replace(parts["preprocess"], filter="bilinear")},
        views=Scenes(scale=(0.8, 1.25), fit="whole", flip=0.5, jitter=(0.2, 0.2, 0.2), fill="mean", visible=0.25),
        optimizer=optimizer,
        schedule=Schedule(round(0.05 * steps)),
        objective=DetectionConfig(
            masks=facts.masks, heads="light", width=128, hidden=256, finest=8, anchor=4.0, proposals=300
        ),
        batch_size=batch,
        epochs=epochs,
        ema=0.998 if steps > 1000 else None,
    )


DETECT = (
    Recipe(
        "detect",
        detect,
        "objects, their boxes and masks, a few hundred images",
        "tuned here",
        models=("Conv16-32-64-128+ViT-192x4/16",),
        image=fixed_side(320),
        objective=DetectionConfig,
        lengths=(("images", SHOWN),),
        data="photographs",
        floor=8,
    ),
)
