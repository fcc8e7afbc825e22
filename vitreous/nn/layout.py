"""Where a block looks: wrappers around parts that attend over axis -2, for tokens that lie in a grid.

B batch, D width; tokens are (B, *grid, D).
"""

from __future__ import annotations

from torch import Tensor, nn

from vitreous.nn.grid import cut, join


class Axial(nn.Module):
    """A block along the rows, then one along the columns (Axial-ViT, arXiv:2010.11929, D.6): each with attention and
    MLP.

    Every row, then every column, is a sequence of its own, so attention costs N (h + w) instead of N^2. The loops it
    replaces:

        for i in range(h): x[:, i] = row(x[:, i])
        for j in range(w): x[:, :, j] = column(x[:, :, j])
    """

    def __init__(self, row: nn.Module, column: nn.Module) -> None:
        super().__init__()
        self.row, self.column = row, column

    def forward(self, x: Tensor) -> Tensor:
        """(B, h, w, D) -> (B, h, w, D)."""
        return self.column(self.row(x).transpose(1, 2)).transpose(1, 2)


class Windows(nn.Module):
    """A part that sees one window of the grid at a time (ViTDet, arXiv:2203.16527, section 3).

    `size` holds the window's length along each axis. A grid that it does not divide is filled up with zeros, which take
    part as keys: so did the published weights see them.
    """

    def __init__(self, part: nn.Module, size: tuple[int, ...]) -> None:
        super().__init__()
        self.part, self.size = part, size

    def forward(self, x: Tensor) -> Tensor:
        """(B, *grid, D) -> (B, *grid, D)."""
        return join(self.part(cut(x, self.size)), tuple(x.shape[1:-1]))
