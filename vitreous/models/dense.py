"""Base class of models that add a head for pixels or objects to a backbone."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from vitreous.models.base import VisionModel

#: submodules of a backbone that dense heads do not use
UNUSED_BACKBONE_MODULES = ("neck", "pooling", "pooled_norm", "representation", "head")


class BackboneWithHead(VisionModel[Any]):
    """Base class of a backbone with a head for dense prediction, which the subclass adds.

    `backbone` is an existing backbone; if the config contains an adapter and the backbone has none, the adapter is
    added. By default a new backbone is built. Submodules of which no output depends get no gradient: those in
    `UNUSED_BACKBONE_MODULES`, and those named in `unread`.
    """

    def __init__(self, config: Any, backbone: nn.Module | None = None, unread: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.config = config
        self.any_size = True  # a dense head supports any image size
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
        """Compute the backbone's tokens: (B, C, *image) -> (B, P + N, D)."""
        return self.backbone.features(images)

    def pool(self, tokens: Tensor) -> Tensor:
        """Pool the backbone's tokens: (B, P + N, D) -> (B, D)."""
        return self.backbone.pool(tokens)

    def classify(self, pooled: Tensor) -> Tensor:
        """Raise NotImplementedError for pooled features (B, D), because a dense head does not classify images."""
        raise NotImplementedError("a dense head predicts pixels or objects, not image classes")

    def blocks(self) -> list[nn.Module]:
        """Return the residual blocks of the backbone, in order."""
        return self.backbone.blocks()

    def first_layer(self) -> nn.Module:
        """Return the backbone's first layer, whose input is the image."""
        return self.backbone.first_layer()
