"""What `models` uses of torchvision's mask heads."""

from collections.abc import Callable, Sequence

from torch import nn

class MaskRCNNHeads(nn.Sequential):
    def __init__(
        self, in_channels: int, layers: Sequence[int], dilation: int, norm_layer: Callable[..., nn.Module] | None = None
    ) -> None: ...

class MaskRCNNPredictor(nn.Sequential):
    def __init__(self, in_channels: int, dim_reduced: int, num_classes: int) -> None: ...
