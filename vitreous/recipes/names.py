"""The names of the recipes. Does not import PyTorch, so unknown names are rejected immediately; `registry` contains the
recipes."""

from __future__ import annotations

from vitreous.errors import UsageError, suggest_nearest

#: augmentation level of AugReg (arXiv:2106.10270) -> RandAugment layers, RandAugment magnitude, MixUp alpha
AUGREG_LEVELS = {
    "none": (0, 0, 0.0),
    "light1": (2, 0, 0.0),
    "light2": (2, 10, 0.2),
    "medium1": (2, 15, 0.2),
    "medium2": (2, 15, 0.5),
    "strong1": (2, 20, 0.5),
    "strong2": (2, 20, 0.8),
}

#: recipes that are chosen if --recipe is not set
DEFAULT_RECIPE_NAMES = ("digits", "small", "photos", "finetune", "finetune-encoder")

RECIPE_NAMES = (
    *DEFAULT_RECIPE_NAMES,
    *(f"vit-{data}" for data in ("imagenet", "imagenet21k", "jft")),
    *(f"bit-{data}" for data in ("jft-adam", "jft-sgd", "imagenet", "imagenet21k")),
    *(f"finetune-{data}" for data in ("imagenet", "imagenet-512", "cifar", "pets", "flowers", "vtab")),
    "bit-hyperrule",
    *(
        f"augreg-{data}{level}"
        for data in ("imagenet", "imagenet21k")
        for level in ("", *(f"-{level_name}" for level_name in AUGREG_LEVELS))
    ),
    "augreg-finetune-imagenet",
    *(f"augreg-finetune-{data}{length}" for data in ("pets", "cifar", "vtab") for length in ("", "-long")),
    *("plain-vit", "plain-vit-300", "deit", "distil", "deit-384", "deit3", "deit3-finish"),
    *("vit5", "vit5-finish"),
    "regression",
    *("swin", "swin-imagenet21k", "swin-finetune", "swin-384"),
    *(
        "masked-patches",
        "mae",
        "dino",
        "dinov2",
        "dinov2-large",
        "dinov3",
        "dinov3-gram",
        "dinov3-highres",
        "distil-features",
        "videomae",
        "mae-finetune",
        "dino-finetune",
        "segment",
    ),
    *("clip", "siglip", "lit"),
    *("swin-upernet", "adapter-upernet", "dinov2-segment"),
    *("detect", "vitdet", "vitdet-lvis", "swin-mask-rcnn", "adapter-mask-rcnn", "dit", "sit"),
)


def check_recipe_name(name: str) -> str:
    """Return the name if it is the name of a recipe. Raises UsageError, with the most similar name, if it is not."""
    if name not in RECIPE_NAMES:
        raise UsageError(
            f"unknown recipe {name}", suggest_nearest(name, RECIPE_NAMES) or "list all recipes: vitreous recipes"
        )
    return name
