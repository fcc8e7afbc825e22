"""What models on a backbone share: answers for pixels or for objects, not for whole images."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from vitreous.models.base import VisionModel

#: parts of a backbone that read what no dense head needs
UNUSED_BACKBONE_MODULES = ("neck", "pooling", "pooled_norm", "representation", "head")


class BackboneWithHead(VisionModel[Any]):
    """A backbone, to which a subclass adds a head; `backbone` where it is there already, else a fresh one. One that is
    there without the adapter of the config gets that.

    Parts of the backbone that nothing of an answer depends on get no gradient: those of UNREAD, and those that are
    named in `unread`.
    """

    def __init__(self, config: Any, backbone: nn.Module | None = None, unread: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.config = config
        self.any_size = True  # of images: a dense head answers for as many pixels as there are
        own = config.backbone
        if backbone is None:
            backbone = own.model_class()(own)
        elif own.backbone == backbone.config:
            backbone = own.model_class()(own, backbone)
        self.backbone: Any = backbone
        self.backbone.any_size = True
        for name, part in self.backbone.named_modules():
            if name in (*UNUSED_BACKBONE_MODULES, *unread):
                part.requires_grad_(False)

    def features(self, images: Tensor) -> Tensor:
        """(B, C, *image) -> (B, P + N, D): the backbone's tokens."""
        return self.backbone.features(images)

    def pool(self, tokens: Tensor) -> Tensor:
        """(B, P + N, D) -> (B, D): what the backbone makes of its tokens for a whole image."""
        return self.backbone.pool(tokens)

    def classify(self, pooled: Tensor) -> Tensor:
        """(B, D): a dense head has no answer for a whole image. Raises NotImplementedError."""
        raise NotImplementedError("a dense head answers for pixels or objects, not for images")

    def blocks(self) -> list[nn.Module]:
        """The residual blocks of the backbone, in order."""
        return self.backbone.blocks()

    def first_layer(self) -> nn.Module:
        """The layer that reads the image."""
        return self.backbone.first_layer()
