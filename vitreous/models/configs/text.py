"""Config of a text encoder: the Transformer of CLIP (arXiv:2103.00020) and of SigLIP (arXiv:2303.15343).

Does not import PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vitreous.errors import UsageError
from vitreous.models.configs.groups import ConfigGroup, MlpConfig


@dataclass(frozen=True, kw_only=True)
class TextConfig(ConfigGroup):
    """A Transformer that encodes token ids to one vector per text; the defaults are those of CLIP-B.

    - `vocabulary`: number of token ids. `length`: positions, the largest number of tokens of a text.
    - `causal`: a token attends only to itself and earlier tokens (CLIP). Otherwise it attends to all tokens, padding
      included (SigLIP).
    - `pool`: the encoded token that represents the text. `end` is the first token with the largest id, which is the end
      of text in CLIP's vocabulary. `last` is the last position, which may be padding, so texts must be padded to
      `length` (SigLIP). `mean` is the mean over all tokens except padding.
    - `embedding`: channels of the output. `projection`: whether a linear layer follows pooling; without it, `embedding`
      must be equal to `width`.
    - `pad_id` and `end_id`: ids of padding and of the end of a text, for tokenizers and for `pool=mean`.
    - `cleaning`: how texts are cleaned before tokenisation, see `data.tokenizer.clean_text`.

    Raises UsageError for sizes below 1, a width that is not divisible by the heads, and ids out of range.
    """

    vocabulary: int = 49_408
    length: int = 77
    width: int = 512
    depth: int = 12
    heads: int = 8
    hidden: int = 2048  # channels of the hidden layer of the MLP
    gelu: Literal["none", "tanh", "quick"] = "quick"
    eps: float = 1e-5
    causal: bool = True
    pool: Literal["end", "last", "mean"] = "end"
    embedding: int = 512
    projection: bool = True
    projection_bias: bool = False
    pad_id: int = 0
    end_id: int = 49_407
    cleaning: Literal["none", "lower", "canonicalise"] = "lower"

    def __post_init__(self) -> None:
        sizes = self.vocabulary, self.length, self.width, self.depth, self.heads, self.hidden, self.embedding
        if min(sizes) < 1:
            raise UsageError("all sizes of a text encoder must be at least 1", "check the fields of `text`")
        if self.width % self.heads:
            raise UsageError(
                f"text.width {self.width} is not divisible by {self.heads} heads", "change text.heads or text.width"
            )
        if not self.projection and self.embedding != self.width:
            raise UsageError(
                f"text.embedding is {self.embedding}, but without a projection it is the width, {self.width}",
                "use text.projection=True",
            )
        if not all(0 <= token < self.vocabulary for token in (self.pad_id, self.end_id)):
            raise UsageError(
                f"text.pad_id {self.pad_id} and text.end_id {self.end_id} must be ids of a vocabulary of "
                f"{self.vocabulary:,}",
                f"use ids from 0 to {self.vocabulary - 1}",
            )

    @property
    def mlp(self) -> MlpConfig:
        """Return the options of the MLPs, as in a `ViTConfig`."""
        return MlpConfig(self.hidden, gelu=self.gelu)

    def count_macs(self) -> int:
        """Count the multiply-adds of one text of `length` tokens."""
        block = 4 * self.width**2 + 2 * self.length * self.width + 2 * self.width * self.hidden
        return self.length * self.depth * block + self.projection * self.width * self.embedding
