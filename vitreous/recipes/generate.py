"""Making images and clips: diffusion as published for DiT, flows as for SiT, and for small ones as tuned here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vitreous.data.augmentation.augment import Augment
from vitreous.models.config import ModelConfig, replace_fields
from vitreous.models.configs.dit import DITS
from vitreous.models.names import SMALL
from vitreous.objectives.diffusion import DiffusionConfig, GeneratorConfig
from vitreous.objectives.flow import FlowConfig
from vitreous.recipes.options import TrainOptions
from vitreous.recipes.recipe import DatasetInfo, Length, Recipe, common
from vitreous.training.run import Optimizer, Run, Schedule

SHOWN = Length(5e5, 12, 140)  # small images
CLIPS_SHOWN = Length(1e5, 12, 140)  # small clips
BATCH, CLIPS_BATCH = 128, 32


def dit(model: ModelConfig, facts: DatasetInfo, options: TrainOptions) -> Run:
    """DiT: arXiv:2212.09748, section 4, and facebookresearch/DiT. Other sizes than the paper's: tuned here.

    vitreous train DATA --recipe NAME --model DiT-XL/2

    7 million steps of 256 images (XL; 400,000 for comparisons), Adam at 1e-4 without warm-up, decay or clipping, an
    average of the weights with a decay of 0.9999, a flip.
    """
    if not of_the_paper(model):
        return small(model, facts, DiffusionConfig(betas="cosine"))
    return published(model, facts, DiffusionConfig())


def sit(model: ModelConfig, facts: DatasetInfo, options: TrainOptions) -> Run:
    """SiT with straight lines, which is rectified flow: arXiv:2401.08740 (otherwise as DiT). Other sizes than the
    paper's: tuned here.

    vitreous train DATA --recipe NAME --model DiT-XL/2

    The published sizes get times of 0 to 1, as the authors' do, small models times of 0 to 1000.
    """
    if not of_the_paper(model):
        return small(model, facts, FlowConfig(times="logit-normal"))
    return published(model, facts, FlowConfig(scale=1.0))


def of_the_paper(model: ModelConfig) -> bool:
    """Whether a model has one of the paper's sizes, S to XL, whose numbers it then takes."""
    return model.generates_images and model.name().removeprefix("DiT-").partition("/")[0] in DITS


def shared(model: ModelConfig, facts: DatasetInfo, objective: GeneratorConfig, flip: bool) -> dict[str, Any]:
    """What every run of a generator has: latents are not flipped, as they are not latents of the flipped image."""
    if facts.latents is not None:
        objective = replace(objective, autoencoder=facts.latents.autoencoder)
    views = Augment(flip=0.5 if flip and facts.latents is None else 0.0)
    return common(model, facts) | {"objective": objective, "views": views}


def published(model: ModelConfig, facts: DatasetInfo, objective: GeneratorConfig) -> Run:
    """A run as the papers have it."""
    return Run(
        **shared(model, facts, objective, flip=True),
        optimizer=Optimizer("adamw", lr=1e-4, weight_decay=0.0, clip=None),
        schedule=Schedule(0, "constant"),
        batch_size=256,
        epochs=7e6 * 256 / facts.images,
        ema=0.9999,
        ema_warmup=False,
    )


def small(model: ModelConfig, facts: DatasetInfo, objective: GeneratorConfig) -> Run:
    """A run of a small model, on a processor: grey images are not flipped, for letters and digits are grey, nor are
    clips, of which fewer are shown, a step and in all, for they cost more; their numbers are not tuned."""
    clips = facts.template.is_animated
    batch = max(1, min(CLIPS_BATCH if clips else BATCH, facts.images // 4))
    epochs = (CLIPS_SHOWN if clips else SHOWN).epochs(facts.images)
    steps = max(1, round(epochs * facts.images / batch))
    return Run(
        **shared(
            replace_fields(model, {"learned_variance": False}), facts, objective, flip=facts.channels > 1 and not clips
        ),
        optimizer=Optimizer("muon", lr=2e-3, matrix_lr=0.02, betas=(0.9, 0.95), weight_decay=0.01),
        schedule=Schedule(round(0.02 * steps)),
        batch_size=batch,
        epochs=epochs,
        ema=0.995,
    )


def side(name: str, facts: DatasetInfo) -> int:
    """Small images as they are, others at 64 pixels."""
    return min(max(facts.size), SMALL)


GENERATORS: dict[str, Any] = {
    "models": ("DiT-256x8/4", *(f"DiT-{size}/2" for size in ("XL", "L", "B", "S"))),
    "small": "DiT-128x6/2",
    "clips": "DiT-144x6/2x4x4-alternating",
    "mixed": "DiT-144x6/1x4x4-alternating",
    "image": side,
    "rule": "fixed",
    "by_steps": True,
}
GENERATE = (
    Recipe(
        "dit",
        dit,
        "images by diffusion",
        "arXiv:2212.09748",
        published=(
            ("DiT-XL/2", "ImageNet at 256 pixels, guidance 1.5", "FID-50K 2.27"),
            ("DiT-XL/2", "ImageNet at 512 pixels, guidance 1.5", "FID-50K 3.04"),
            ("DiT-XL/2", "ImageNet at 256 pixels, 400,000 steps, no guidance", "FID-50K 19.5"),
        ),
        objective=DiffusionConfig,
        **GENERATORS,
    ),
    Recipe(
        "sit",
        sit,
        "images along straight lines from noise",
        "arXiv:2401.08740",
        published=(("SiT-XL/2", "ImageNet at 256 pixels, guidance 1.5, SDE sampler", "FID-50K 2.06"),),
        objective=FlowConfig,
        **GENERATORS,
    ),
)
