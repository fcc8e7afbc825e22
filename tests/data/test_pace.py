"""The number of decoding workers suits the machine, and prefetched batches stay within its memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.conftest import make_folder, make_image
from vitreous.data import loader, pace
from vitreous.data.augmentation.augment import Augment
from vitreous.data.decoding.decode import decode_to_pillow
from vitreous.data.keys import derive_keys
from vitreous.data.loader import MAX_PREFETCH_BATCHES, TrainLoader, choose_prefetch_factor
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.data.pace import MAX_WORKER_BYTES, balance_workers, choose_worker_count, measure_decode_seconds
from vitreous.data.sources import open_data
from vitreous.data.split import ArraySplit, FileSplit
from vitreous.system.cores import count_usable_cores


def compute_throughput(workers: int, seconds: float, rate: float, cores: int) -> float:
    """Return images/s of `workers` decoders and a model on shared cores; busy decoders slow down the model."""
    best = 0.0
    for share in np.linspace(0.001, 1, 1000):  # fraction of time in which the decoders are busy
        left = cores - workers * share
        best = max(best, min(workers * share / seconds, rate * left / cores)) if left > 0 else best
    return best


@pytest.mark.parametrize("cores", [2, 4, 16])
@pytest.mark.parametrize("seconds", [0.0005, 0.002, 0.02])
@pytest.mark.parametrize("rate", [3.0, 100.0, 3000.0])
def test_balanced_workers_maximise_throughput_on_shared_cores(cores, seconds, rate):
    chosen = balance_workers(seconds, rate, cores, True, 0)
    best = max(compute_throughput(workers, seconds, rate, cores) for workers in range(1, cores + 1))
    assert compute_throughput(chosen, seconds, rate, cores) > 0.99 * best
    assert chosen == 1 or compute_throughput(chosen - 1, seconds, rate, cores) < best


def test_a_gpu_gets_enough_workers_to_keep_up():
    assert [balance_workers(0.002, rate, 16, False, 0) for rate in (10.0, 1000.0, 4000.0, 1e6, None)] == [
        1,
        3,
        10,
        16,
        16,
    ]


def test_memory_bounds_the_workers():
    assert [balance_workers(0.002, 1e6, 16, False, room) for room in (0, 100, 7 * MAX_WORKER_BYTES, 10**15)] == [
        16,
        1,
        3,
        16,
    ]
    assert balance_workers(0.0, 100.0, 4, True, 0) == 1


def test_decode_seconds_are_measured(tmp_path, monkeypatch):
    data = open_data(make_folder(tmp_path, {"train": 6, "val": 2}, size=(64, 48)))
    split, preprocess = data.splits["train"], ImagePreprocess((16, 16))
    clock = iter(range(10_000))
    monkeypatch.setattr(pace.time, "perf_counter", lambda: 0.01 * next(clock))
    assert measure_decode_seconds(TrainLoader(split, preprocess, Augment(crop=(0.5, 1.0)), 0)) == pytest.approx(0.01)
    split.paths[0].write_bytes(b"no image")
    assert choose_worker_count(split, preprocess, Augment(), throughput=1e9) == count_usable_cores()


def test_unreadable_samples_have_no_decode_cost():
    arrays = ArraySplit(np.zeros((3, 4, 4, 7), np.uint8), np.zeros(3, np.int64))
    assert measure_decode_seconds(TrainLoader(arrays, ImagePreprocess((16, 16)), Augment(), 0)) == 0.0


@pytest.mark.parametrize(
    "free, expected", [(2**40, MAX_PREFETCH_BATCHES), (64 * 2**20, 2), (2**20, 1), (0, MAX_PREFETCH_BATCHES)]
)
def test_prefetched_batches_use_a_quarter_of_free_memory(free, expected, monkeypatch):
    monkeypatch.setattr(loader, "get_free_memory", lambda device: free)
    monkeypatch.setattr(loader.os.path, "isdir", lambda path: False)
    assert choose_prefetch_factor(4 * 2**20, 2) == expected


def test_shared_memory_limits_the_prefetch_factor(monkeypatch):
    class DiskStatus:
        f_bavail, f_frsize = 2**10, 2**12  # 4 MiB

    monkeypatch.setattr(loader, "get_free_memory", lambda device: 2**40)
    monkeypatch.setattr(loader.os.path, "isdir", lambda path: True)
    monkeypatch.setattr(loader.os, "statvfs", lambda path: DiskStatus, raising=False)
    assert [choose_prefetch_factor(size, 1) for size in (2**10, 2**19, 2**20, 2**30)] == [MAX_PREFETCH_BATCHES, 2, 1, 1]


def test_exact_loaders_decode_at_full_resolution(tmp_path):
    """Exact loaders decode the full image; other loaders lose some detail by reduced decoding."""
    home = tmp_path / "train" / "ant"
    home.mkdir(parents=True)
    make_image(0, (256, 256)).save(home / "0.jpg", quality=95)
    split = FileSplit([home / "0.jpg"], np.zeros(1, np.int64))
    crop = Augment(crop=(0.9, 1.0), ratio=(1.0, 1.0))
    exact, rough = (TrainLoader(split, ImagePreprocess((32, 32)), crop, 0, exact=exact) for exact in (True, False))
    full_crop = crop.augment_image(
        decode_to_pillow(home / "0.jpg"), exact.preprocess, int(derive_keys(exact.seed, 0, 0, 0))
    ).float()
    assert torch.equal(exact.load_sample(0, 0, 0).float(), full_crop)
    assert 0 < (rough.load_sample(0, 0, 0).float() - full_crop).abs().mean() < 8
