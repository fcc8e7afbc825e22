"""What `models` uses of the losses of torchvision's region heads."""

from torch import Tensor

def fastrcnn_loss(
    class_logits: Tensor, box_regression: Tensor, labels: list[Tensor], regression_targets: list[Tensor]
) -> tuple[Tensor, Tensor]: ...
def maskrcnn_loss(
    mask_logits: Tensor,
    proposals: list[Tensor],
    gt_masks: list[Tensor],
    gt_labels: list[Tensor],
    mask_matched_idxs: list[Tensor],
) -> Tensor: ...
