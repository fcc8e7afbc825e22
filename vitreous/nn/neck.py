"""What comes after the last block of a dense encoder."""

from __future__ import annotations

from torch import Tensor, nn


class Neck(nn.Module):
    """1 x 1 convolution, LayerNorm, 3 x 3 convolution, LayerNorm, over channels (ViTDet, arXiv:2203.16527; SAM's image
    encoder)."""

    def __init__(self, width: int, out: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.reduce, self.norm1 = nn.Linear(width, out, bias=False), nn.LayerNorm(out, eps=eps)
        self.mix, self.norm2 = nn.Conv2d(out, out, 3, padding=1, bias=False), nn.LayerNorm(out, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        """(B, h, w, D) -> (B, h, w, out)."""
        x = self.norm1(self.reduce(x)).to(self.mix.weight.dtype)
        return self.norm2(self.mix(x.movedim(-1, 1)).movedim(1, -1))
