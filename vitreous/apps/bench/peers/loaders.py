"""Loaders of other libraries, from files, archives and memory to training batches: random resized crop, flip,
normalise.

With `best`, a loader has expert settings: one worker per core, uint8 pixels until they are normalised, and the fastest
decoder that the library supports.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import io
import tarfile
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler

from vitreous.apps.bench.work import CIFAR_IMAGES, BenchmarkStep, Workload
from vitreous.data.layouts.folder import list_images
from vitreous.system.cores import default_worker_count

NUM_FOLDER_CLASSES, ENDLESS_SAMPLES = 10, 10**9
IMAGENET_MEAN, IMAGENET_STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


class LinkedClassFolders:
    """A temporary class-folder dataset of symbolic links to the photographs in a folder, removed with this object."""

    def __init__(self, images: str) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.files = list_images(Path(images))
        for index, file in enumerate(self.files):
            class_folder = Path(self.folder.name) / "train" / str(index % NUM_FOLDER_CLASSES)
            class_folder.mkdir(parents=True, exist_ok=True)
            (class_folder / f"{index}{file.suffix}").symlink_to(file.resolve())

    @property
    def train(self) -> str:
        """Return the folder that contains the class folders."""
        return str(Path(self.folder.name) / "train")


class RepeatedDataset(Dataset):
    """A dataset repeated `times` times, so that an epoch of a few photographs does not end within the race."""

    def __init__(self, dataset: Any, times: int = 10_000) -> None:
        self.dataset, self.num_repeats = dataset, times

    def __len__(self) -> int:
        return self.num_repeats * len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index % len(self.dataset)]

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "transform":  # timm assigns the transform to the dataset
            self.dataset.transform = value
        else:
            super().__setattr__(name, value)


def make_loader_step(batches: Iterable[Any], keep: Any = None) -> BenchmarkStep:
    """Return a step that takes the next batch and returns its number of images. The images are the batch's first
    element. `keep` is an object that must live as long as the step."""
    stream = iter(batches)

    def run_step(keep_alive: Any = keep) -> float:
        """Take the next batch; return its number of images."""
        return len(next(stream)[0])

    return run_step


def make_worker_options(best: bool) -> dict[str, Any]:
    """Return DataLoader options: none by default, with `best` one worker per core. Workers are forked; by default, the
    processes of a race would spawn them."""
    return (
        {"num_workers": default_worker_count(), "prefetch_factor": 4, "multiprocessing_context": "fork"} if best else {}
    )


def decode_with_torchvision(content: bytes) -> Tensor:
    """Decode JPEG bytes to (3, H, W) uint8 with torchvision."""
    from torchvision.io import ImageReadMode, decode_image

    return decode_image(torch.frombuffer(bytearray(content), dtype=torch.uint8), ImageReadMode.RGB)


def read_with_torchvision(path: str) -> Tensor:
    """Decode a JPEG file to (3, H, W) uint8 with torchvision."""
    with open(path, "rb") as file:
        return decode_with_torchvision(file.read())


def build_train_transform(workload: Workload, best: bool) -> Callable[[Any], Tensor]:
    """Return torchvision's training transform to (3, size, size) float32. Its input is a Pillow image or, with `best`,
    a (3, H, W) uint8 tensor."""
    from torchvision.transforms import v2

    cubic = v2.InterpolationMode.BICUBIC
    crop = v2.RandomResizedCrop(workload.image_size, interpolation=cubic, antialias=True)
    steps: list[Any] = [crop, v2.RandomHorizontalFlip()] + [v2.ToImage()] * (not best)
    return v2.Compose([*steps, v2.ToDtype(torch.float32, scale=True), v2.Normalize(IMAGENET_MEAN, IMAGENET_STD)])


def build_torchvision_loader(workload: Workload, best: bool = False) -> BenchmarkStep:
    """Build a loading step with torchvision's ImageFolder and a DataLoader, with default or `best` settings."""
    from torchvision.datasets import ImageFolder

    folder = LinkedClassFolders(workload.images or ".")
    folder_options: dict[str, Any] = {"loader": read_with_torchvision} if best else {}
    dataset = ImageFolder(folder.train, build_train_transform(workload, best), **folder_options)
    sampler = RandomSampler(dataset, replacement=True, num_samples=ENDLESS_SAMPLES)
    return make_loader_step(
        DataLoader(dataset, workload.batch_size, sampler=sampler, **make_worker_options(best)), folder
    )


def build_timm_loader(workload: Workload, best: bool = False) -> BenchmarkStep:
    """Build a loading step with timm's create_dataset and create_loader: one worker by default, with `best` one per
    core."""
    from timm.data.dataset_factory import create_dataset
    from timm.data.loader import create_loader

    folder = LinkedClassFolders(workload.images or ".")
    dataset: Any = RepeatedDataset(create_dataset("", root=folder.train))
    worker_options: dict[str, Any] = {"num_workers": default_worker_count()} if best else {}
    size = (3, workload.image_size, workload.image_size)
    options: dict[str, Any] = {"is_training": True, "color_jitter": 0.0, "interpolation": "bicubic"}
    return make_loader_step(
        create_loader(dataset, size, workload.batch_size, device=torch.device("cpu"), **options, **worker_options),
        folder,
    )


def build_webdataset_loader(workload: Workload, best: bool = False) -> BenchmarkStep:
    """Build a loading step with WebDataset from two tar files of the photographs, with shuffled shards and samples."""
    from webdataset.compat import WebDataset, WebLoader

    scratch = tempfile.TemporaryDirectory()
    shards = [str(Path(scratch.name) / f"{shard_index}.tar") for shard_index in range(2)]
    files = list_images(Path(workload.images or "."))
    for shard_index, shard in enumerate(shards):
        with tarfile.open(shard, "w") as tar:
            for index, file in enumerate(files):
                if index % 2 == shard_index or len(files) < 2:
                    tar.add(file.resolve(), f"{index:06d}.jpg")
                    label = tarfile.TarInfo(f"{index:06d}.cls")
                    label.size = 1
                    tar.addfile(label, io.BytesIO(str(index % NUM_FOLDER_CLASSES).encode()))
    stream = WebDataset(shards, resampled=True, shardshuffle=False).shuffle(1000)
    stream = stream if best else stream.decode("pil")
    transform = build_train_transform(workload, best)
    stream = stream.to_tuple("jpg", "cls").map_tuple(
        (lambda raw: transform(decode_with_torchvision(raw))) if best else transform, lambda label: int(label)
    )
    loader = WebLoader(stream.batched(workload.batch_size), batch_size=None, **make_worker_options(best))
    return make_loader_step(loader, scratch)


def build_datasets_loader(workload: Workload, best: bool = False) -> BenchmarkStep:
    """Build a loading step with Hugging Face datasets, from an imagefolder dataset with `with_transform`."""
    from datasets import Image, disable_progress_bars, load_dataset

    disable_progress_bars()
    folder, cache = LinkedClassFolders(workload.images or "."), tempfile.TemporaryDirectory()
    dataset: Any = load_dataset("imagefolder", data_dir=folder.folder.name, split="train", cache_dir=cache.name)
    transform = build_train_transform(workload, best)
    if best:
        dataset = dataset.cast_column("image", Image(decode=False))

    def transform_examples(examples: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """Transform a batch of Hugging Face examples, decoding files with torchvision if `best` is set."""
        images = [
            transform(read_with_torchvision(image["path"]) if best else image.convert("RGB"))
            for image in examples["image"]
        ]
        return {"image": images, "label": examples["label"]}

    dataset = dataset.with_transform(transform_examples)
    sampler = RandomSampler(dataset, replacement=True, num_samples=ENDLESS_SAMPLES)
    loader = DataLoader(dataset, workload.batch_size, sampler=sampler, **make_worker_options(best))
    return make_loader_step(((batch["image"],) for batch in loader), (folder, cache))


def build_cifar_loader(workload: Workload, best: bool = False) -> BenchmarkStep:
    """Build a loading step with torchvision's CIFAR10 on random images: pad, crop, flip, normalise."""
    from torchvision.datasets import CIFAR10
    from torchvision.transforms import v2

    dataset = CIFAR10.__new__(CIFAR10)
    dataset.data = np.random.default_rng(0).integers(
        0, 256, (CIFAR_IMAGES, workload.image_size, workload.image_size, 3), dtype=np.uint8
    )
    dataset.targets, dataset.target_transform = [0] * CIFAR_IMAGES, None
    steps: list[Any] = [v2.RandomCrop(workload.image_size, padding=workload.image_size // 8), v2.RandomHorizontalFlip()]
    steps = [v2.ToImage(), *steps] if best else [*steps, v2.ToImage()]
    dataset.transform = v2.Compose(
        [*steps, v2.ToDtype(torch.float32, scale=True), v2.Normalize(IMAGENET_MEAN, IMAGENET_STD)]
    )
    sampler = RandomSampler(dataset, replacement=True, num_samples=ENDLESS_SAMPLES)
    return make_loader_step(DataLoader(dataset, workload.batch_size, sampler=sampler, **make_worker_options(best)))
