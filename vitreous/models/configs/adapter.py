"""Config of the ViT-Adapter (arXiv:2205.08534): a plain ViT with maps of strides 4, 8, 16 and 32 pixels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from vitreous.errors import UsageError
from vitreous.models.configs.base import Level, ModelConfig
from vitreous.models.configs.vit import ViTConfig
from vitreous.models.configs.wrapped import BackboneWrapperConfig

#: width of the ViT -> heads of deformable attention, and channels of its values divided by the width (the paper's
#: Table 10)
PUBLISHED_ADAPTERS = {192: (6, 1.0), 384: (6, 1.0), 768: (12, 0.5), 1024: (16, 0.5)}
ADAPTER_STRIDES = (4, 8, 16, 32)  # strides of the output maps, in pixels

AdapterNorm = Literal["group", "batch"]
TokenSource = Literal["last", "interaction"]
AdapterChoice = Literal["none", "group", "batch"]  # an objective's option: no adapter, or the norm of the adapter


@dataclass(frozen=True)
class AdapterConfig(BackboneWrapperConfig):
    """A ViT without a head, with an adapter.

    The adapter has convolutions of `prior` channels or more, and a number of `interactions`, each around a group of the
    ViT's blocks. Interactions use deformable attention with `heads`, `points` sampling positions per level and head,
    and values of `ratio` times the width.

    `token_source` selects the ViT tokens that are added to the maps:

    - `last` adds the tokens after the last block to every map (the authors' detection backbone).
    - `interaction` adds to each map the tokens after a different interaction, the first interaction's to the finest map
      (the authors' segmentation backbone).

    `norm` is the norm of the convolutions and of the maps:

    - `batch` is the paper's batch norm, over the batches of all processes (on a CPU: of one process). Training outputs
      then depend on the batch, which must be large.
    - `group` is group norm with the same number of parameters and without this dependence.

    Raises UsageError for a backbone with classes or for volumes, and for invalid values.
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
        """Return the model name, such as `ViT-S/16 with an adapter`."""
        return f"{self.backbone.name()} with an adapter"

    def __post_init__(self) -> None:
        if not isinstance(self.backbone, ViTConfig):
            raise UsageError(f"an adapter requires a ViT, not {self.backbone.name()}", "use adapter=none")
        if self.backbone.classes:
            raise UsageError("the backbone of an adapter must not have a classification head", "set its classes=0")
        if len(self.backbone.image) != 2:
            raise UsageError("an adapter does not support volumes", "use adapter=none")
        if min(self.heads, self.points, self.interactions, self.prior) < 1 or self.ratio <= 0:
            options = f"{self.heads}, {self.points}, {self.interactions}, {self.prior} and {self.ratio}"
            raise UsageError(f"heads, points, interactions, prior and ratio must be above 0, got {options}")
        if self.interactions > self.backbone.depth:
            problem = f"{self.interactions} interactions require at least as many blocks, got {self.backbone.depth}"
            raise UsageError(problem, f"use interactions={self.backbone.depth}")
        inner = int(self.backbone.width * self.ratio)
        if inner < self.heads or inner % self.heads:
            raise UsageError(
                f"the {inner} channels of the values are not divisible by {self.heads} heads", "change heads or ratio"
            )

    @property
    def blocks_per_interaction(self) -> tuple[int, ...]:
        """Return the number of the ViT's blocks in each interaction, distributed as evenly as possible."""
        quotient, remainder = divmod(self.backbone.depth, self.interactions)
        return tuple(quotient + (index < remainder) for index in range(self.interactions))

    @property
    def token_interactions(self) -> tuple[int, ...]:
        """Return, for each map, the index of the interaction whose tokens are added to it, the finest map first.

        With four interactions and `token_source="interaction"`, these are 0, 1, 2, 3. Other numbers of interactions are
        distributed evenly over the maps.
        """
        count, last_index = len(ADAPTER_STRIDES), self.interactions - 1
        if self.token_source == "last":
            return (last_index,) * count
        return tuple(-(-(index + 1) * self.interactions // count) - 1 for index in range(count))

    @property
    def levels(self) -> tuple[Level, ...]:
        """Return the maps that `features_at` returns."""
        return tuple(Level((stride, stride), self.backbone.width) for stride in ADAPTER_STRIDES)

    def list_unused_modules(self, strides: Sequence[int]) -> tuple[str, ...]:
        """Return the names of modules that maps of these strides do not use: norms of other maps, and the layers of the
        finest map."""
        norms = (f"norms.{index}" for index, stride in enumerate(ADAPTER_STRIDES) if stride not in strides)
        return (*norms, *(() if ADAPTER_STRIDES[0] in strides else ("prior.reduce.0", "up")))

    @property
    def patch(self) -> tuple[int, ...]:
        """Return the pixels per position of the coarsest map, per axis."""
        return self.levels[-1].patch

    def patch_at(self, block: int) -> tuple[int, ...]:
        """Return the pixels per token of the ViT along each axis, equal in all blocks."""
        return self.backbone.patch

    @property
    def width(self) -> int:
        """Return the channels of the ViT's tokens, and of the maps."""
        return self.backbone.width


def add_adapter(backbone: Any, adapter: AdapterChoice = "group", token_source: TokenSource = "last") -> Any:
    """Return the config of the backbone with an adapter of this norm, or the backbone's config unchanged for "none".

    Heads and ratio are the published values for the width of the ViT; for other widths, the heads are those of the ViT.
    `token_source` is that of `AdapterConfig`. Raises the errors of `AdapterConfig`, and UsageError for a backbone with
    stages.
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
