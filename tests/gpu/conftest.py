"""Settings of all GPU tests: float32 products in full precision, and slow tests spread over the workers."""

from __future__ import annotations

import pytest
import torch

#: parts of the names of the slowest tests on a GPU: each is put at the front of another worker's first chunk
SLOW_TEST_WORDS = ("compile", "ddp", "export", "torchao", "micro_batch", "adapters")
NUM_WORKERS = 8


@pytest.fixture(autouse=True)
def without_tf32():
    """By default PyTorch lets cuDNN's convolutions round to TF32; its error of 1e-3 would hide all others."""
    allowed = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = allowed


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """xdist first gives each worker consecutive tests: move the slow tests into different chunks."""
    ours = [item for item in items if "tests/gpu/" in item.path.as_posix()]
    ranks = {item: next((i for i, word in enumerate(SLOW_TEST_WORDS) if word in item.name), None) for item in ours}
    slow = sorted((item for item in ours if ranks[item] is not None), key=lambda item: ranks[item])
    if len(ours) < 8 * NUM_WORKERS or len(slow) == len(ours):
        return
    quick = [item for item in ours if item not in set(slow)]
    share = max(2, len(ours) // (4 * NUM_WORKERS))
    for index, item in enumerate(slow):
        position = index % NUM_WORKERS * share + index // NUM_WORKERS
        quick.insert(min(position, len(quick)), item)
    items[:] = [item for item in items if item not in set(ours)] + quick
