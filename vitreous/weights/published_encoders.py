"""Encoders that others start from: DINOv3, EVA-02, PE-Spatial and AIMv2, and CLIP, SigLIP, SigLIP 2, EVA-02-CLIP and
PE-Core with their text encoders. Does not import PyTorch.

Accuracies are those of the authors' model cards; timm's names are those of its pretrained configs (timm 1.0.31).
"""

from __future__ import annotations

from vitreous.weights.published_entry import REAL_PROBE_METRIC, ZERO_SHOT_METRIC, PublishedWeights

OPEN_CLIP_TABLE = "openclip_results.csv of open_clip"
PE_REFERENCE = "README of facebookresearch/perception_models"
PAIR_FILE = "open_clip_model.safetensors"  # both encoders; a repository may also have the image encoder alone


def dinov3_weights(name: str, model: str, repository: str, accuracy: float | None) -> PublishedWeights:
    """Build the entry of DINOv3 weights (arXiv:2508.10104)."""
    return PublishedWeights(
        name,
        model,
        source=f"hf:facebook/dinov3-{repository}",
        image_size=224,
        licence="DINOv3 License",
        reference="MODEL_CARD.md of facebookresearch/dinov3",
        accuracy=accuracy,
        accuracy_note=REAL_PROBE_METRIC,
        gated=True,
    )


def eva02_weights(name: str, model: str, tag: str, size: int = 224) -> PublishedWeights:
    """Build the entry of EVA-02 weights (arXiv:2303.11331) in timm's format."""
    source, reference = f"hf:timm/{tag}", "timm 1.0, eva.py"
    return PublishedWeights(name, model, source=source, image_size=size, licence="MIT", reference=reference)


def zero_shot_weights(
    name: str, model: str, source: str, size: int, accuracy: float, *, reference: str, licence: str
) -> PublishedWeights:
    """Build the entry of an image encoder with its text encoder, whose accuracy is that of zero-shot classification."""
    return PublishedWeights(
        name,
        model,
        source=source,
        image_size=size,
        licence=licence,
        reference=reference,
        accuracy=accuracy,
        accuracy_note=ZERO_SHOT_METRIC,
    )


def image_text_weights(name: str, model: str, repository: str, size: int, accuracy: float) -> PublishedWeights:
    """Build the entry of a CLIP, SigLIP or SigLIP 2 with its text encoder; figures of SigLIP 2 are its authors'."""
    is_authors = model.startswith("SigLIP2")
    reference = "README_siglip2.md of google-research/big_vision" if is_authors else OPEN_CLIP_TABLE
    licence = "MIT" if model.startswith("CLIP") else "Apache-2.0"
    return zero_shot_weights(name, model, f"hf:{repository}", size, accuracy, reference=reference, licence=licence)


def eva02_clip_weights(name: str, model: str, tag: str, size: int, accuracy: float) -> PublishedWeights:
    """Build the entry of an EVA-02-CLIP (arXiv:2303.15389) with its text encoder in open_clip's format."""
    source = f"hf:timm/eva02_{tag}:{PAIR_FILE}"
    return zero_shot_weights(name, model, source, size, accuracy, reference=OPEN_CLIP_TABLE, licence="MIT")


def pe_core_weights(name: str, model: str, tag: str, size: int, accuracy: float) -> PublishedWeights:
    """Build the entry of a PE-Core (arXiv:2504.13181) with its text encoder in open_clip's format."""
    source = f"hf:timm/PE-Core-{tag}:{PAIR_FILE}"
    return zero_shot_weights(name, model, source, size, accuracy, reference=PE_REFERENCE, licence="Apache-2.0")


def pe_spatial_weights(name: str, model: str, tag: str, size: int) -> PublishedWeights:
    """Build the entry of a PE-Spatial (arXiv:2504.13181) in timm's format."""
    source, licence = f"hf:timm/vit_pe_spatial_{tag}.fb", "Apache-2.0"
    return PublishedWeights(name, model, source=source, image_size=size, licence=licence, reference=PE_REFERENCE)


def aimv2_weights(name: str, model: str, tag: str, size: int = 224) -> PublishedWeights:
    """Build the entry of AIMv2 weights (arXiv:2411.14402) in timm's format."""
    source, reference = f"hf:timm/aimv2_{tag}.apple_pt", "README of apple/ml-aim"
    return PublishedWeights(name, model, source=source, image_size=size, licence="Apple ASCL", reference=reference)


ENCODERS = (
    image_text_weights("clip-b32", "CLIP-B/32-text", "openai/clip-vit-base-patch32", 224, 0.633),
    image_text_weights("clip-b16", "CLIP-B/16-text", "openai/clip-vit-base-patch16", 224, 0.683),
    image_text_weights("clip-l14", "CLIP-L/14-text", "openai/clip-vit-large-patch14", 224, 0.755),
    image_text_weights("clip-l14-336", "CLIP-L/14-text", "openai/clip-vit-large-patch14-336", 336, 0.766),
    image_text_weights("siglip-b16", "SigLIP-B/16-text", "google/siglip-base-patch16-224", 224, 0.760),
    image_text_weights("siglip-so400m14", "SigLIP-So400m/14-text", "google/siglip-so400m-patch14-384", 378, 0.831),
    image_text_weights("siglip2-b16", "SigLIP2-B/16-text", "google/siglip2-base-patch16-256", 256, 0.791),
    image_text_weights("siglip2-l16", "SigLIP2-L/16-text", "google/siglip2-large-patch16-384", 384, 0.831),
    image_text_weights("siglip2-so400m16", "SigLIP2-So400m/16-text", "google/siglip2-so400m-patch16-384", 384, 0.841),
    image_text_weights("siglip2-gopt16", "SigLIP2-gopt/16-text", "google/siglip2-giant-opt-patch16-384", 384, 0.850),
    image_text_weights("siglip2-b16-naflex", "SigLIP2-B/16-text", "google/siglip2-base-patch16-naflex", 256, 0.785),
    image_text_weights(
        "siglip2-so400m16-naflex", "SigLIP2-So400m/16-text", "google/siglip2-so400m-patch16-naflex", 256, 0.835
    ),
    dinov3_weights("dinov3-s16", "DINOv3-S/16", "vits16-pretrain-lvd1689m", 0.870),
    dinov3_weights("dinov3-s16-plus", "DINOv3-S+/16", "vits16plus-pretrain-lvd1689m", 0.880),
    dinov3_weights("dinov3-b16", "DINOv3-B/16", "vitb16-pretrain-lvd1689m", 0.893),
    dinov3_weights("dinov3-l16", "DINOv3-L/16", "vitl16-pretrain-lvd1689m", 0.902),
    dinov3_weights("dinov3-l16-satellite", "DINOv3-L/16", "vitl16-pretrain-sat493m", None),
    dinov3_weights("dinov3-h16-plus", "DINOv3-H+/16", "vith16plus-pretrain-lvd1689m", 0.903),
    dinov3_weights("dinov3-7b16", "DINOv3-7B/16", "vit7b16-pretrain-lvd1689m", 0.904),
    eva02_weights("eva02-ti14", "EVA02-Ti/14", "eva02_tiny_patch14_224.mim_in22k"),
    eva02_weights("eva02-s14", "EVA02-S/14", "eva02_small_patch14_224.mim_in22k"),
    eva02_weights("eva02-b14", "EVA02-B/14", "eva02_base_patch14_224.mim_in22k"),
    eva02_weights("eva02-l14", "EVA02-L/14", "eva02_large_patch14_224.mim_m38m"),
    eva02_clip_weights(
        "eva02-clip-b16", "EVA02-CLIP-B/16-text", "base_patch16_clip_224.merged2b_s8b_b131k", 224, 0.747
    ),
    eva02_clip_weights(
        "eva02-clip-l14", "EVA02-CLIP-L/14-text", "large_patch14_clip_224.merged2b_s4b_b131k", 224, 0.798
    ),
    eva02_clip_weights(
        "eva02-clip-l14-336", "EVA02-CLIP-L/14-text", "large_patch14_clip_336.merged2b_s6b_b61k", 336, 0.804
    ),
    pe_core_weights("pe-core-ti16-384", "PE-Core-Ti/16-text", "T-16-384", 384, 0.621),
    pe_core_weights("pe-core-s16-384", "PE-Core-S/16-text", "S-16-384", 384, 0.727),
    pe_core_weights("pe-core-b16", "PE-Core-B/16-text", "B-16", 224, 0.784),
    pe_core_weights("pe-core-l14-336", "PE-Core-L/14-text", "L-14-336", 336, 0.835),
    pe_core_weights("pe-core-g14-448", "PE-Core-G/14-text", "bigG-14-448", 448, 0.854),
    pe_spatial_weights("pe-spatial-b16-512", "PE-Spatial-B/16", "base_patch16_512", 512),
    pe_spatial_weights("pe-spatial-l14-448", "PE-Spatial-L/14", "large_patch14_448", 448),
    aimv2_weights("aimv2-l14", "AIMv2-L/14", "large_patch14_224"),
    aimv2_weights("aimv2-h14", "AIMv2-H/14", "huge_patch14_224"),
    aimv2_weights("aimv2-1b14", "AIMv2-1B/14", "1b_patch14_224"),
    aimv2_weights("aimv2-3b14", "AIMv2-3B/14", "3b_patch14_224"),
)
