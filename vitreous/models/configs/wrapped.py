"""Base classes of configs of models around a backbone: with an adapter, or with a dense or detection head."""

from __future__ import annotations

from vitreous.models.configs.base import ModelConfig
from vitreous.models.configs.groups import AttentionGroup, PositionGroup, RegularizationConfig


class BackboneWrapperConfig(ModelConfig):
    """Base class of configs that have the properties of their `backbone` config."""

    backbone: ModelConfig

    @property
    def image(self) -> tuple[int, ...]:
        """Return the native image size: pixels along each axis."""
        return self.backbone.image

    @property
    def channels(self) -> int:
        """Return the channels of an image."""
        return self.backbone.channels

    @property
    def depth(self) -> int:
        """Return the blocks of the backbone."""
        return self.backbone.depth

    @property
    def positions(self) -> PositionGroup:
        """Return the position options of the backbone."""
        return self.backbone.positions

    @property
    def attention(self) -> AttentionGroup:
        """Return the attention options of the backbone."""
        return self.backbone.attention

    @property
    def has_attention(self) -> bool:
        """Return whether blocks contain attention."""
        return self.backbone.has_attention

    @property
    def sees_whole_image(self) -> bool:
        """Return whether no block attends within windows."""
        return self.backbone.sees_whole_image

    @property
    def regularization(self) -> RegularizationConfig:
        """Return the regularisation options of the backbone."""
        return self.backbone.regularization

    def check_image_size(self, image: tuple[int, ...]) -> None:
        """Raise UsageError for an image that the backbone does not support."""
        self.backbone.check_image_size(image)


class BackboneTokensConfig(BackboneWrapperConfig):
    """Base class of configs of models whose tokens are those of their backbone."""

    @property
    def patch(self) -> tuple[int, ...]:
        """Return the pixels per token of the backbone, per axis."""
        return self.backbone.patch

    @property
    def grid(self) -> tuple[int, ...]:
        """Return the tokens along each axis."""
        return self.backbone.grid

    @property
    def prefix(self) -> int:
        """Return the number of prefix tokens."""
        return self.backbone.prefix


class BackboneWithHeadConfig(BackboneTokensConfig):
    """Base class of configs of models with a head that have the properties of their `backbone` config."""

    classes: int

    @property
    def num_features(self) -> int:
        """Return the number of outputs: one per class."""
        return self.classes
