"""Other libraries from files, archives and memory to training batches: random resized crop, flip, normalise.

`best` is what somebody who knows the library would write: as many workers as cores, 8-bit pixels until they are
normalised, the fastest decoder that it takes.
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

from vitreous.apps.bench.work import CIFAR, Turn, Work
from vitreous.data.layouts.folder import list_images
from vitreous.system.cores import default_workers

CLASSES, ENDLESS = 10, 10**9
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


class Folder:
    """The photographs of a race as links in folders of classes, which go when this object does."""

    def __init__(self, images: str) -> None:
        self.home = tempfile.TemporaryDirectory()
        self.files = list_images(Path(images))
        for number, file in enumerate(self.files):
            home = Path(self.home.name) / "train" / str(number % CLASSES)
            home.mkdir(parents=True, exist_ok=True)
            (home / f"{number}{file.suffix}").symlink_to(file.resolve())

    @property
    def train(self) -> str:
        """The folder with the classes."""
        return str(Path(self.home.name) / "train")


class Repeated(Dataset):
    """A data set repeated, so that a few photographs make an epoch that outlasts the race."""

    def __init__(self, whole: Any, times: int = 10_000) -> None:
        self.whole, self.times = whole, times

    def __len__(self) -> int:
        return self.times * len(self.whole)

    def __getitem__(self, index: int) -> Any:
        return self.whole[index % len(self.whole)]

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "transform":  # timm gives a data set its transform
            self.whole.transform = value
        else:
            super().__setattr__(name, value)


def turns(batches: Iterable[Any], keep: Any = None) -> Turn:
    """Return turns of a batch each, images first; `keep` lives as long."""
    stream = iter(batches)

    def turn(batches: Any = keep) -> float:
        return len(next(stream)[0])

    return turn


def workers(best: bool) -> dict[str, Any]:
    """Return options of a DataLoader: none, or a forked worker for each core (a race's processes would spawn them)."""
    return {"num_workers": default_workers(), "prefetch_factor": 4, "multiprocessing_context": "fork"} if best else {}


def decoded(content: bytes) -> Tensor:
    """JPEG bytes -> (3, H, W) uint8, by torchvision's decoder."""
    from torchvision.io import ImageReadMode, decode_image

    return decode_image(torch.frombuffer(bytearray(content), dtype=torch.uint8), ImageReadMode.RGB)


def read(path: str) -> Tensor:
    """A file -> (3, H, W) uint8."""
    with open(path, "rb") as file:
        return decoded(file.read())


def transform(work: Work, best: bool) -> Callable[[Any], Tensor]:
    """Return torchvision's transform to (3, size, size) float32: on Pillow's pictures, or v2 on uint8."""
    from torchvision.transforms import v2

    cubic = v2.InterpolationMode.BICUBIC
    crop = v2.RandomResizedCrop(work.image_size, interpolation=cubic, antialias=True)
    steps: list[Any] = [crop, v2.RandomHorizontalFlip()] + [v2.ToImage()] * (not best)
    return v2.Compose([*steps, v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])


def torchvision(work: Work, best: bool = False) -> Turn:
    """ImageFolder and DataLoader."""
    from torchvision.datasets import ImageFolder

    folder = Folder(work.images or ".")
    own: dict[str, Any] = {"loader": read} if best else {}
    pictures = ImageFolder(folder.train, transform(work, best), **own)
    endless = RandomSampler(pictures, replacement=True, num_samples=ENDLESS)
    return turns(DataLoader(pictures, work.batch_size, sampler=endless, **workers(best)), folder)


def timm(work: Work, best: bool = False) -> Turn:
    """create_dataset and create_loader; by default they have one worker."""
    from timm.data.dataset_factory import create_dataset
    from timm.data.loader import create_loader

    folder = Folder(work.images or ".")
    pictures: Any = Repeated(create_dataset("", root=folder.train))
    own: dict[str, Any] = {"num_workers": default_workers()} if best else {}
    size = (3, work.image_size, work.image_size)
    options: dict[str, Any] = {"is_training": True, "color_jitter": 0.0, "interpolation": "bicubic"}
    return turns(create_loader(pictures, size, work.batch_size, device=torch.device("cpu"), **options, **own), folder)


def webdataset(work: Work, best: bool = False) -> Turn:
    """Two tars of the same files, shards and samples shuffled."""
    from webdataset.compat import WebDataset, WebLoader

    home = tempfile.TemporaryDirectory()
    shards = [str(Path(home.name) / f"{number}.tar") for number in range(2)]
    files = list_images(Path(work.images or "."))
    for number, shard in enumerate(shards):
        with tarfile.open(shard, "w") as tar:
            for index, file in enumerate(files):
                if index % 2 == number or len(files) < 2:
                    tar.add(file.resolve(), f"{index:06d}.jpg")
                    label = tarfile.TarInfo(f"{index:06d}.cls")
                    label.size = 1
                    tar.addfile(label, io.BytesIO(str(index % CLASSES).encode()))
    stream = WebDataset(shards, resampled=True, shardshuffle=False).shuffle(1000)
    stream = stream if best else stream.decode("pil")
    change = transform(work, best)
    stream = stream.to_tuple("jpg", "cls").map_tuple(
        (lambda raw: change(decoded(raw))) if best else change, lambda label: int(label)
    )
    loader = WebLoader(stream.batched(work.batch_size), batch_size=None, **workers(best))
    return turns(loader, home)


def datasets(work: Work, best: bool = False) -> Turn:
    """Hugging Face datasets: imagefolder and with_transform."""
    from datasets import Image, disable_progress_bars, load_dataset

    disable_progress_bars()
    folder, cache = Folder(work.images or "."), tempfile.TemporaryDirectory()
    pictures: Any = load_dataset("imagefolder", data_dir=folder.home.name, split="train", cache_dir=cache.name)
    change = transform(work, best)
    if best:
        pictures = pictures.cast_column("image", Image(decode=False))

    def changed(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        images = [change(read(image["path"]) if best else image.convert("RGB")) for image in rows["image"]]
        return {"image": images, "label": rows["label"]}

    pictures = pictures.with_transform(changed)
    endless = RandomSampler(pictures, replacement=True, num_samples=ENDLESS)
    loader = DataLoader(pictures, work.batch_size, sampler=endless, **workers(best))
    return turns(((batch["image"],) for batch in loader), (folder, cache))


def memory(work: Work, best: bool = False) -> Turn:
    """torchvision's CIFAR10 with random pictures in its place: pad by 4, crop, flip, normalise."""
    from torchvision.datasets import CIFAR10
    from torchvision.transforms import v2

    pictures = CIFAR10.__new__(CIFAR10)
    pictures.data = np.random.default_rng(0).integers(
        0, 256, (CIFAR, work.image_size, work.image_size, 3), dtype=np.uint8
    )
    pictures.targets, pictures.target_transform = [0] * CIFAR, None
    steps: list[Any] = [v2.RandomCrop(work.image_size, padding=work.image_size // 8), v2.RandomHorizontalFlip()]
    steps = [v2.ToImage(), *steps] if best else [*steps, v2.ToImage()]
    pictures.transform = v2.Compose([*steps, v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])
    endless = RandomSampler(pictures, replacement=True, num_samples=ENDLESS)
    return turns(DataLoader(pictures, work.batch_size, sampler=endless, **workers(best)))
