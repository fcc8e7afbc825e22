"""Construction of modules without initialising their weights, to count parameters, describe a model or load its
weights."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

RANDOM_INIT_METHODS = {Tensor.normal_, Tensor.uniform_}


class NoInitMode(TorchFunctionMode):
    """Context in which functions of `torch.nn.init` leave tensors unchanged, and random values are zeros.

    Zeros are in the range of truncated distributions, whose sampling loop ends only with values in range.
    The meta device also avoids initialisation, but importing it takes two seconds.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in RANDOM_INIT_METHODS:
            return args[0].zero_()
        if getattr(func, "__module__", "") == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)
