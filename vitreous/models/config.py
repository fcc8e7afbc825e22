"""What a model is, as frozen values: everything that must be stored to build it again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vitreous.errors import UsageError
from vitreous.nn.grid import by, grid_of


@dataclass(frozen=True)
class ViTConfig:
    """A Vision Transformer (arXiv:2010.11929, section 3.1 and Table 1).

    `image` and `patch` hold one length per axis, in pixels; any number of axes. Raises UsageError where a patch does
    not divide the image, heads do not divide the width, or the pooling asks for a token that is not there.
    """

    image: tuple[int, ...] = (224, 224)
    patch: tuple[int, ...] = (16, 16)
    channels: int = 3
    classes: int = 1000  # 0: no head, the pooled representation is the output
    width: int = 768
    depth: int = 12
    heads: int = 12
    hidden: int = 3072  # of the MLP
    class_token: bool = True
    class_position: bool = True  # slot 0 of E_pos in Eq. 1; a sum with the token, so weights are loaded with it folded in
    registers: int = 0  # further prefix tokens (arXiv:2309.16588)
    pool: Literal["class", "mean", "attention"] = "class"
    norm: Literal["tokens", "pooled"] = "tokens"  # the last LayerNorm: on every token, or once, after pooling
    representation: int | None = None  # width of the tanh layer before the head, for pre-training
    layer_scale: float | None = None
    dropout: float = 0.0
    drop_path: float = 0.0
    qkv_bias: bool = True
    gelu: Literal["none", "tanh"] = "none"  # torch's names: none is the exact form (erf)
    eps: float = 1e-6
    resize: Literal["bicubic", "bilinear"] = "bicubic"  # how positions are read at another grid: nn.grid.RESIZE

    def __post_init__(self) -> None:
        if min(self.channels, self.width, self.depth, self.heads, self.hidden) < 1 or min(self.classes, self.registers) < 0:
            raise UsageError("channels, width, depth, heads and hidden must be at least 1, classes and registers at least 0")
        if self.width % self.heads:
            raise UsageError(f"width {self.width} is not a multiple of {self.heads} heads", "change heads or width")
        if self.pool == "class" and not self.class_token:
            raise UsageError("pool=class needs a class token", "use pool=mean or pool=attention, or class_token=True")
        check_image(self, self.image)

    @property
    def grid(self) -> tuple[int, ...]:
        """Tokens per axis at the native image size."""
        return grid_of(self.image, self.patch)

    @property
    def prefix(self) -> int:
        """Tokens in front of the patches: the class token, then registers."""
        return int(self.class_token) + self.registers


def check_image(config: ViTConfig, image: tuple[int, ...]) -> None:
    """Refuse an image size (pixels per axis) that the patch does not divide, naming sizes that would do."""
    try:
        grid_of(image, config.patch)
    except ValueError as error:
        ways = [f"--image-size {by(nearby(image, config.patch))}"]
        dividing = [p for p in range(2, min(image) + 1) if all(i % p == 0 for i in image)]
        patch = min(dividing, key=lambda p: abs(p - max(config.patch)), default=1)
        ways.append(f"--patch-size {patch}")
        raise UsageError(str(error), "use " + ", or ".join(ways)) from None


def nearby(image: tuple[int, ...], patch: tuple[int, ...]) -> tuple[int, ...]:
    """The nearest size that `patch` divides, axis by axis."""
    sizes = image if len(image) == len(patch) else (image[0],) * len(patch)
    return tuple(max(1, round(i / p)) * p for i, p in zip(sizes, patch, strict=True))
