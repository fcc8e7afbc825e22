"""Video Transformers: ViViT (arXiv:2103.15691) and VideoMAE (arXiv:2203.12602)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from vitreous.errors import UsageError
from vitreous.models.configs.vit import ViTConfig

#: models 1 to 4 of ViViT, section 3.3
Arrangement = Literal["joint", "factorised-encoder", "factorised-attention", "factorised-dot-product"]
ARRANGEMENTS: tuple[str, ...] = get_args(Arrangement)


@dataclass(frozen=True)
class VideoConfig(ViTConfig):
    """A ViT of clips (C, T, H, W): `image` is frames, height and width, `patch` a tubelet of that many frames and
    pixels.

    | `arrangement` | what a token attends to |
    |---|---|
    | joint | every token of the clip |
    | factorised-encoder | those of its time slot; then blocks relate one vector of each slot to the others' |
    | factorised-attention | in each block, those of its slot, then those at its place at all times |
    | factorised-dot-product | half of the heads those of its slot, half those at its place |

    Where the arrangement is not joint, each slot has prefix tokens of its own, which start alike, and whose mean over
    time is what is read. Raises UsageError for other than three axes, and for options of attention and positions that
    the arrangement has no place for.
    """

    family: Literal["video"] = "video"  # pyright: ignore[reportIncompatibleVariableOverride]
    image: tuple[int, ...] = (32, 224, 224)
    patch: tuple[int, ...] = (2, 16, 16)
    # space-time: a table of places and one of slots; sinusoid: VideoMAE's fixed ones, of a token's number
    position: Literal[
        "learned", "axes", "factorised", "sincos", "sincos-big-vision", "none", "space-time", "sinusoid"
    ] = "learned"  # pyright: ignore[reportIncompatibleVariableOverride]
    arrangement: Arrangement = "joint"  # pyright: ignore[reportIncompatibleVariableOverride]
    temporal_depth: int = 4  # blocks over time of a factorised encoder
    temporal_zero: bool = True  # what is over time alone adds nothing at first, so that frames are pictures
    no_key_bias: bool = False  # queries and values have a bias alone (VideoMAE)
    pooled_eps: float | None = None  # of the norm after pooling, where it is not `eps`
    inflate: Literal["central", "average"] = "central"  # how weights of pictures start the projection

    def __post_init__(self) -> None:
        if len(self.image) != 3 or len(self.patch) != 3:
            raise UsageError(
                f"a video model takes clips, and the image has {len(self.image)} axes, the patch {len(self.patch)}",
                "name frames, height and width of both",
            )
        super().__post_init__()
        if self.arrangement not in ARRANGEMENTS:
            raise UsageError(f"no arrangement {self.arrangement}", f"use one of {', '.join(ARRANGEMENTS)}")
        if self.factorised and (self.attention != "plain" or self.window or self.position_at != "input"):
            raise UsageError(
                f"arrangement={self.arrangement} goes with attention=plain, no windows and position_at=input",
                "use arrangement=joint",
            )
        if self.arrangement == "factorised-dot-product" and self.heads % 2:
            raise UsageError(f"{self.heads} heads cannot be halved between space and time", "change heads")
        if self.arrangement == "factorised-encoder" and (self.temporal_depth < 1 or self.pool == "distilled"):
            raise UsageError(
                f"a factorised encoder has at least one block over time, not {self.temporal_depth}, and pool=distilled "
                "is not for it"
            )
        size = self.width // self.heads
        if self.attention == "rotary" and (size % 2 or size < 6):
            raise UsageError(f"heads of {size} channels cannot be turned along three axes", "change heads or width")
        if self.no_key_bias and not self.qkv_bias:
            raise UsageError("no_key_bias goes with qkv_bias=true")

    @property
    def factorised(self) -> bool:
        """Whether tokens lie in time slots, (B, T, P + h w, D)."""
        return self.arrangement != "joint"

    @property
    def drops_patches(self) -> bool:
        """Whether patches may be left out in training."""
        return not self.factorised and super().drops_patches

    @property
    def sees_whole_image(self) -> bool:
        """Whether every block's attention is over the whole clip."""
        return not self.factorised

    @property
    def needs_positions(self) -> bool:
        """Whether blocks need token coordinates: those of slots are told apart by them."""
        return self.factorised or super().needs_positions
