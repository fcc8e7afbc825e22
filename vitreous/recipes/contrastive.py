"""Recipes of contrastive learning on image-text pairs: CLIP, SigLIP and LiT as published, and settings for small
datasets tuned here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vitreous.data.augmentation.augment import Augment
from vitreous.data.modalities.base import HALF_MOMENTS
from vitreous.models.config import ImageTextConfig, ModelConfig, TextConfig, replace_known_fields
from vitreous.objectives.contrastive import ContrastiveConfig
from vitreous.recipes.options import TrainOptions
from vitreous.recipes.recipe import DatasetInfo, Recipe, TrainingLength, base_run_fields
from vitreous.training.run import OptimizerConfig, Run, ScheduleConfig

#: vocabulary and text length of a text encoder if there is no tokenizer, as in an example run
DEFAULT_VOCABULARY, DEFAULT_TEXT_LENGTH = 32_000, 64
MAX_TEXT_WIDTH, MAX_TEXT_DEPTH = 768, 12  # of a text encoder that is trained from scratch
FEW_PAIRS = 500_000  # number of pairs below which the settings for small datasets are used
CONTRASTIVE_LENGTH = TrainingLength(5e5, 5, 200)  # of runs on small datasets
SMALL_BATCH = 128
#: CLIP's only augmentation is a square crop; a mirrored image contradicts captions with left and right
PAIR_VIEWS = Augment(crop=(0.9, 1.0), crop_filter="bicubic")


def add_text_encoder(model: ModelConfig, dataset_info: DatasetInfo, causal: bool, bias: bool) -> ModelConfig:
    """Return the model with a text encoder of a similar size, unless it has one. A text encoder without initial weights
    gets the vocabulary and the length of the dataset's tokenizer.

    `causal`: a text is represented by the end token of a causal encoder, as in CLIP; otherwise by the mean token of an
    encoder that attends to all tokens. `bias`: whether the logits have a bias.
    """
    vocabulary = dataset_info.vocabulary or DEFAULT_VOCABULARY
    length = dataset_info.text_length or DEFAULT_TEXT_LENGTH
    if model.has_text:
        sizes = {"vocabulary": vocabulary, "length": length, "pad_id": 0, "end_id": vocabulary - 1, "cleaning": "lower"}
        changes: dict[str, Any] = {f"text.{name}": value for name, value in sizes.items()}
        return replace_known_fields(model, changes) if dataset_info.vocabulary else model
    backbone = replace_known_fields(model, {"classes": 0, "regularization.dropout": 0.0})
    head_width = 64 if backbone.width % 64 == 0 and backbone.width >= 256 else 32
    width = max(head_width, min(MAX_TEXT_WIDTH, backbone.width // head_width * head_width))
    text = TextConfig(
        vocabulary=vocabulary,
        length=length,
        width=width,
        depth=max(2, min(MAX_TEXT_DEPTH, backbone.depth)),
        heads=width // head_width,
        hidden=4 * width,
        gelu="none",
        eps=1e-6,
        causal=causal,
        pool="end" if causal else "mean",
        embedding=backbone.num_features,
        projection_bias=not causal,
        end_id=vocabulary - 1,
    )
    return ImageTextConfig(backbone=backbone, text=text, bias=bias)


def pair_run_fields(model: ModelConfig, dataset_info: DatasetInfo) -> dict[str, Any]:
    """Return the common fields of runs on pairs: pixels from -1 to 1, and images distorted to the input size instead of
    cropped, because captions describe the whole image."""
    run_fields = base_run_fields(model, dataset_info)
    mean, std = HALF_MOMENTS
    is_colour = model.channels == len(mean)
    moments: dict[str, Any] = {"mean": mean, "std": std} if is_colour else {}
    return run_fields | {"preprocess": replace(run_fields["preprocess"], **moments).adjust(fit="squash")}


def make_small_pair_run(
    model: ModelConfig, dataset_info: DatasetInfo, options: TrainOptions, objective: ContrastiveConfig
) -> Run:
    """Build a run with the settings tuned here for fewer than 500,000 pairs. Initial weights are trained by AdamW with
    a lower learning rate; new weights by Muon, which needed fewer steps (docs/guides/contrastive.md)."""
    batch = max(2, min(SMALL_BATCH, dataset_info.images // 4))
    epochs = CONTRASTIVE_LENGTH.epochs(dataset_info.images)
    steps = max(1, round(epochs * dataset_info.images / batch))
    optimizer = OptimizerConfig("muon", lr=7e-4, matrix_lr=0.014, betas=(0.9, 0.95), weight_decay=0.05)
    if options.init:
        # a new text encoder needs larger steps than the initial weights of the image encoder
        rates = (("model.backbone.", 0.1),) if dataset_info.vocabulary else ()
        lr = 5e-4 if dataset_info.vocabulary else 1e-5
        optimizer = OptimizerConfig("adamw", lr, betas=(0.9, 0.95), weight_decay=0.05, rates=rates)
    return Run(
        **pair_run_fields(model, dataset_info),
        views=PAIR_VIEWS,
        optimizer=optimizer,
        schedule=ScheduleConfig(round(0.05 * steps)),
        objective=objective,
        batch_size=batch,
        epochs=epochs,
    )


def make_clip_run(model: ModelConfig, dataset_info: DatasetInfo, options: TrainOptions) -> Run:
    """Contrastive learning with the softmax loss: CLIP, arXiv:2103.00020, section 2.5 and Table 18. Fewer than 500,000
    pairs: tuned here.

    vitreous train PAIRS.csv --recipe NAME

    32 epochs of 400 million pairs, batch size 32,768, AdamW at 5e-4 (ViT-B), weight decay 0.2, 2,000 steps of warm-up.
    The factor of the logits starts at 1 / 0.07 and is at most 100. A model name such as CLIP-B/32-text selects both
    encoders; for a model of images, a text encoder of similar size is added. Without initial weights, the tokenizer is
    trained on the captions.
    """
    pair_model = add_text_encoder(model, dataset_info, causal=True, bias=False)
    objective = ContrastiveConfig()
    if dataset_info.images < FEW_PAIRS:
        return make_small_pair_run(pair_model, dataset_info, options, objective)
    return Run(
        **pair_run_fields(pair_model, dataset_info),
        views=PAIR_VIEWS,
        optimizer=OptimizerConfig(
            "adamw", lr=5e-4, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.2, decay_on="multi-axis", clip=None
        ),
        schedule=ScheduleConfig(2000),
        objective=objective,
        batch_size=32_768,
        epochs=32,
    )


def make_siglip_run(model: ModelConfig, dataset_info: DatasetInfo, options: TrainOptions) -> Run:
    """Contrastive learning with the sigmoid loss: SigLIP, arXiv:2303.15343, section 4.2. Fewer than 500,000 pairs:
    tuned here.

    vitreous train PAIRS.csv --recipe NAME

    9 billion pairs of WebLI, batch size 32,768, lr 1e-3, weight decay 1e-4, beta2 0.95; AdamW replaces the authors'
    Adafactor. The factor of the logits starts at 10 and the bias at -10. Models and tokenizers as in the recipe clip.
    """
    pair_model = add_text_encoder(model, dataset_info, causal=False, bias=True)
    objective = ContrastiveConfig(loss="sigmoid", scale=10.0)
    if dataset_info.images < FEW_PAIRS:
        return make_small_pair_run(pair_model, dataset_info, options, objective)
    return Run(
        **pair_run_fields(pair_model, dataset_info),
        views=PAIR_VIEWS,
        optimizer=OptimizerConfig("adamw", lr=1e-3, betas=(0.9, 0.95), weight_decay=1e-4),
        schedule=ScheduleConfig(20_000),
        objective=objective,
        batch_size=32_768,
        epochs=9e9 / dataset_info.images,
    )


def make_lit_run(model: ModelConfig, dataset_info: DatasetInfo, options: TrainOptions) -> Run:
    """A text encoder for a frozen image encoder: LiT, arXiv:2111.07991, with the sigmoid loss of SigLIP, as in
    big_vision's siglip_lit_coco.py.

    vitreous train PAIRS.csv --recipe NAME --init WEIGHTS

    --init are the weights of any image encoder, which is not trained. 5,000 steps of batch size 512, as for COCO
    captions; fewer than 500,000 pairs: tuned here. lr 1e-3, weight decay 0.01, gradients clipped to 1, warm-up of 3 %.
    The factor of the logits starts at 10, the bias at -2.71. The authors' text encoder is a pre-trained BERT, here it
    starts from random weights. Their flips and RandAugment are omitted: captions may contain left, right and colours.
    """
    pair_model = add_text_encoder(model, dataset_info, causal=False, bias=True)
    objective = ContrastiveConfig(loss="sigmoid", scale=10.0, bias=-2.71, freeze_image=True)
    batch = max(2, min(512, dataset_info.images // 4))
    is_small = dataset_info.images < FEW_PAIRS
    epochs = CONTRASTIVE_LENGTH.epochs(dataset_info.images) if is_small else 5000 * batch / dataset_info.images
    steps = max(1, round(epochs * dataset_info.images / batch))
    return Run(
        **pair_run_fields(pair_model, dataset_info),
        views=PAIR_VIEWS,
        optimizer=OptimizerConfig("adamw", lr=1e-3, betas=(0.9, 0.999), weight_decay=0.01),
        schedule=ScheduleConfig(max(round(0.03 * steps), min(100, steps // 10))),
        objective=objective,
        batch_size=batch,
        epochs=epochs,
    )


SMALL_PAIR_MODEL = "Conv+ViT-128x4/8"  # image encoder for images up to 64 pixels
PAIR_LENGTHS = (("fewer than 500,000 pairs", CONTRASTIVE_LENGTH),)
CONTRASTIVE_RECIPES = (
    Recipe(
        "clip",
        make_clip_run,
        "images and texts, softmax loss",
        "arXiv:2103.00020",
        lr_scaling="sqrt",
        published=(("CLIP-B/32-text", "ImageNet, zero-shot", "63.2 %"), ("CLIP-L/14-text", "ImageNet", "75.3 %")),
        data="WIT-400M",
        models=("CLIP-B/32-text",),
        small=SMALL_PAIR_MODEL,
        few="ViT-S/16",
        objective=ContrastiveConfig,
        for_models="vit",
        lengths=PAIR_LENGTHS,
    ),
    Recipe(
        "siglip",
        make_siglip_run,
        "images and texts, sigmoid loss",
        "arXiv:2303.15343",
        lr_scaling="sqrt",
        data="WIT-400M",
        models=("SigLIP-B/16-text",),
        small=SMALL_PAIR_MODEL,
        few="ViT-S/16",
        objective=ContrastiveConfig,
        for_models="vit",
        lengths=PAIR_LENGTHS,
    ),
    Recipe(
        "lit",
        make_lit_run,
        "a text encoder for a frozen image encoder",
        "arXiv:2111.07991",
        lr_scaling="sqrt",
        data="WIT-400M",
        objective=ContrastiveConfig,
        from_weights=True,
        by_steps=True,
        lengths=PAIR_LENGTHS,
    ),
)
