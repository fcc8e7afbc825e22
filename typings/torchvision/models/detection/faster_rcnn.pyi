"""What `models` uses of torchvision's box heads."""

from collections.abc import Callable

from torch import Tensor, nn

class FastRCNNConvFCHead(nn.Sequential):
    def __init__(
        self,
        input_size: tuple[int, int, int],
        conv_layers: list[int],
        fc_layers: list[int],
        norm_layer: Callable[..., nn.Module] | None = None,
    ) -> None: ...

class FastRCNNPredictor(nn.Module):
    cls_score: nn.Linear
    bbox_pred: nn.Linear
    def __init__(self, in_channels: int, num_classes: int) -> None: ...
    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]: ...
