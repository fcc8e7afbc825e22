"""Config of the ViT-Adapter (arXiv:2205.08534): a plain ViT with maps of four strides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from vitreous.errors import UsageError
from vitreous.models.configs.base import Level, ModelConfig
from vitreous.models.configs.vit import ViTConfig
from vitreous.models.configs.wrapped import BackboneWrapperConfig

#: heads of deformable attention, and channels of its values for one of the width, by the width of the ViT (the paper's
#: Table 10)
PUBLISHED_ADAPTERS = {192: (6, 1.0), 384: (6, 1.0), 768: (12, 0.5), 1024: (16, 0.5)}
ADAPTER_STRIDES = (4, 8, 16, 32)

AdapterNorm = Literal["group", "batch"]
TokenSource = Literal["last", "interaction"]
AdapterChoice = Literal["none", "group", "batch"]  # of an objective: the norm of the adapter that a ViT gets, or none


@dataclass(frozen=True)
class AdapterConfig(BackboneWrapperConfig):
    """A ViT without a head, and an adapter.

    The adapter has convolutions of `prior` channels and more, and `interactions` with groups of the ViT's blocks. These
    use deformable attention of `heads`, each with `points` positions per level and values of `ratio` times the width.

    `token_source` selects the ViT tokens that are added to the maps. `last` adds those after the last block to every
    map (the authors' detection backbone). `interaction` adds to each map the tokens after a separate interaction, the
    first interaction's to the finest map (the authors' segmentation backbone).

    `norm` is the norm of the convolutions and of the maps. `batch` is the paper's, over the batches of all processes
    (on a CPU: of one process). It makes training outputs depend on the batch and needs large batches. `group` has as
    many parameters and no such dependence. Raises UsageError for a backbone with classes or for volumes, and for
    invalid values.
    """

    family: Literal["adapter"] = "adapter"
    backbone: ModelConfig = field(default_factory=lambda: ViTConfig(classes=0))
    heads: int = 12
    ratio: float = 0.5
    points: int = 4
    interactions: int = 4
    prior: int = 64
    norm: AdapterNorm = "group"
    token_source: TokenSource = "last"

    module: ClassVar[str] = "vitreous.models.adapter:ViTAdapter"
    has_stages: ClassVar[bool] = True
    classes: ClassVar[int] = 0

    def name(self) -> str:
        """`ViT-S/16 with an adapter`."""
        return f"{self.backbone.name()} with an adapter"

    def __post_init__(self) -> None:
        if not isinstance(self.backbone, ViTConfig):
            raise UsageError(f"an adapter requires a ViT, not {self.backbone.name()}", "leave it out")
        if self.backbone.classes:
            raise UsageError("a backbone has no classification head", "use classes=0")
        if len(self.backbone.image) != 2:
            raise UsageError("an adapter does not support volumes", "leave it out")
        if min(self.heads, self.points, self.interactions, self.prior) < 1 or self.ratio <= 0:
            raise UsageError("heads, points, interactions, prior and ratio must be above 0")
        if self.interactions > self.backbone.depth:
            problem = (
                f"{self.interactions} interactions need at least as many blocks, but there are {self.backbone.depth}"
            )
            raise UsageError(problem, f"use interactions={self.backbone.depth}")
        inner = int(self.backbone.width * self.ratio)
        if inner < self.heads or inner % self.heads:
            raise UsageError(
                f"{inner} channels of values are not a multiple of {self.heads} heads", "change heads or ratio"
            )

    @property
    def groups(self) -> tuple[int, ...]:
        """Number of the ViT's blocks in each interaction, distributed as evenly as possible."""
        quotient, remainder = divmod(self.backbone.depth, self.interactions)
        return tuple(quotient + (index < remainder) for index in range(self.interactions))

    @property
    def token_interactions(self) -> tuple[int, ...]:
        """Return for each map, the finest first, the index of the interaction whose tokens are added to it.

        With four interactions and `token_source="interaction"`: 0, 1, 2, 3. Other numbers of interactions are spread
        evenly over the maps.
        """
        count, last_index = len(ADAPTER_STRIDES), self.interactions - 1
        if self.token_source == "last":
            return (last_index,) * count
        return tuple(-(-(index + 1) * self.interactions // count) - 1 for index in range(count))

    @property
    def levels(self) -> tuple[Level, ...]:
        """The maps that `features_at` returns."""
        return tuple(Level((stride, stride), self.backbone.width) for stride in ADAPTER_STRIDES)

    def list_unused_modules(self, strides: Sequence[int]) -> tuple[str, ...]:
        """Names of modules that maps of these strides do not use: norms of other maps, and the layers of the finest
        map."""
        norms = (f"norms.{index}" for index, stride in enumerate(ADAPTER_STRIDES) if stride not in strides)
        return (*norms, *(() if ADAPTER_STRIDES[0] in strides else ("prior.reduce.0", "up")))

    @property
    def patch(self) -> tuple[int, ...]:
        """Pixels per position of the coarsest map, per axis."""
        return self.levels[-1].patch

    def patch_at(self, block: int) -> tuple[int, ...]:
        """Pixels per token of the ViT, per axis; the same in all blocks."""
        return self.backbone.patch

    @property
    def width(self) -> int:
        """Channels of the ViT's tokens, and of the maps."""
        return self.backbone.width


def add_adapter(backbone: Any, adapter: AdapterChoice = "group", token_source: TokenSource = "last") -> Any:
    """Return the backbone with an adapter of this norm, or unchanged with "none".

    The adapter is the published one for the width of the ViT, else one with the heads of the ViT. `token_source` is
    that of `AdapterConfig`. Raises UsageError as `AdapterConfig`, and for a backbone with stages.
    """
    if adapter == "none":
        return backbone
    if backbone.has_stages:
        raise UsageError("an adapter requires a plain ViT, but this backbone has stages", "use adapter=none")
    heads, ratio = PUBLISHED_ADAPTERS.get(backbone.width, (backbone.heads, 0.5 if backbone.width > 384 else 1.0))
    interactions = min(4, backbone.depth)
    return AdapterConfig(
        backbone=backbone, heads=heads, ratio=ratio, interactions=interactions, norm=adapter, token_source=token_source
    )
