"""Base classes of configs of models around a backbone: an adapter, and dense and detection heads."""

from __future__ import annotations

from vitreous.models.configs.base import ModelConfig
from vitreous.models.configs.groups import AttentionGroup, PositionGroup, RegularizationConfig


class BackboneWrapperConfig(ModelConfig):
    """Properties that a model takes over from its `backbone` config."""

    backbone: ModelConfig

    @property
    def image(self) -> tuple[int, ...]:
        """Native image size: pixels along each axis."""
        return self.backbone.image

    @property
    def channels(self) -> int:
        """Channels of an image."""
        return self.backbone.channels

    @property
    def depth(self) -> int:
        """Blocks of the backbone."""
        return self.backbone.depth

    @property
    def positions(self) -> PositionGroup:
        """The backbone's."""
        return self.backbone.positions

    @property
    def attention(self) -> AttentionGroup:
        """The backbone's."""
        return self.backbone.attention

    @property
    def has_attention(self) -> bool:
        """Whether blocks contain attention."""
        return self.backbone.has_attention

    @property
    def sees_whole_image(self) -> bool:
        """Whether no block is restricted to windows."""
        return self.backbone.sees_whole_image

    @property
    def regularization(self) -> RegularizationConfig:
        """The backbone's."""
        return self.backbone.regularization

    def check_image_size(self, image: tuple[int, ...]) -> None:
        """Raise UsageError for an image that the backbone does not support."""
        self.backbone.check_image_size(image)


class BackboneWithHeadConfig(BackboneWrapperConfig):
    """Properties that a model with a head takes over from its `backbone` config."""

    classes: int

    @property
    def patch(self) -> tuple[int, ...]:
        """Pixels per token of the backbone, per axis."""
        return self.backbone.patch

    @property
    def grid(self) -> tuple[int, ...]:
        """Tokens along each axis."""
        return self.backbone.grid

    @property
    def prefix(self) -> int:
        """Number of prefix tokens."""
        return self.backbone.prefix

    @property
    def num_features(self) -> int:
        """Number of outputs: one per class."""
        return self.classes
