"""Read settings that weights files lack from the files next to them: config.json, class names, metadata."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vitreous.errors import WeightsError
from vitreous.models.config import ModelConfig
from vitreous.nn.grid import RESIZE_MODES
from vitreous.weights.entry import UnsupportedModelError, sanitise_name

GELU_FORMS = {
    "gelu": "none",
    "gelu_python": "none",
    "gelu_new": "tanh",
    "gelu_fast": "tanh",
    "gelu_pytorch_tanh": "tanh",
    "quick_gelu": "quick",
}
TRANSFORMERS_FIELDS = {
    "width": "hidden_size",
    "depth": "num_hidden_layers",
    "heads": "num_attention_heads",
    "mlp.hidden": "intermediate_size",
    "channels": "num_channels",
    "registers": "num_register_tokens",
}
#: settings of the one BiT of transformers that is supported
BIT_REQUIRED_SETTINGS = {
    "layer_type": "preactivation",
    "global_padding": None,
    "num_groups": 32,
    "embedding_dynamic_padding": False,
    "hidden_act": "relu",
}


#: model_type of a config.json -> title of the format of its tensors
MODEL_TYPE_TITLES = {
    "vit": "transformers' ViT, DeiT, ViTMAE, I-JEPA or ViViT",
    "deit": "transformers' ViT, DeiT, ViTMAE, I-JEPA or ViViT",
    "vit_mae": "transformers' ViT, DeiT, ViTMAE, I-JEPA or ViViT",
    "vit_msn": "transformers' ViT, DeiT, ViTMAE, I-JEPA or ViViT",
    "ijepa": "transformers' ViT, DeiT, ViTMAE, I-JEPA or ViViT",
    "vivit": "transformers' ViT, DeiT, ViTMAE, I-JEPA or ViViT",
    "videomae": "transformers' VideoMAE",
    "dinov2": "transformers' DINOv2",
    "dinov2_with_registers": "transformers' DINOv2",
    "dinov3_vit": "transformers' DINOv3",
    "aimv2_vision_model": "transformers' AIMv2",
    "tipsv2_vision_model": "transformers' TIPSv2",
    "clip": "transformers' CLIP",
    "clip_vision_model": "transformers' CLIP image encoder",
    "siglip": "transformers' SigLIP",
    "siglip2": "transformers' SigLIP",
    "siglip_vision_model": "transformers' SigLIP image encoder",
    "siglip2_vision_model": "transformers' SigLIP image encoder",
    "sam": "transformers' SAM image encoder",
    "sam_vision_model": "transformers' SAM image encoder",
    "bit": "transformers' BiT",
    "swin": "transformers' Swin",
    "swinv2": "transformers' Swin V2",
}


def check_model_type(config: dict[str, Any], title: str = "") -> None:
    """Check the `model_type` of a transformers config.json. Other models have the same tensor names but another
    computation, so tensors alone do not identify a model.

    Raises UnsupportedModelError for an unsupported type, and WeightsError for one that does not match the detected
    format `title`.
    """
    family = config.get("model_type")
    # timm and open_clip have other model types
    if family is None or "architecture" in config or "model_cfg" in config:
        return
    if not isinstance(family, str) or family not in MODEL_TYPE_TITLES:
        raise UnsupportedModelError(
            f"config.json has model_type {str(family)[:40]}, which is not supported",
            f"supported types are {', '.join(MODEL_TYPE_TITLES)}",
        )
    # a file of a model with two encoders may contain only the image encoder
    if title and title not in (MODEL_TYPE_TITLES[family], f"{MODEL_TYPE_TITLES[family]} image encoder"):
        raise WeightsError(
            f"config.json has model_type {family}, but the tensors are those of {title}",
            "download config.json and the weights again",
        )


def parse_transformers_config(config: dict[str, Any]) -> dict[str, Any]:
    """Parse the config fields, by dotted path, that transformers' config.json sets. Raises WeightsError for unsupported
    values."""
    if config.get("_class_name") == "DiTTransformer2DModel":
        field_names = {"heads": "num_attention_heads", "image": "sample_size"}
        fields = {
            ours: require_config_integer(theirs, config[theirs])
            for ours, theirs in field_names.items()
            if theirs in config
        }
        return fields | ({"image": (fields["image"],) * 2} if "image" in fields else {})
    if config.get("model_type") == "bit":
        for name, required in BIT_REQUIRED_SETTINGS.items():
            if config.get(name, required) != required:
                raise WeightsError(
                    f"config.json has {name} {str(config[name])[:40]}: a ResNet other than BiT is not supported"
                )
        return {}
    swin = config.get("model_type") in ("swin", "swinv2")
    if swin and config.get("use_absolute_embeddings"):
        raise WeightsError("config.json has use_absolute_embeddings: a Swin with positions is not supported")
    # a Swin's config has lists per stage, which the tensor shapes also determine; hidden_size is that of the last stage
    field_names = {} if swin else TRANSFORMERS_FIELDS
    settings: dict[str, Any] = {
        ours: require_config_integer(theirs, config[theirs])
        for ours, theirs in field_names.items()
        if config.get(theirs) is not None
    }
    if swin and config.get("window_size") is not None:
        settings["attention.window"] = require_config_integer("window_size", config["window_size"])
        pretrained_sizes = config.get("pretrained_window_sizes") or ()
        settings["attention.pretrained_window"] = tuple(
            require_config_integer("pretrained_window_sizes", size) for size in pretrained_sizes
        )
    eps_name = "layer_norm_eps" if "layer_norm_eps" in config else "rms_norm_eps"
    if config.get(eps_name) is not None:
        eps = settings["norm.eps"] = config[eps_name]
        if not isinstance(eps, float) or not 0 < eps < 1:
            raise WeightsError(
                f"config.json has {eps_name} {str(eps)[:40]}, which is not a small number", "download it again"
            )
    if config.get("use_gated_mlp") or config.get("model_type") == "aimv2_vision_model":
        if config.get("hidden_act") != "silu":
            activation = str(config.get("hidden_act"))[:40]
            raise WeightsError(
                f"config.json has hidden_act {activation} for a gated MLP, which is not supported", "supported is silu"
            )
    elif config.get("hidden_act") is not None:
        if str(config["hidden_act"]) not in GELU_FORMS:
            raise WeightsError(f"config.json has hidden_act {str(config['hidden_act'])[:40]}, which is not supported")
        settings["mlp.gelu"] = GELU_FORMS[str(config["hidden_act"])]
    if config.get("rope_theta") is not None:
        settings["rotary.base"] = config["rope_theta"]
        if type(settings["rotary.base"]) not in (int, float) or not 1 < settings["rotary.base"] < 1e9:
            raise WeightsError(
                f"config.json has rope_theta {str(config['rope_theta'])[:40]}, which is not a number > 1"
            )
        settings["rotary.base"] = float(settings["rotary.base"])
    if config.get("qkv_bias") is not None:
        settings["attention.qkv_bias"] = config["qkv_bias"]
        if not isinstance(settings["attention.qkv_bias"], bool):
            raise WeightsError(
                f"config.json has qkv_bias {str(config['qkv_bias'])[:40]}, which is neither true nor false",
                "download it again",
            )
    for ours, theirs in (("image", "image_size"), ("patch", "patch_size")):
        size = config.get(theirs)
        if size is not None:
            lengths = size if isinstance(size, list) and len(size) == 2 else [size, size]
            settings[ours] = tuple(require_config_integer(theirs, length) for length in lengths)
    if config.get("model_type") == "siglip2_vision_model":  # NaFlex, whose positions are always a square
        side = math.isqrt(require_config_integer("num_patches", config.get("num_patches", 256)))
        settings["image"] = tuple(side * length for length in settings.get("patch", (16, 16)))
    return settings | parse_video_config(config, settings)


def parse_video_config(config: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Parse image and patch size, three axes each, from the config.json of a VideoMAE or a ViViT; {} for other models.
    Raises WeightsError for unsupported values."""
    if config.get("model_type") not in ("videomae", "vivit"):
        return {}
    size = config.get("tubelet_size", 2)
    lengths = size if isinstance(size, list) else [size, *settings.get("patch", (16, 16))]
    if len(lengths) != 3:
        raise WeightsError(f"config.json has tubelet_size {str(size)[:40]}, which does not have three axes")
    frames = require_config_integer(
        "num_frames", config.get("num_frames", 16 if config["model_type"] == "videomae" else 32)
    )
    return {
        "image": (frames, *settings.get("image", (224, 224))),
        "patch": tuple(require_config_integer("tubelet_size", length) for length in lengths),
    }


def parse_window_from_name(name: str) -> dict[str, Any]:
    """Parse the attention windows of a Swin V2 from its published file name; {} if it has none. In
    `..._window12to24_...`, windows have 24 tokens, and the positions of the four stages were trained with windows of
    12."""
    match = re.search(r"window(?:(\d{1,3})to)?(\d{1,3})(?!\d)", name)
    if match is None or not int(match[2]):
        return {}
    pretrained_window = int(match[1] or 0)
    return {"attention.window": int(match[2])} | (
        {"attention.pretrained_window": (pretrained_window,) * 3 + (pretrained_window // 2,)}
        if pretrained_window
        else {}
    )


def require_config_integer(name: str, value: Any) -> int:
    """Return the value of a setting in config.json. Raises WeightsError unless it is an integer from 0 to a million."""
    if type(value) is not int or not 0 <= value <= 1_000_000:
        raise WeightsError(
            f"config.json has {name} {str(value)[:40]}, which is not an integer from 0 to 1,000,000",
            "download it again",
        )
    return value


def parse_model_config(settings: dict[str, Any]) -> dict[str, Any]:
    """Parse the config fields, by dotted path, that a config.json of transformers (CLIP's has two towers), open_clip or
    timm sets."""
    if "model_cfg" in settings:
        return parse_open_clip_config(get_nested_dict(settings, "model_cfg"))
    # a config.json of a model with a text encoder, or of a full SAM, has `vision_config`
    text_fields = parse_text_config(get_nested_dict(settings, "text_config"))
    settings = get_nested_dict(settings, "vision_config") or settings
    if "architecture" not in settings:
        return parse_transformers_config(settings) | text_fields
    size = get_nested_dict(settings, "pretrained_cfg").get("input_size")
    fields: dict[str, Any] = (
        {"image": tuple(require_config_integer("input_size", length) for length in size[1:])}
        if isinstance(size, list)
        else {}
    )
    if "swinv2" in str(settings["architecture"]):
        fields |= parse_window_from_name(str(settings["architecture"]))
    fields["positions.resize"] = "bicubic-antialias"  # timm's rule for all weights that it loads
    if "quickgelu" in str(settings["architecture"]):
        fields["mlp.gelu"] = "quick"
    if TIMM_TANH_GELU.search(str(settings["architecture"])):
        fields["mlp.gelu"] = "tanh"
    return fields


#: timm 1.0.31, vision_transformer.py and naflexvit.py: image encoders of SigLIP with the tanh approximation of GELU
TIMM_TANH_GELU = re.compile(
    r"patch32_siglip|large_patch16_siglip_(gap_)?512|so400m_patch16_siglip|giantopt|naflex\w*_siglip"
)


def parse_open_clip_config(config: dict[str, Any]) -> dict[str, Any]:
    """Parse the config fields that the `model_cfg` of an open_clip_config.json sets. It sets quick_gelu only for
    weights with the GELU of OpenAI's CLIP. Raises WeightsError for invalid values."""
    image, text = get_nested_dict(config, "vision_cfg"), get_nested_dict(config, "text_cfg")
    trunk = str(image.get("timm_model_name") or "")
    tanh = get_nested_dict(text, "act_kwargs").get("approximate") == "tanh"
    quick = "quick" if config.get("quick_gelu") else "none"
    fields = {
        "mlp.gelu": "tanh" if TIMM_TANH_GELU.search(trunk) else quick,
        "positions.resize": "bicubic-antialias",
        "text.gelu": "tanh" if tanh else quick,
        "text.causal": not text.get("no_causal_mask"),
        "text.pool": "last" if text.get("pool_type") == "last" else "end",
    }
    eps = get_nested_dict(text, "norm_kwargs").get("eps")
    if isinstance(eps, float) and 0 < eps < 1:
        fields["text.eps"] = eps
    if text.get("heads") is not None:
        fields["text.heads"] = require_config_integer("heads", text["heads"])
    return fields


def parse_text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Parse the fields of a text encoder, by paths that start with `text.`, from the `text_config` of transformers'
    CLIP and SigLIP. Raises WeightsError for unsupported values."""
    if config.get("model_type") not in ("clip_text_model", "siglip_text_model", "siglip2_text_model"):
        return {}
    parsed = parse_transformers_config(config)
    names = {"heads": "heads", "mlp.gelu": "gelu", "norm.eps": "eps", "width": "width", "depth": "depth"}
    fields = {f"text.{ours}": parsed[path] for path, ours in names.items() if path in parsed}
    sizes = {"text.vocabulary": "vocab_size", "text.length": "max_position_embeddings"}
    # the padding and end of SigLIP's config.json are those of CLIP's class, not those of its tokenizer
    if config["model_type"] == "clip_text_model":
        sizes |= {"text.end_id": "eos_token_id"}
    return fields | {
        path: require_config_integer(name, config[name]) for path, name in sizes.items() if config.get(name) is not None
    }


def get_nested_dict(settings: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the nested JSON object under a key; {} if there is none."""
    return settings[name] if isinstance(settings.get(name), dict) else {}


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON object of at most 8 MiB; {} if the file does not exist. Raises WeightsError for a larger file or
    other content."""
    if not path.is_file():
        return {}
    try:
        if path.stat().st_size > 8 << 20:
            raise ValueError("larger than 8 MiB")
        content = json.loads(path.read_text("utf-8"))
        if not isinstance(content, dict):
            raise ValueError("not an object")
        return content
    except (ValueError, OSError, RecursionError) as error:
        raise WeightsError(f"{path} is not valid JSON for weights ({error})", "download it again") from None


def parse_class_names(config: ModelConfig, settings: dict[str, Any]) -> tuple[str, ...]:
    """Parse the class names in a config.json. If they are missing, not distinct or of another number than the model's
    classes, return the class numbers."""
    labels = settings.get("id2label") or {}
    names = tuple(str(labels.get(str(i), "")) for i in range(config.classes)) if isinstance(labels, dict) else ()
    has_all_names = len(names) == config.classes and all(names) and len(set(names)) == len(names)
    return names if has_all_names else tuple(map(str, range(config.classes)))


METADATA_KEY = "vitreous"
#: config fields that metadata may contain -> check of the value
METADATA_VALIDATORS: dict[str, Callable[[Any], bool]] = {
    "image": lambda v: (
        isinstance(v, list) and 0 < len(v) < 5 and all(isinstance(side, int) and 0 < side < 1 << 16 for side in v)
    ),
    "heads": lambda v: isinstance(v, int) and 0 < v < 1 << 12,
    "attention.pad": lambda v: v in ("mask", "zeros", "zeros-after-shift"),
    "mlp.gelu": lambda v: v in ("none", "tanh", "quick"),
    "norm.eps": lambda v: isinstance(v, float) and 0 < v < 1,
    "eps": lambda v: isinstance(v, float) and 0 < v < 1,
    "positions.resize": lambda v: v in RESIZE_MODES,
    "norm.final": lambda v: v in ("tokens", "pooled", "none"),
    "attention.qkv_bias": lambda v: isinstance(v, bool),
    "projection_bias": lambda v: isinstance(v, bool),
    "rotary.rounded": lambda v: isinstance(v, bool),
    "text.heads": lambda v: isinstance(v, int) and 0 < v < 1 << 12,
    "text.gelu": lambda v: v in ("none", "tanh", "quick"),
    "text.eps": lambda v: isinstance(v, float) and 0 < v < 1,
    "text.causal": lambda v: isinstance(v, bool),
    "text.pool": lambda v: v in ("end", "last", "mean"),
    "text.pad_id": lambda v: type(v) is int and 0 <= v < 1 << 24,
    "text.end_id": lambda v: type(v) is int and 0 <= v < 1 << 24,
}
#: fields of a detector besides its backbone's
DETECTOR_METADATA_VALIDATORS: dict[str, Callable[[Any], bool]] = {
    "agnostic": lambda v: isinstance(v, bool),
    "round_anchors": lambda v: isinstance(v, bool),
    "proposals": lambda v: type(v) is int and 0 < v < 1 << 16,
    "detections": lambda v: type(v) is int and 0 < v < 1 << 16,
    "nms": lambda v: isinstance(v, float) and 0 < v <= 1,
    "threshold": lambda v: isinstance(v, float) and 0 <= v < 1,
    "scores": lambda v: v in ("softmax", "sigmoid"),
}
#: fields that no tensor of a Swin V2 determines
SWIN_METADATA_VALIDATORS: dict[str, Callable[[Any], bool]] = {
    "attention.window": lambda v: type(v) is int and 0 < v < 1 << 12,
    "attention.pretrained_window": lambda v: (
        isinstance(v, list) and len(v) < 16 and all(type(side) is int and 0 <= side < 1 << 12 for side in v)
    ),
}


def config_to_metadata(config: ModelConfig) -> dict[str, str]:
    """Build the file metadata that stores config fields which a model's tensors do not determine."""
    return {METADATA_KEY: json.dumps(config.metadata_fields())}


def config_from_metadata(path: Path, metadata: dict[str, str]) -> dict[str, Any]:
    """Read the config fields stored in a file's metadata; {} if there are none. Raises WeightsError for metadata that
    `config_to_metadata` does not write."""
    if METADATA_KEY not in metadata:
        return {}
    try:
        noted_fields = json.loads(metadata[METADATA_KEY])
        validators = METADATA_VALIDATORS | SWIN_METADATA_VALIDATORS | DETECTOR_METADATA_VALIDATORS
        invalid = [name for name in noted_fields if name not in validators or not validators[name](noted_fields[name])]
        if invalid or not isinstance(noted_fields, dict):
            raise ValueError(f"an invalid value of {sanitise_name(str(invalid[0] if invalid else noted_fields))}")
    except (ValueError, TypeError, RecursionError) as error:
        raise WeightsError(f"{path} has damaged metadata ({error})", "restore the file from a copy") from None
    return {name: tuple(value) if isinstance(value, list) else value for name, value in noted_fields.items()}
