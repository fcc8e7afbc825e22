"""Names of video models, read and written: ViViT (arXiv:2103.15691) and VideoMAE (arXiv:2203.12602)."""

from __future__ import annotations

import re
from typing import Any

from vitreous.errors import UsageError
from vitreous.models.configs.video import ARRANGEMENTS, VideoConfig
from vitreous.models.configs.vit import ViTConfig
from vitreous.models.presets import NO_TOKENS, Image, at, plain, plain_name
from vitreous.nn.sizes import format_size, nearby

#: what VideoMAE's encoder has, fine-tuned: 16 frames, no prefix token
VIDEOMAE: dict[str, Any] = NO_TOKENS | {"norm": "pooled", "position": "sinusoid", "no_key_bias": True}
#: ViViT's models 2 to 4 have the name of their arrangement after the patch
_VIDEO = re.compile(
    r"(?P<kind>vivit|videomae)-(?P<rest>\w+/\d+(?:x\d+)?)x(?P<time>\d+)(?:-(?P<arrangement>\w+-[\w-]+))?", re.IGNORECASE
)


def parse_video(name: str, image: Image) -> ViTConfig | None:
    """`ViViT-B/16x2`, of patches of 16 x 16 pixels in 2 frames, with the arrangement after it where it is not joint,
    `ViViT-B/16x2-factorised-encoder`; or `VideoMAE-B/16x2`. Raises UsageError for a patch of no frame."""
    match = _VIDEO.fullmatch(name)
    arrangement = ((match and match["arrangement"]) or "joint").lower()
    if match is None or arrangement not in ARRANGEMENTS:
        return None
    flat, time = plain(match["rest"]), int(match["time"])
    if time < 1:
        raise UsageError(f"unknown model {name}", "a patch is at least one frame")
    videomae = match["kind"].lower() == "videomae"
    apart: dict[str, Any] = {"position": "space-time"} if arrangement == "factorised-encoder" else {}
    options = (VIDEOMAE if videomae else apart) | {"arrangement": arrangement, "patch": (time, *flat.patch)}
    clip = image if image and len(image) == 3 else (16 if videomae else 32, *(image or flat.image))
    return at(flat, options, clip if image else nearby(clip, options["patch"]))


def video_name(config: VideoConfig) -> str:
    """`ViViT-B/16x2`, `ViViT-B/16x2-factorised-encoder`, or `VideoMAE-B/16x2`, which has its fixed positions."""
    time, *sides = config.patch
    flat = plain_name(config).partition("/")[0]
    kind = "VideoMAE" if config.position == "sinusoid" else "ViViT"
    arrangement = "" if config.arrangement == "joint" else f"-{config.arrangement}"
    return f"{kind}-{flat}/{format_size(tuple(sides))}x{time}{arrangement}"
