"""Models without weights: to be counted, or to be filled."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vitreous.models.config import ModelConfig
from vitreous.models.zoo import Model, build

DRAWS = {Tensor.normal_, Tensor.uniform_}


class NoInitMode(TorchFunctionMode):
    """Random draws that leave tensors as they are. On the meta device they would draw nothing, after two seconds of
    imports."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in DRAWS or getattr(func, "__module__", "") == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def skip_init(config: ModelConfig) -> Model:
    """A model whose parameters have shapes and nothing else; `load_state_dict(…, assign=True)` gives it weights."""
    with torch.device("meta"), NoInitMode():
        return build(config)
