"""Diffusion Transformers (arXiv:2212.09748)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from vitreous.errors import UsageError
from vitreous.nn.sizes import format_size, grid_of, nearby

#: width, depth, heads (arXiv:2212.09748, Table 1)
DITS = {"S": (384, 12, 6), "B": (768, 12, 12), "L": (1024, 24, 16), "XL": (1152, 28, 16)}
_DIT = re.compile(
    r"dit-(?P<size>[a-z]+|(?P<width>\d+)x(?P<depth>\d+))/(?P<patch>\d+(?:x\d+){0,2})(?P<alternating>-alternating)?",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class DiTConfig:
    """A Transformer that reads a noisy image, a time and a class, and answers with an image.

    `image` and `patch` hold one length per axis: pixels, or places of latents, of `channels` channels. `classes`: those
    that can be asked for; 0 for a model of one kind of image. `learned_variance`: the answer has twice the channels of
    the image, of which the second half tells the variance of a step. `qk_norm`: queries and keys are divided by their
    root mean square. `arrangement`, of clips (frames, height, width): every token sees every other (`joint`), or in
    turn those of its time slot and those at its place (`alternating`). `time_shift`: 1 for the frequencies of times
    that diffusers has, 0 for those of the paper's code.

    Raises UsageError where a patch does not divide the image, or heads the width.
    """

    kind: ClassVar[Literal["dit"]] = "dit"
    # answers to what other families have fields for
    prefix: ClassVar[int] = 0
    dropout: ClassVar[float] = 0.0
    drop_path: ClassVar[float] = 0.0
    position: ClassVar[str] = "sincos"
    attention: ClassVar[str] = "plain"
    pool: ClassVar[str] = "none"
    front: ClassVar[Literal["patches"]] = "patches"
    drops_patches: ClassVar[bool] = False
    merges_tokens: ClassVar[bool] = False
    packs_sizes: ClassVar[bool] = False
    has_attention: ClassVar[bool] = True
    sees_whole_image: ClassVar[bool] = True

    family: Literal["dit"] = "dit"
    image: tuple[int, ...] = (32, 32)
    patch: tuple[int, ...] = (2, 2)
    channels: int = 4
    classes: int = 1000
    width: int = 1152
    depth: int = 28
    heads: int = 16
    hidden: int = 4608  # of the MLP
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
                f"width {self.width} is not a multiple of {self.heads} heads, or of two numbers for each axis",
                "change heads or width",
            )
        if self.arrangement == "alternating" and (len(self.image) != 3 or self.depth < 2):
            problem = f"blocks alternate between space and time, and there are {self.depth} of {len(self.image)} axes"
            raise UsageError(problem, "use two blocks at least, and images of frames, height and width")
        self.check_image(self.image)

    @property
    def grid(self) -> tuple[int, ...]:
        """Tokens per axis at the native image size."""
        return grid_of(self.image, self.patch)

    @property
    def out_channels(self) -> int:
        """Channels of an answer."""
        return self.channels * (2 if self.learned_variance else 1)

    @property
    def cell(self) -> tuple[int, ...]:
        """What a token is cut from, along each axis."""
        return self.patch

    @property
    def width_out(self) -> int:
        """Channels of a token after the blocks."""
        return self.width

    @property
    def features(self) -> int:
        """Channels of a token after the blocks."""
        return self.width

    def check_image(self, image: tuple[int, ...]) -> None:
        """Raise UsageError for an image size that the patch does not divide, naming one that would do."""
        try:
            grid_of(image, self.patch)
        except ValueError as error:
            raise UsageError(str(error), f"use --image-size {format_size(nearby(image, self.patch))}") from None


def parse_dit(name: str, image: tuple[int, ...] | None) -> DiTConfig | None:
    """`DiT-XL/2`, for latents of 4 channels, or `DiT-128x6/2` for a width of 128 and a depth of 6 with heads of 32
    channels; `DiT-96x6/2x4x4-alternating` for clips.

    Raises UsageError for a patch of less than a pixel.
    """
    match = _DIT.fullmatch(name)
    if match is None:
        return None
    if match["width"]:
        width, depth = int(match["width"]), int(match["depth"])
        heads = max(1, width // 32)
    elif match["size"].upper() in DITS:
        width, depth, heads = DITS[match["size"].upper()]
    else:
        return None
    patch = tuple(map(int, match["patch"].lower().split("x")))
    patch = patch * 2 if len(patch) == 1 else patch
    if min(patch) < 1:
        raise UsageError(f"unknown model {name}", "a patch is at least one pixel")
    side = image or nearby((32,) * len(patch), patch)
    sizes: dict[str, Any] = {"width": width, "depth": depth, "heads": heads, "hidden": 4 * width}
    return DiTConfig(image=side, patch=patch, arrangement="alternating" if match["alternating"] else "joint", **sizes)


def dit_name(config: DiTConfig) -> str:
    """`DiT-XL/2`, or `DiT-128x6/2` where no size fits."""
    own = (config.width, config.depth, config.heads)
    size = next((key for key, row in DITS.items() if row == own), f"{config.width}x{config.depth}")
    patch = config.patch[:1] if len(config.patch) == 2 and len(set(config.patch)) == 1 else config.patch
    alternating = "-alternating" if config.arrangement == "alternating" else ""
    return f"DiT-{size}/{'x'.join(map(str, patch))}{alternating}"
