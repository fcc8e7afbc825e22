"""BiT, the convolutional baseline of the ViT paper (arXiv:1912.11370), and AxialResNet (arXiv:2010.11929, appendix
D.6).

    images (B, C, H, W) -> features (B, N, D) -> pool (B, D) -> logits (B, K)

Shapes: B batch, C channels, N positions of the last map, D its channels, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from vitreous.models.base import VisionModel, linear_head
from vitreous.models.configs.bit import BiTConfig
from vitreous.nn.resnet import ResNet


class BiT(VisionModel[BiTConfig]):
    """ResNet-v2 with group norm and weight standardisation, initialised as in Google's code (big_vision bit_paper.py):

    | parameter | drawn from |
    |---|---|
    | convolutions | LeCun normal, truncated at two std (flax's default); standardised in every pass |
    | norms | scale 1, bias 0 |
    | axial attention: q, k, v; relative positions | N(0, 1 / C); N(0, 1 / d) (csrhddlam/axial-deeplab) |
    | head | 0 |

    The head is a linear layer on the mean over positions, equivalent to the published 1x1 convolution.
    """

    def __init__(self, config: BiTConfig) -> None:
        super().__init__()
        self.config = config
        self.any_size = True  # convolutions take any image size; a ViT warns about sizes other than its native one
        axial_size = config.image if config.axial else None
        self.body = ResNet(
            config.blocks, config.width * config.factor, config.channels, config.numerics, axial=axial_size
        )
        self.head = self.build_head()

    def build_head(self) -> nn.Module:
        """Build a linear head (B, D) -> (B, K) whose weights are 0."""
        return linear_head(self.config.width_out, self.config.classes)

    def first_layer(self) -> nn.Module:
        """Return the root convolution, whose input is the image."""
        return self.body.root.conv

    def blocks(self) -> list[nn.Module]:
        """Return the residual units of all stages, in order."""
        return [unit for stage in self.body.stages.children() for unit in stage.get_submodule("units").children()]

    def features(self, images: Tensor) -> Tensor:
        """Compute the last map after norm and ReLU, in raster order: (B, C, H, W) -> (B, N, D)."""
        return self.body(self.prepare_images(images)).flatten(2).transpose(1, 2)

    def features_at(self, images: Tensor, strides: Sequence[int]) -> list[Tensor]:
        """Compute the maps of the stages with these strides, in pixels, before any norm: (B, C, H, W) -> (B, h, w, D)
        per stride.

        `config.levels` lists the strides. Raises ValueError if no stage has a stride.
        """
        self.config.check_strides(strides)
        maps = dict(zip(self.config.strides, self.body.maps(self.prepare_images(images)), strict=True))
        return [maps[stride].movedim(1, -1) for stride in strides]

    def last_norm(self, x: Tensor) -> Tensor:
        """Apply the norm after the last stage, and ReLU: (B, h, w, D) -> (B, h, w, D)."""
        return self.body.norm(x.movedim(-1, 1)).relu().movedim(1, -1)

    def prepare_images(self, images: Tensor) -> Tensor:
        """Check images (B, C, H, W) and return them in the dtype of the weights. Raises the errors of
        `check_images`."""
        self.check_images(images)
        return images.to(self.body.norm.weight.dtype)
