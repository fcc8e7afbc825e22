"""Recipes for image and clip generation: diffusion as published for DiT, flow matching as for SiT, and settings for
small models tuned here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vitreous.data.augmentation.augment import Augment
from vitreous.models.config import ModelConfig, replace_known_fields
from vitreous.models.configs.dit import DIT_SHAPES
from vitreous.models.names import MAX_SMALL_IMAGE_SIDE
from vitreous.objectives.diffusion import DiffusionConfig, GeneratorConfig
from vitreous.objectives.flow import FlowConfig
from vitreous.recipes.options import TrainOptions
from vitreous.recipes.recipe import DatasetInfo, Recipe, TrainingLength, base_run_fields
from vitreous.training.run import OptimizerConfig, Run, ScheduleConfig

GENERATOR_LENGTH = TrainingLength(5e5, 12, 140)  # of runs on small images
CLIP_GENERATOR_LENGTH = TrainingLength(1e5, 12, 140)  # of runs on small clips
MAX_IMAGE_BATCH, MAX_CLIP_BATCH = 128, 32  # maximum batch sizes of small models


def make_dit_run(model: ModelConfig, dataset_info: DatasetInfo, options: TrainOptions) -> Run:
    """DiT: arXiv:2212.09748, section 4, and facebookresearch/DiT. Models of other sizes: tuned here.

    vitreous train DATA --recipe NAME --model DiT-XL/2

    7 million steps of 256 images (XL; 400,000 in ablations), Adam at 1e-4 without warm-up, weight decay or clipping, an
    EMA of the weights with a decay of 0.9999, horizontal flips.
    """
    if not has_published_dit_size(model):
        return make_small_generator_run(model, dataset_info, DiffusionConfig(betas="cosine"))
    return make_paper_generator_run(model, dataset_info, DiffusionConfig())


def make_sit_run(model: ModelConfig, dataset_info: DatasetInfo, options: TrainOptions) -> Run:
    """SiT with linear paths (rectified flow): arXiv:2401.08740; all other settings as `dit`. Models of other sizes:
    tuned here.

    vitreous train DATA --recipe NAME --model DiT-XL/2

    The published sizes use times in 0 to 1, like the authors; small models use times in 0 to 1000.
    """
    if not has_published_dit_size(model):
        return make_small_generator_run(model, dataset_info, FlowConfig(times="logit-normal"))
    return make_paper_generator_run(model, dataset_info, FlowConfig(scale=1.0))


def has_published_dit_size(model: ModelConfig) -> bool:
    """Return whether a model has a size published for DiT, S to XL, to which the paper's hyperparameters apply."""
    return model.generates_images and model.name().removeprefix("DiT-").partition("/")[0] in DIT_SHAPES


def generator_run_fields(
    model: ModelConfig, dataset_info: DatasetInfo, objective: GeneratorConfig, flip: bool
) -> dict[str, Any]:
    """Return the common fields of generator runs. Latents are not flipped, because a flipped latent is not the latent
    of the flipped image."""
    if dataset_info.latents is not None:
        objective = replace(objective, autoencoder=dataset_info.latents.autoencoder)
    views = Augment(flip=0.5 if flip and dataset_info.latents is None else 0.0)
    return base_run_fields(model, dataset_info) | {"objective": objective, "views": views}


def make_paper_generator_run(model: ModelConfig, dataset_info: DatasetInfo, objective: GeneratorConfig) -> Run:
    """Build a run with the published settings of DiT and SiT."""
    return Run(
        **generator_run_fields(model, dataset_info, objective, flip=True),
        optimizer=OptimizerConfig("adamw", lr=1e-4, weight_decay=0.0, clip=None),
        schedule=ScheduleConfig(0, "constant"),
        batch_size=256,
        epochs=7e6 * 256 / dataset_info.images,
        ema=0.9999,
        ema_warmup=False,
    )


def make_small_generator_run(model: ModelConfig, dataset_info: DatasetInfo, objective: GeneratorConfig) -> Run:
    """Build a run of a small model that trains on a CPU.

    Grey images are not flipped, because they may be letters and digits; clips are not flipped either. Clips have a
    smaller batch size and fewer epochs, because they cost more; their hyperparameters are not tuned.
    """
    clips = dataset_info.template.is_animated
    batch = max(1, min(MAX_CLIP_BATCH if clips else MAX_IMAGE_BATCH, dataset_info.images // 4))
    epochs = (CLIP_GENERATOR_LENGTH if clips else GENERATOR_LENGTH).epochs(dataset_info.images)
    steps = max(1, round(epochs * dataset_info.images / batch))
    return Run(
        **generator_run_fields(
            replace_known_fields(model, {"learned_variance": False}),
            dataset_info,
            objective,
            flip=dataset_info.channels > 1 and not clips,
        ),
        optimizer=OptimizerConfig("muon", lr=2e-3, matrix_lr=0.02, betas=(0.9, 0.95), weight_decay=0.01),
        schedule=ScheduleConfig(round(0.02 * steps)),
        batch_size=batch,
        epochs=epochs,
        ema=0.995,
    )


def get_generator_image_side(name: str, dataset_info: DatasetInfo) -> int:
    """Return the height and width of generated images in pixels: those of small images, 64 for larger ones."""
    return min(max(dataset_info.size), MAX_SMALL_IMAGE_SIDE)


GENERATOR_RECIPE_FIELDS: dict[str, Any] = {
    "models": ("DiT-256x8/4", *(f"DiT-{size}/2" for size in ("XL", "L", "B", "S"))),
    "small": "DiT-128x6/2",
    "clips": "DiT-144x6/2x4x4-alternating",
    "mixed": "DiT-144x6/1x4x4-alternating",
    "image": get_generator_image_side,
    "lr_scaling": "fixed",
    "by_steps": True,
}
GENERATION_RECIPES = (
    Recipe(
        "dit",
        make_dit_run,
        "image generation by diffusion",
        "arXiv:2212.09748",
        published=(
            ("DiT-XL/2", "ImageNet at 256 pixels, guidance 1.5", "FID-50K 2.27"),
            ("DiT-XL/2", "ImageNet at 512 pixels, guidance 1.5", "FID-50K 3.04"),
            ("DiT-XL/2", "ImageNet at 256 pixels, 400,000 steps, no guidance", "FID-50K 19.5"),
        ),
        objective=DiffusionConfig,
        **GENERATOR_RECIPE_FIELDS,
    ),
    Recipe(
        "sit",
        make_sit_run,
        "image generation by rectified flow",
        "arXiv:2401.08740",
        published=(("SiT-XL/2", "ImageNet at 256 pixels, guidance 1.5, SDE sampler", "FID-50K 2.06"),),
        objective=FlowConfig,
        **GENERATOR_RECIPE_FIELDS,
    ),
)
