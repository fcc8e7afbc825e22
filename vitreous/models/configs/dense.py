"""What the configs of models on a backbone share: heads that answer for pixels or for objects."""

from __future__ import annotations

from vitreous.models.configs.wrapped import WithBackbone


class OnBackbone(WithBackbone):
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
