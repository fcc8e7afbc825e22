"""Forward and backward passes as CUDA graphs: recorded once per input shape, then launched by a single call.

A training step of a ViT launches hundreds of kernels. With small models and small batches, kernels finish before the
host has launched the next ones; a graph launches all kernels of a pass by one call of the host.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

WARM_UP_PASSES = 3  # passes without a graph per input shape before recording, which compile and select kernels
MAX_GRAPHS = 8  # graphs per runner; further input shapes run without a graph

ForwardPasses = Callable[[dict[str, Any]], dict[str, Tensor]]


def uses_cuda_graphs(device: torch.device | str) -> bool:
    """Return whether passes on a device run as CUDA graphs: on CUDA, unless `VITREOUS_CUDA_GRAPHS=0` is set."""
    return torch.device(device).type == "cuda" and os.environ.get("VITREOUS_CUDA_GRAPHS", "1") != "0"


class CudaGraphRunner:
    """Run passes as CUDA graphs, a separate graph for each input shape that recurs.

    Graphs operate on copies of the inputs and share one memory pool. As without graphs, gradients accumulate in the
    parameters' `grad` tensors, and random numbers follow `torch.manual_seed`. Several threads may share a runner.
    `device` is the GPU of the passes; it need not be PyTorch's current device.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.stream, self.pool = torch.cuda.Stream(self.device), torch.cuda.graph_pool_handle()
        self.counts: Counter[Hashable] = Counter()
        self.graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, dict[str, Any], dict[str, Tensor]]] = {}
        self.works, self.lock = True, threading.Lock()

    def run(self, passes: ForwardPasses, inputs: dict[str, Any], constant: Hashable = None) -> dict[str, Tensor]:
        """Run `passes` on named inputs (B, ...) and return its named outputs, which the next call does not change.

        `passes` must not synchronise with the host and may use only tensors on the device. `constant` must contain
        every other value on which `passes` depends: a graph is reused only for equal values.
        """
        tensors = {name: entry for name, entry in inputs.items() if isinstance(entry, Tensor) and entry.is_cuda}
        if not self.works or any(isinstance(entry, list) for entry in inputs.values()):
            return passes(inputs)
        key = (constant, *((name, entry.shape, entry.dtype) for name, entry in sorted(tensors.items())))
        with self.lock:
            if key not in self.graphs:
                self.counts[key] += 1
                if self.counts[key] <= WARM_UP_PASSES or len(self.graphs) >= MAX_GRAPHS:
                    return self.compute(passes, inputs)
                if not self.capture(key, passes, inputs, tensors):
                    return passes(inputs)
            graph, static, outputs = self.graphs[key]
            for name, entry in tensors.items():
                static[name].copy_(entry)
            graph.replay()
            return {name: value.clone() for name, value in outputs.items()}

    def compute(self, passes: ForwardPasses, inputs: dict[str, Any]) -> dict[str, Tensor]:
        """Run the passes on inputs (B, ...) without a graph, on the stream that records graphs."""
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            outputs = passes(inputs)
        current.wait_stream(self.stream)
        return outputs

    def capture(self, key: Hashable, passes: ForwardPasses, inputs: dict[str, Any], tensors: dict[str, Tensor]) -> bool:
        """Record the passes for inputs (B, ...) of one shape; return False and disable graphs if an operation cannot be
        recorded."""
        static = {**inputs, **{name: entry.clone() for name, entry in tensors.items()}}
        graph = torch.cuda.CUDAGraph()
        try:  # only "thread_local" allows the loader's thread to call CUDA during recording
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                outputs = passes(static)
        except RuntimeError as error:
            self.works = False
            torch.cuda.synchronize(self.device)
            reason = str(error).strip().splitlines()[0]
            warnings.warn(f"CUDA graphs are disabled, so every kernel is launched separately: {reason}", stacklevel=2)
            return False
        self.graphs[key] = graph, static, outputs
        return True
