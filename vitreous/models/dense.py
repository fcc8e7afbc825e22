"""Base class of models on a backbone with outputs for pixels or objects instead of whole images."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from vitreous.models.base import VisionModel

#: submodules of a backbone that dense heads do not use
UNUSED_BACKBONE_MODULES = ("neck", "pooling", "pooled_norm", "representation", "head")


class BackboneWithHead(VisionModel[Any]):
    """A backbone, to which a subclass adds a head.

    `backbone` is an existing backbone, to which the config's adapter is added if it lacks one; the default is a fresh
    backbone. Submodules that no output depends on get no gradient: those of UNREAD, and those named in `unread`.
    """

    def __init__(self, config: Any, backbone: nn.Module | None = None, unread: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.config = config
        self.any_size = True  # a dense head supports any number of pixels
        backbone_config = config.backbone
        if backbone is None:
            backbone = backbone_config.model_class()(backbone_config)
        elif backbone_config.backbone == backbone.config:
            backbone = backbone_config.model_class()(backbone_config, backbone)
        self.backbone: Any = backbone
        self.backbone.any_size = True
        for name, module in self.backbone.named_modules():
            if name in (*UNUSED_BACKBONE_MODULES, *unread):
                module.requires_grad_(False)

    def features(self, images: Tensor) -> Tensor:
        """(B, C, *image) -> (B, P + N, D): the backbone's tokens."""
        return self.backbone.features(images)

    def pool(self, tokens: Tensor) -> Tensor:
        """(B, P + N, D) -> (B, D): the backbone's pooled tokens."""
        return self.backbone.pool(tokens)

    def classify(self, pooled: Tensor) -> Tensor:
        """(B, D): raise NotImplementedError, because a dense head has no output per image."""
        raise NotImplementedError("a dense head predicts pixels or objects, not image classes")

    def blocks(self) -> list[nn.Module]:
        """The residual blocks of the backbone, in order."""
        return self.backbone.blocks()

    def first_layer(self) -> nn.Module:
        """The layer that is applied to the image."""
        return self.backbone.first_layer()
