"""BiT, the paper's convolutional baseline (arXiv:1912.11370), and AxialResNet (arXiv:2010.11929, appendix D.6).

B batch, C channels, N places of the last map, D its channels; image and grid are one length per axis.

    images (B, C, H, W) -> features (B, N, D) -> pool (B, D) -> logits
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn

from vitreous.models.base import VisionModel, linear_head
from vitreous.models.configs.bit import BiTConfig
from vitreous.nn.resnet import ResNet


class BiT(VisionModel[BiTConfig]):
    """ResNet-v2 with group norm and weight standardisation, initialised as Google's code does it (big_vision
    bit_paper.py):

    | parameter | drawn from |
    |---|---|
    | convolutions | LeCun normal, cut at two deviations (flax's default); standardised on every pass |
    | norms | scale 1, bias 0 |
    | axial attention: q, k, v; relative positions | N(0, 1 / C); N(0, 1 / d) (csrhddlam/axial-deeplab) |
    | head | 0 |

    The head is a linear layer on the mean; the published 1x1 convolution is the same thing.
    """

    def __init__(self, config: BiTConfig) -> None:
        super().__init__()
        self.config = config
        self.any_size = True  # convolutions take images of any size; a ViT warns of others than its own
        native = config.image if config.axial else None
        self.body = ResNet(config.blocks, config.width * config.factor, config.channels, config.numerics, axial=native)
        self.head = self.build_head()

    def build_head(self) -> nn.Module:
        """(B, D) -> (B, classes): a head whose weights are 0."""
        return linear_head(self.config.width_out, self.config.classes)

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, classes): logits."""
        return self.classify(self.pool(self.features(images)))

    def first_layer(self) -> nn.Module:
        """The layer that reads the image: the root convolution."""
        return self.body.root.conv

    def forward_patches(self, images: Tensor, index: Tensor) -> Tensor:
        """A map of convolutions has no patches to leave out. Raises NotImplementedError."""
        raise NotImplementedError("a ResNet computes its whole map")

    def blocks(self) -> list[nn.Module]:
        """The residual units of all stages, in order."""
        return [unit for stage in self.body.stages.children() for unit in stage.get_submodule("units").children()]

    def features(self, images: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, N, D): the last map after norm and ReLU, row by row."""
        return self.body(self.checked(images)).flatten(2).transpose(1, 2)

    def features_at(self, images: Tensor, strides: Sequence[int]) -> list[Tensor]:
        """(B, C, H, W) -> for each stride, in pixels, (B, h, w, D): the map of the stage in which a place covers so
        many rows, before any norm; `config.levels` has them all. Raises ValueError for a stride of no stage."""
        self.config.check_strides(strides)
        maps = dict(zip(self.config.strides, self.body.maps(self.checked(images)), strict=True))
        return [maps[stride].movedim(1, -1) for stride in strides]

    def last_norm(self, x: Tensor) -> Tensor:
        """(B, h, w, D) -> (B, h, w, D): the norm after the last stage, and ReLU."""
        return self.body.norm(x.movedim(-1, 1)).relu().movedim(1, -1)

    def checked(self, images: Tensor) -> Tensor:
        """(B, C, H, W) in the type of the weights. Raises as `check_images`."""
        self.check_images(images)
        return images.to(self.body.norm.weight.dtype)

    def pool(self, tokens: Tensor) -> Tensor:
        """(B, N, D) -> (B, D): the mean."""
        return tokens.mean(1)

    def classify(self, pooled: Tensor) -> Tensor:
        """(B, D) -> (B, classes)."""
        return self.head(pooled)


def bit_macs(config: BiTConfig, image: tuple[int, int] | None = None) -> int:
    """Multiply-adds of one forward pass for one image: every convolution, axial attention and the head.

    Norms, ReLU, softmax and pooling are left out. FLOPs are twice this; a training step costs three forward passes.
    """
    width = config.width * config.factor
    return (
        resnet_macs(config.blocks, width, config.channels, image or config.image, config.axial)
        + config.width_out * config.classes
    )


def stem_macs(blocks: tuple[int, ...], image: tuple[int, int], width: int = 64, channels: int = 3) -> int:
    """Multiply-adds of a hybrid's `Stem` for one image."""
    return resnet_macs(blocks, width, channels, image)


def resnet_macs(blocks: tuple[int, ...], width: int, channels: int, image: tuple[int, int], axial: bool = False) -> int:
    """Multiply-adds of root and stages; pre- and post-activation units cost the same.

    A unit of width w on an h x w' map costs a 1x1 from its inputs, the 3x3 and a 1x1 to 4 w, and in the first of a
    stage a 1x1 shortcut; the last three at the size after its stride.
    """

    def places(scale: int) -> int:
        return math.ceil(image[0] / scale) * math.ceil(image[1] / scale)

    total, inputs = 49 * channels * width * places(2), width
    for number, depth in enumerate(blocks):
        inner, after = width * 2**number, 4 * 2**number
        for index in range(depth):
            before = after // 2 if number and not index else after
            middle = axial_macs(inner, image, before) if axial else 9 * inner**2 * places(after)
            shortcut = 4 * inputs * inner * places(after) if not index else 0
            total += inputs * inner * places(before) + middle + 4 * inner**2 * places(after) + shortcut
            inputs = 4 * inner
    return total


def axial_macs(width: int, image: tuple[int, int], scale: int) -> int:
    """Multiply-adds of row and column attention on the map of which a place spans `scale` pixels.

    For a line of L: 2 L C^2 for queries, keys and values; 3 L^2 C / 2 for three logits of half width; 2 L^2 C for
    values and their positions.
    """
    height, length = (math.ceil(size / scale) for size in image)
    lines = ((height, length), (length, height))  # how many, how long
    return sum(count * (2 * size * width**2 + 7 * size**2 * width // 2) for count, size in lines)
