"""Config of Diffusion Transformers (arXiv:2212.09748)."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from vitreous.errors import UsageError
from vitreous.models.configs.base import ImageSize, LayerGroups, ModelConfig
from vitreous.models.configs.groups import AttentionConfig, PositionConfig
from vitreous.models.cost import block_macs
from vitreous.nn.sizes import format_size, nearest_divisible_size, patch_grid

#: size name -> width, depth, heads (arXiv:2212.09748, Table 1)
DIT_SHAPES = {"S": (384, 12, 6), "B": (768, 12, 12), "L": (1024, 24, 16), "XL": (1152, 28, 16)}
_DIT = re.compile(
    r"dit-(?P<size>[a-z]+|(?P<width>\d+)x(?P<depth>\d+))/(?P<patch>\d+(?:x\d+){0,2})(?P<alternating>-alternating)?",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class DiTConfig(ModelConfig):
    """A Diffusion Transformer, which predicts an image from a noisy image, a time and a class.

    `image` and `patch` are one length per axis, in pixels or in positions of latents, with `channels` channels.

    - `classes`: classes for conditional generation; 0 for an unconditional model.
    - `learned_variance`: the output has twice the channels of the image; the second half is the variance of a step.
    - `qk_norm`: RMSNorm on queries and keys.
    - `arrangement` of attention over clips (frames, height, width): every token attends to all others (`joint`), or
      blocks alternate between tokens of the same time slot and tokens of the same position (`alternating`).
    - `time_shift`: 1 for the time frequencies of diffusers, 0 for those of the paper's code.

    Raises UsageError if the image is not divisible by the patch, or the width not by the heads.
    """

    module: ClassVar[str] = "vitreous.models.dit:DiT"
    preset_names: ClassVar[tuple[str, ...]] = tuple(f"DiT-{size}/{patch}" for size in DIT_SHAPES for patch in (2, 4, 8))
    recipe_family: ClassVar[str] = "dit"
    layer_groups: ClassVar[LayerGroups] = LayerGroups(entry=("projection", "time", "classes"))
    positions: ClassVar[PositionConfig] = PositionConfig(kind="sincos")
    attention: ClassVar[AttentionConfig] = AttentionConfig()
    pool: ClassVar[str] = "none"
    front: ClassVar[str] = "patches"
    has_attention: ClassVar[bool] = True
    sees_whole_image: ClassVar[bool] = True
    generates_images: ClassVar[bool] = True
    foreign_formats: ClassVar[bool] = True

    family: Literal["dit"] = "dit"
    image: tuple[int, ...] = (32, 32)
    patch: tuple[int, ...] = (2, 2)
    channels: int = 4
    classes: int = 1000
    width: int = 1152
    depth: int = 28
    heads: int = 16
    hidden: int = 4608  # hidden channels of the MLP
    learned_variance: bool = True
    qk_norm: bool = False
    arrangement: Literal["joint", "alternating"] = "joint"
    time_shift: Literal[0, 1] = 0
    eps: float = 1e-6

    def __post_init__(self) -> None:
        if min(self.channels, self.width, self.depth, self.heads, self.hidden) < 1 or self.classes < 0:
            raise UsageError("channels, width, depth, heads and hidden must be at least 1, classes at least 0")
        if self.width % self.heads or self.width % (2 * len(self.image)):
            raise UsageError(
                f"width {self.width} is not divisible by {self.heads} heads and by {2 * len(self.image)}, two channels "
                "per image axis",
                "change heads or width",
            )
        if self.arrangement == "alternating" and (len(self.image) != 3 or self.depth < 2):
            problem = (
                "alternating blocks require a depth of at least 2 and images with 3 axes, "
                f"got depth {self.depth} and {len(self.image)} axes"
            )
            raise UsageError(problem, "use at least 2 blocks, and images with frames, height and width")
        self.check_image_size(self.image)

    @property
    def grid(self) -> tuple[int, ...]:
        """Return the tokens along each axis at the native image size."""
        return patch_grid(self.image, self.patch)

    @property
    def out_channels(self) -> int:
        """Return the channels of the output."""
        return self.channels * (2 if self.learned_variance else 1)

    @property
    def has_time_axis(self) -> bool:
        """Return whether the model generates clips."""
        return len(self.image) == 3

    def check_image_size(self, image: tuple[int, ...]) -> None:
        """Raise UsageError for an image size that is not divisible by the patch, with the nearest valid size in its
        hint."""
        try:
            patch_grid(image, self.patch)
        except ValueError as error:
            raise UsageError(
                str(error), f"use --image-size {format_size(nearest_divisible_size(image, self.patch))}"
            ) from None

    @classmethod
    def parse_name(cls, name: str, image: ImageSize) -> DiTConfig | None:
        """Return the config of a DiT's name; None for names of other families.

        `DiT-XL/2` is for latents of 4 channels. `DiT-128x6/2` has a width of 128 and a depth of 6, with heads of 32
        channels. `DiT-96x6/2x4x4-alternating` is for clips. Raises UsageError for a patch below one pixel.
        """
        match = _DIT.fullmatch(name)
        if match is None:
            return None
        if match["width"]:
            width, depth = int(match["width"]), int(match["depth"])
            heads = max(1, width // 32)
        elif match["size"].upper() in DIT_SHAPES:
            width, depth, heads = DIT_SHAPES[match["size"].upper()]
        else:
            return None
        patch = tuple(map(int, match["patch"].lower().split("x")))
        patch = patch * 2 if len(patch) == 1 else patch
        if min(patch) < 1:
            raise UsageError(f"unknown model {name}: its patch is below 1 pixel", "use patches of 1 pixel or more")
        image_size = image or nearest_divisible_size((32,) * len(patch), patch)
        sizes: dict[str, Any] = {"width": width, "depth": depth, "heads": heads, "hidden": 4 * width}
        return cls(
            image=image_size, patch=patch, arrangement="alternating" if match["alternating"] else "joint", **sizes
        )

    def name(self) -> str:
        """Return the model name: `DiT-XL/2`, or `DiT-128x6/2` if width, depth and heads are not those of a published
        size."""
        shape = (self.width, self.depth, self.heads)
        size = next(
            (key for key, size_shape in DIT_SHAPES.items() if size_shape == shape), f"{self.width}x{self.depth}"
        )
        patch = self.patch[:1] if len(self.patch) == 2 and len(set(self.patch)) == 1 else self.patch
        alternating = "-alternating" if self.arrangement == "alternating" else ""
        return f"DiT-{size}/{'x'.join(map(str, patch))}{alternating}"

    def macs(self, image: ImageSize = None) -> int:
        """Count the multiply-adds of one forward pass, including the computation of the condition."""
        grid = patch_grid(image or self.image, self.patch)
        pixels, tokens = math.prod(self.patch), math.prod(grid)
        blocks = self.depth * block_macs(tokens, self.width, self.hidden)
        if self.arrangement == "alternating":
            slots, slot_tokens = grid[0], tokens // grid[0]
            over_space = (self.depth + 1) // 2 * slots * block_macs(slot_tokens, self.width, self.hidden)
            blocks = over_space + self.depth // 2 * slot_tokens * block_macs(slots, self.width, self.hidden)
        condition = self.depth * 6 * self.width**2 + 256 * self.width + self.width**2 + 2 * self.width**2
        return blocks + condition + tokens * pixels * self.width * (self.channels + self.out_channels)

    def count_activations(self, image: ImageSize = None, device: str = "cuda") -> int | None:
        """Estimate the number of values that the blocks store per image for the backward pass: L T (12 D + 2 M), with
        one M on a CPU, where GELU is recomputed. Returns None for alternating attention.

        In addition to those of a ViT's block, the two modulated inputs and the two gated outputs are stored.
        """
        if self.arrangement == "alternating":
            return None
        tokens = math.prod(patch_grid(image or self.image, self.patch))
        return self.depth * tokens * (12 * self.width + (1 if device == "cpu" else 2) * self.hidden)

    def head_count_field(self) -> dict[str, Any]:
        """Return the number of heads, which tensors do not determine."""
        return {"heads": self.heads}

    def structure(self) -> dict[str, Any]:
        """Return the values on which the names and shapes of the model's tensors depend."""
        return {name: value for name, value in vars(self).items() if name not in ("family", "eps")}
