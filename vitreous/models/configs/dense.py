"""What the configs of models on a backbone share: heads that answer for pixels or for objects."""

from __future__ import annotations

from typing import Literal

from vitreous.models.configs.adapter import AdapterConfig
from vitreous.models.configs.axial import AxialConfig
from vitreous.models.configs.bit import BiTConfig
from vitreous.models.configs.clip import CLIPConfig
from vitreous.models.configs.hybrid import HybridConfig
from vitreous.models.configs.sam import SAMConfig
from vitreous.models.configs.swin import SwinConfig
from vitreous.models.configs.vit import ViTConfig

Backbone = ViTConfig | HybridConfig | AxialConfig | SAMConfig | CLIPConfig | SwinConfig | BiTConfig | AdapterConfig


class OnBackbone:
    """What can be asked of a model that is a backbone with a head: as of the backbone, whose config is `backbone`."""

    backbone: Backbone
    classes: int

    @property
    def image(self) -> tuple[int, ...]:
        """Pixels along each axis of the images that it learned from."""
        return self.backbone.image

    @property
    def channels(self) -> int:
        """Channels of an image."""
        return self.backbone.channels

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
    def depth(self) -> int:
        """Blocks of the backbone."""
        return self.backbone.depth

    @property
    def front(self) -> Literal["conv"]:
        """Images are read by convolutions too, which compute in float32 where weights are frozen."""
        return "conv"

    @property
    def features(self) -> int:
        """Numbers of an answer: one a class."""
        return self.classes

    @property
    def position(self) -> str:
        """The backbone's."""
        return self.backbone.position

    @property
    def attention(self) -> str:
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
    def drops_patches(self) -> bool:
        """No: the whole image is to be answered."""
        return False

    merges_tokens = drops_patches

    def check_image(self, image: tuple[int, ...]) -> None:
        """Raise UsageError for an image that the backbone cannot take."""
        self.backbone.check_image(image)
