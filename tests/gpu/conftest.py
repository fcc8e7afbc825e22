"""Settings of every test on a GPU: float32 products in full precision, and slow tests spread over the workers."""

from __future__ import annotations

import pytest
import torch

#: parts of names of tests that take longest on a GPU: each is put at the front of another worker's first share
SLOW_TEST_WORDS = ("compile", "ddp", "export", "torchao", "micro_batch", "adapters")
NUM_WORKERS = 8


@pytest.fixture(autouse=True)
def without_tf32():
    """PyTorch lets cuDNN's convolutions round to TF32 by default, which is 1e-3 and would hide every other error."""
    allowed = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = allowed


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """xdist gives each worker a run of neighbours first: put the slow tests into different runs."""
    ours = [item for item in items if "tests/gpu/" in item.path.as_posix()]
    ranks = {item: next((i for i, word in enumerate(SLOW_TEST_WORDS) if word in item.name), None) for item in ours}
    slow = sorted((item for item in ours if ranks[item] is not None), key=lambda item: ranks[item])
    if len(ours) < 8 * NUM_WORKERS or len(slow) == len(ours):
        return
    quick = [item for item in ours if item not in set(slow)]
    share = max(2, len(ours) // (4 * NUM_WORKERS))
    for number, item in enumerate(slow):
        place = number % NUM_WORKERS * share + number // NUM_WORKERS
        quick.insert(min(place, len(quick)), item)
    items[:] = [item for item in items if item not in set(ours)] + quick
