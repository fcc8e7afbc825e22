"""Configs of video Transformers: ViViT (arXiv:2103.15691) and VideoMAE (arXiv:2203.12602)."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from vitreous.errors import UsageError
from vitreous.models.configs.base import ImageSize
from vitreous.models.configs.vit import ViTConfig, change_config, parse_plain_vit
from vitreous.models.cost import block_macs
from vitreous.models.presets import NO_TOKENS
from vitreous.nn.sizes import format_size, nearest_divisible_size, patch_grid

#: how attention over space and time is arranged: models 1 to 4 of ViViT, section 3.3
Arrangement = Literal["joint", "factorised-encoder", "factorised-attention", "factorised-dot-product"]
ARRANGEMENTS: tuple[str, ...] = get_args(Arrangement)
#: options of VideoMAE's fine-tuned encoder: 16 frames, no prefix token
VIDEOMAE: dict[str, Any] = NO_TOKENS | {
    "norm.final": "pooled",
    "positions.kind": "sinusoid",
    "attention.key_bias": False,
}
#: names such as ViViT-B/16x2; for ViViT's models 2 to 4, the arrangement follows the patch
_VIDEO = re.compile(
    r"(?P<kind>vivit|videomae)-(?P<rest>\w+/\d+(?:x\d+)?)x(?P<time>\d+)(?:-(?P<arrangement>\w+-[\w-]+))?", re.IGNORECASE
)


@dataclass(frozen=True)
class VideoConfig(ViTConfig):
    """A ViT for clips (C, T, H, W): `image` is frames, height and width; `patch` is a tubelet in frames and pixels.

    | `arrangement` | tokens to which a token attends |
    |---|---|
    | joint | every token of the clip |
    | factorised-encoder | its time slot; further blocks then attend over one vector per slot |
    | factorised-attention | in each block its slot, then its position in all slots |
    | factorised-dot-product | half of the heads its slot, half its position in all slots |

    If the arrangement is not joint, each slot has separate prefix tokens. They start with the same values, and their
    mean over time is used. Raises UsageError unless there are three axes, and for unsupported options of attention and
    positions.
    """

    family: Literal["video"] = "video"
    module: ClassVar[str] = "vitreous.models.video:Video"
    preset_names: ClassVar[tuple[str, ...]] = (
        *(f"ViViT-{size}/16x2{'' if name == 'joint' else f'-{name}'}" for size in "BL" for name in ARRANGEMENTS),
        *(f"VideoMAE-{size}/16x2" for size in "SBLH"),
    )
    has_time_axis: ClassVar[bool] = True
    image: tuple[int, ...] = (32, 224, 224)
    patch: tuple[int, ...] = (2, 16, 16)
    arrangement: Arrangement = "joint"
    temporal_depth: int = 4  # number of blocks over time of a factorised encoder
    temporal_zero: bool = True  # temporal layers start at 0, so frames are treated as images until they are trained
    pooled_eps: float | None = None  # eps of the norm after pooling, if different from `norm.eps`
    inflate: Literal["central", "average"] = "central"  # how image weights initialise the patch projection

    def check_image_size(self, image: tuple[int, ...]) -> None:
        """Raise UsageError, with the option of each axis, for a clip size (frames, height, width) that is not divisible
        by the patch."""
        if len(image) != len(self.patch):
            super().check_image_size(image)
            return
        try:
            patch_grid(image, self.patch)
        except ValueError as error:
            frames, *spatial_size = nearest_divisible_size(image, self.patch)
            hints = [f"--frames {frames}"] if frames != image[0] else []
            if tuple(spatial_size) != image[1:]:
                hints.append(f"--image-size {format_size(tuple(spatial_size))}")
            raise UsageError(str(error), f"use {' and '.join(hints)}") from None

    @classmethod
    def parse_name(cls, name: str, image: ImageSize) -> ViTConfig | None:
        """Return the config of a video model's name; None for names of other families.

        `ViViT-B/16x2` has patches of 16 x 16 pixels in 2 frames; an arrangement that is not joint follows,
        `ViViT-B/16x2-factorised-encoder`. The other form is `VideoMAE-B/16x2`. Raises UsageError for a patch below one
        frame.
        """
        match = _VIDEO.fullmatch(name)
        arrangement = ((match and match["arrangement"]) or "joint").lower()
        if match is None or arrangement not in ARRANGEMENTS:
            return None
        image_config, time = parse_plain_vit(match["rest"]), int(match["time"])
        if time < 1:
            raise UsageError(f"unknown model {name}: its patch is below 1 frame", "use patches of 1 frame or more")
        videomae = match["kind"].lower() == "videomae"
        position_options: dict[str, Any] = (
            {"positions.kind": "space-time"} if arrangement == "factorised-encoder" else {}
        )
        patch = (time, *image_config.patch)
        options = (VIDEOMAE if videomae else position_options) | {"arrangement": arrangement, "patch": patch}
        clip = image if image and len(image) == 3 else (16 if videomae else 32, *(image or image_config.image))
        return change_config(image_config, options, clip if image else nearest_divisible_size(clip, patch))

    def name(self) -> str:
        """Return the model name: `ViViT-B/16x2`, `ViViT-B/16x2-factorised-encoder`, or with fixed positions
        `VideoMAE-B/16x2`."""
        time, *spatial_patch = self.patch
        size_name = self.size_name().partition("/")[0]
        family = "VideoMAE" if self.positions.kind == "sinusoid" else "ViViT"
        arrangement = "" if self.arrangement == "joint" else f"-{self.arrangement}"
        return f"{family}-{size_name}/{format_size(tuple(spatial_patch))}x{time}{arrangement}"

    def __post_init__(self) -> None:
        if len(self.image) != 3 or len(self.patch) != 3:
            raise UsageError(
                f"image and patch of a video model must have 3 axes, got {len(self.image)} and {len(self.patch)}",
                "set frames, height and width of both",
            )
        super().__post_init__()
        if self.arrangement not in ARRANGEMENTS:
            raise UsageError(f"unknown arrangement {self.arrangement}", f"use one of {', '.join(ARRANGEMENTS)}")
        attention = self.attention
        if self.factorised and (attention.kind != "plain" or attention.window or self.positions.at != "input"):
            raise UsageError(
                f"arrangement={self.arrangement} requires attention.kind=plain, no windows and positions.at=input",
                "use arrangement=joint",
            )
        if self.arrangement == "factorised-dot-product" and self.heads % 2:
            problem = f"heads must be even, to be split into two halves for space and time, got {self.heads}"
            raise UsageError(problem, "change heads")
        if self.arrangement == "factorised-encoder" and (self.temporal_depth < 1 or self.pool == "distilled"):
            raise UsageError(
                f"a factorised encoder requires temporal_depth of at least 1, got {self.temporal_depth}, and does not "
                "support pool=distilled",
                "change temporal_depth or pool",
            )
        head_width = self.width // self.heads
        if attention.kind == "rotary" and (head_width % 2 or head_width < 6):
            problem = f"rotary attention requires an even number of channels per head, at least 6, got {head_width}"
            raise UsageError(problem, "change heads or width")

    @property
    def factorised(self) -> bool:
        """Return whether tokens are grouped in time slots, (B, T, P + h w, D)."""
        return self.arrangement != "joint"

    @property
    def drops_patches(self) -> bool:
        """Return whether patches may be dropped in training."""
        return not self.factorised and super().drops_patches

    @property
    def sees_whole_image(self) -> bool:
        """Return whether every block's attention is over the whole clip."""
        return not self.factorised

    @property
    def needs_positions(self) -> bool:
        """Return whether blocks require token coordinates, which identify the time slots."""
        return self.factorised or super().needs_positions

    def time_slots(self, grid: tuple[int, ...]) -> int:
        """Return the number of time slots with separate prefix tokens."""
        return grid[0] if self.factorised else 1

    def attention_macs(self, grid: tuple[int, ...], index: int) -> int:
        """Count the multiply-adds of the attention of a block, for T slots of S tokens if space and time are
        factorised.

        - Factorised encoder: T S (4 D^2 + 2 S D), without its blocks over time.
        - Factorised attention: T S (8 D^2 + 2 (S + T) D).
        - Factorised dot products: T S (4 D^2 + (S + T) D), or as a factorised encoder if T is 1.
        """
        if not self.factorised:
            return super().attention_macs(grid, index)
        slots, width = grid[0], self.width
        tokens = math.prod(grid[1:]) + self.prefix
        space, time = slots * block_macs(tokens, width, 0), tokens * block_macs(slots, width, 0)
        if self.arrangement == "factorised-attention":
            return space + time
        return (space + time) // 2 if self.arrangement == "factorised-dot-product" and slots > 1 else space

    def extra_macs(self, grid: tuple[int, ...]) -> int:
        """Count the multiply-adds of the blocks over time of a factorised encoder."""
        if self.arrangement != "factorised-encoder":
            return 0
        tokens = math.prod(grid) + self.prefix * grid[0]
        mlp = self.mlp_macs(grid) * grid[0] // tokens
        return self.temporal_depth * (block_macs(grid[0], self.width, 0) + mlp)

    def skipped_attention_macs(self, grid: tuple[int, ...], slots: int, tokens: int) -> int:
        """Count the multiply-adds per slot that the last block's attention skips if pooling uses only prefix tokens."""
        skipped_tokens = tokens - (self.pooled_prefix or 0)
        if slots > 1 and self.arrangement == "factorised-dot-product":  # queries and keys of all tokens are computed
            return skipped_tokens * (self.width**2 + (tokens + slots) * self.width)
        if not self.factorised or self.attention.kind != "plain":
            return super().skipped_attention_macs(grid, slots, tokens)
        skipped_macs = self.skipped_plain_attention_macs(block_macs(tokens, self.width, 0), tokens)
        if self.arrangement == "factorised-attention":
            skipped_macs += skipped_tokens * block_macs(slots, self.width, 0) // slots
        return skipped_macs
