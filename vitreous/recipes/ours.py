"""The recipes that are tuned here, one of which a run takes when none is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vitreous.data.augmentation.augment import Augment
from vitreous.models.config import ModelConfig
from vitreous.objectives.supervised import SupervisedConfig
from vitreous.recipes.options import TrainOptions
from vitreous.recipes.recipe import DatasetInfo, Length, Recipe, common
from vitreous.training.run import Optimizer, Run, Schedule

MEASURED = "benchmarks/README.md"
# small pictures: models with convolutions in front, and others
CONVOLVED, PATCHED = Length(3.6e5, 8, 300), Length(4.5e5, 10, 300)
LONG = 10  # epochs from which wider shifts pay
SCRATCH, STARTED = Length(1e5, 5, 100), Length(2e4, 5, 100)  # photographs


def digits(model: ModelConfig, facts: DatasetInfo, options: TrainOptions) -> Run:
    """The embedded set of handwritten digits, a minute on two cores. Figures: benchmarks/README.md.

    vitreous train digits
    """
    return Run(
        **common(model, facts),
        views=Augment(shift=0.125, rotate=12, zoom=0.12, border="zeros"),
        optimizer=Optimizer("muon", lr=3e-3, matrix_lr=0.02, betas=(0.9, 0.95), weight_decay=0.05),
        schedule=Schedule(warmup_steps=50),
        objective=SupervisedConfig(mimetic=model.drops_patches, smoothing=0.1),
        batch_size=128,
        epochs=100,
        ema=0.99,
    )


def small(model: ModelConfig, facts: DatasetInfo, options: TrainOptions) -> Run:
    """Pictures up to 64 pixels from scratch, as CIFAR. Figures: benchmarks/README.md.

    vitreous train DATA --recipe NAME

    Half the patches are left out in the first part of the run, but where convolutions have made few tokens of them
    (`Conv+ViT-128x4/8`): there all stay, fewer epochs do, the filters move faster than the blocks, and images that are
    shown more than ten times are shifted by up to an eighth of their side, not a sixteenth.
    """
    few = model.front == "conv"
    batch = max(1, min(128, facts.images // 4))
    epochs = (CONVOLVED if few else PATCHED).epochs(facts.images)
    steps = max(1, round(epochs * facts.images / batch))
    step = (options.batch_size or batch) * (options.accumulate or 1)
    shown = (options.steps or 0) * step / facts.images or options.epochs or epochs
    muon = Optimizer("muon", lr=2e-3, matrix_lr=0.007, betas=(0.9, 0.95), weight_decay=0.05)
    return Run(
        **common(model, facts),
        views=Augment(shift=0.125 if few and shown > LONG else 0.0625, flip=0.5),
        optimizer=replace(muon, matrix_lr=0.012, rates=((".conv.weight", 3.3),), clip=None) if few else muon,
        schedule=Schedule(warmup_steps=round(0.05 * steps)),
        objective=SupervisedConfig(
            mimetic=model.drops_patches, smoothing=0.05, patch_dropout=0.5 * (model.drops_patches and not few)
        ),
        batch_size=batch,
        epochs=epochs,
        ema=0.998,
    )


def photos(model: ModelConfig, facts: DatasetInfo, options: TrainOptions) -> Run:
    """Photographs from scratch: lr = 1e-3 x batch / 256 with DeiT's linear rule (arXiv:2012.12877), for at least 64
    images.

    vitreous train DATA --recipe NAME
    """
    return pictures(model, facts, started=options.init is not None)


def finetune(model: ModelConfig, facts: DatasetInfo, options: TrainOptions) -> Run:
    """Pictures of any size from weights: as `photos`, with a tenth of the learning rate, a fifth of the epochs, no
    RandAugment.

    vitreous train DATA --init WEIGHTS
    """
    return pictures(model, facts, started=True)


def pictures(model: ModelConfig, facts: DatasetInfo, started: bool) -> Run:
    """Photographs, from scratch or from weights."""
    batch = max(1, min(64, facts.images // 4))
    epochs = (STARTED if started else SCRATCH).epochs(facts.images)
    steps = max(1, round(epochs * facts.images / batch))
    return Run(
        **common(model, facts),
        views=Augment(crop=(0.3 if started else 0.2, 1.0), flip=0.5, rand_layers=0 if started else 2),
        optimizer=Optimizer("adamw", lr=(1e-4 if started else 1e-3) * 64 / 256, weight_decay=0.05),
        schedule=Schedule(warmup_steps=round(0.05 * steps)),
        objective=SupervisedConfig(mimetic=not started and model.drops_patches, smoothing=0.1),
        batch_size=batch,
        epochs=epochs,
        ema=0.998 if steps > 1000 else None,
    )


LENGTHS = (("convolutions in front", CONVOLVED), ("other models", PATCHED))
PHOTOS: dict[str, Any] = {"data": "photographs", "floor": 64}
FROM_SCRATCH, FROM_WEIGHTS = ((("any model", length),) for length in (SCRATCH, STARTED))
OURS = (
    Recipe("digits", digits, "the embedded digits", MEASURED, rule="fixed", data="digits"),
    Recipe(
        "small",
        small,
        "pictures up to 64 pixels, from scratch",
        MEASURED,
        rule="fixed",
        data="CIFAR-10",
        lengths=LENGTHS,
    ),
    Recipe("photos", photos, "photographs, from scratch", "tuned here", lengths=FROM_SCRATCH, **PHOTOS),
    Recipe(
        "finetune", finetune, "pictures, from weights", "tuned here", from_weights=True, lengths=FROM_WEIGHTS, **PHOTOS
    ),
)
