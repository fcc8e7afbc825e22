"""What the configs of models around a backbone share: an adapter, and heads that answer for pixels or for objects."""

from __future__ import annotations

from vitreous.models.configs.base import ModelConfig
from vitreous.models.configs.groups import AttentionGroup, PositionGroup, RegularizationConfig


class BackboneWrapperConfig(ModelConfig):
    """What can be asked of a model as of its backbone, whose config is `backbone`."""

    backbone: ModelConfig

    @property
    def image(self) -> tuple[int, ...]:
        """Pixels along each axis of the images that it learned from."""
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
        """Whether blocks attend from token to token."""
        return self.backbone.has_attention

    @property
    def sees_whole_image(self) -> bool:
        """Whether no block is confined to windows."""
        return self.backbone.sees_whole_image

    @property
    def regularization(self) -> RegularizationConfig:
        """The backbone's."""
        return self.backbone.regularization

    def check_image(self, image: tuple[int, ...]) -> None:
        """Raise UsageError for an image that the backbone cannot take."""
        self.backbone.check_image(image)


class BackboneWithHeadConfig(BackboneWrapperConfig):
    """What can be asked of a model that is a backbone with a head: as of the backbone, whose config is `backbone`."""

    classes: int

    @property
    def patch(self) -> tuple[int, ...]:
        """Pixels to a token of the backbone, per axis."""
        return self.backbone.patch

    @property
    def grid(self) -> tuple[int, ...]:
        """Tokens along each axis."""
        return self.backbone.grid

    @property
    def prefix(self) -> int:
        """Tokens in front of the grid."""
        return self.backbone.prefix

    @property
    def features(self) -> int:
        """Numbers of an answer: one a class."""
        return self.classes
