"""What `models` uses of torchvision's operators, which ship no types."""

from torch import Tensor

def nms(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor: ...
def box_iou(boxes1: Tensor, boxes2: Tensor) -> Tensor: ...
def roi_align(
    input: Tensor,
    boxes: Tensor,
    output_size: int,
    spatial_scale: float = 1.0,
    sampling_ratio: int = -1,
    aligned: bool = False,
) -> Tensor: ...
