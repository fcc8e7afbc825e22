"""How information crosses windows without attention: a bottleneck of convolutions after a block."""

from __future__ import annotations

from torch import Tensor, nn

from vitreous.nn.pyramid import LayerNorm2d


class ConvPropagation(nn.Module):
    """ViTDet's convolutional propagation (arXiv:2203.16527, section 3): a residual bottleneck on the grid of tokens.

        x + norm3(conv3(gelu(norm2(conv2(gelu(norm1(conv1(x))))))))

    1 x 1 from D to D / 2 channels, 3 x 3, 1 x 1 back to D, without bias, LayerNorms over channels. The scale of the
    last norm starts at zero, so that a fresh one passes tokens on; convolutions are drawn from N(0, 2 / fan_out).
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        half = width // 2
        self.conv1, self.norm1 = nn.Conv2d(width, half, 1, bias=False), LayerNorm2d(half)
        self.conv2, self.norm2 = nn.Conv2d(half, half, 3, padding=1, bias=False), LayerNorm2d(half)
        self.conv3, self.norm3 = nn.Conv2d(half, width, 1, bias=False), LayerNorm2d(width)
        self.gelu = nn.GELU()
        for conv in (self.conv1, self.conv2, self.conv3):
            nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(self.norm3.norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(B, h, w, D) -> (B, h, w, D)."""
        y = x.movedim(-1, 1).to(self.conv1.weight.dtype)
        y = self.gelu(self.norm1(self.conv1(y)))
        y = self.gelu(self.norm2(self.conv2(y)))
        return x + self.norm3(self.conv3(y)).movedim(1, -1)
