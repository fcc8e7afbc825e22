"""torchvision's datasets by name: small copies in each layout give the labels and pixels that torchvision gives."""

from __future__ import annotations

import bz2
import json
import os
import pickle
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
import torchvision.datasets
from scipy.io import savemat

from tests.conftest import make_image
from tests.data.resume import assert_continues
from vitreous.data.layouts.named import TORCHVISION_SPECS
from vitreous.data.sources import open_data
from vitreous.data.split import Data, decode_sample
from vitreous.errors import DataError, UsageError

CHECKSUMMED_MODULES = ("cifar", "stl10", "svhn", "flowers102", "imagenet", "places365", "semeion", "fer2013", "mnist")


@pytest.fixture(autouse=True)
def skip_checksum_verification(monkeypatch):
    """Skip torchvision's checksums, which are those of the full datasets, and block network access."""
    for module in CHECKSUMMED_MODULES:
        present = lambda path, md5=None: os.path.isfile(path)  # noqa: E731
        monkeypatch.setattr(f"torchvision.datasets.{module}.check_integrity", present)


def draw_pixels(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def save_random_image(path: Path, seed: int, **options) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    make_image(seed, (12, 10), seed).save(path, **options)


def write_cifar(root: Path, home: str, files: dict[str, list[str]], label: str, meta: tuple[str, str, int]) -> None:
    (root / home).mkdir(parents=True)
    for seed, name in enumerate([*files["train"], *files["test"]]):
        batch = {"data": draw_pixels(6, 3072, seed=seed), label: [(seed + row) % meta[2] for row in range(6)]}
        (root / home / name).write_bytes(pickle.dumps(batch))
    (root / home / meta[0]).write_bytes(pickle.dumps({meta[1]: [f"kind {number}" for number in range(meta[2])]}))


def write_cifar10(root):
    batches = {"train": [f"data_batch_{number}" for number in range(1, 6)], "test": ["test_batch"]}
    write_cifar(root, "cifar-10-batches-py", batches, "labels", ("batches.meta", "label_names", 10))


def write_cifar100(root):
    write_cifar(
        root, "cifar-100-python", {"train": ["train"], "test": ["test"]}, "fine_labels", ("meta", "fine_label_names", 6)
    )


def write_idx_files(root: Path, home: str, prefixes: tuple[str, str], labels: np.ndarray) -> None:
    """Write MNIST's IDX files: a magic number, the sizes, the bytes."""
    (root / home / "raw").mkdir(parents=True)
    for seed, prefix in enumerate(prefixes):
        for suffix, values in (
            ("images-idx3", draw_pixels(len(labels), 28, 28, seed=seed)),
            ("labels-idx1", np.roll(labels, seed)),
        ):
            header = b"".join(int(number).to_bytes(4, "big") for number in (2048 + values.ndim, *values.shape))
            (root / home / "raw" / f"{prefix}-{suffix}-ubyte").write_bytes(header + values.tobytes())


def write_mnist(root):
    write_idx_files(root, "MNIST", ("train", "t10k"), np.arange(20, dtype=np.uint8) % 10)


def write_emnist(root):
    write_idx_files(
        root, "EMNIST", ("emnist-letters-train", "emnist-letters-test"), np.arange(30, dtype=np.uint8) % 26 + 1
    )


def write_svhn(root):
    root.mkdir()
    for seed, split in enumerate(("train", "test")):
        labels = (np.arange(20, dtype=np.uint8) % 10 + 1)[:, None]
        savemat(root / f"{split}_32x32.mat", {"X": draw_pixels(32, 32, 3, 20, seed=seed), "y": labels})


def write_stl10(root):
    home = root / "stl10_binary"
    home.mkdir(parents=True)
    for seed, name in enumerate(("train", "test", "unlabeled")):
        draw_pixels(10, 3, 96, 96, seed=seed).tofile(home / f"{name}_X.bin")
        (np.arange(10, dtype=np.uint8) % 10 + 1).tofile(home / f"{name}_y.bin")
    (home / "class_names.txt").write_text("".join(f"class {number}\n" for number in range(10)))


def write_usps(root):
    root.mkdir()
    for seed, name in enumerate(("usps.bz2", "usps.t.bz2")):
        values = np.random.default_rng(seed).uniform(-1, 1, (20, 256))
        rows = (
            f"{row % 10 + 1} " + " ".join(f"{i + 1}:{v:.4f}" for i, v in enumerate(values[row])) for row in range(20)
        )
        (root / name).write_bytes(bz2.compress("\n".join(rows).encode()))


def write_semeion(root):
    root.mkdir()
    rows = np.hstack([draw_pixels(20, 256) % 2, np.eye(10, dtype=np.uint8)[np.arange(20) % 10]])
    np.savetxt(root / "semeion.data", rows, fmt="%d")


def write_flowers(root):
    home = root / "flowers-102"
    for number in range(1, 17):
        save_random_image(home / "jpg" / f"image_{number:05d}.jpg", number)
    home.joinpath("imagelabels.mat").parent.mkdir(exist_ok=True)
    savemat(home / "imagelabels.mat", {"labels": np.array([[number % 4 + 1 for number in range(16)]])})
    savemat(home / "setid.mat", {"trnid": [[9, 2, 3, 4, 8]], "valid": [[5, 6, 1]], "tstid": [[7, 16, 10, 11]]})


def write_pets(root):
    home = root / "oxford-iiit-pet"
    for split in ("trainval", "test"):
        names = [
            (f"{breed}_{number}", label)
            for label, breed in enumerate(("Abyssinian", "great_dane"), 1)
            for number in range(12)
        ]
        for seed, (name, _) in enumerate(names):
            save_random_image(home / "images" / f"{split}_{name}.jpg", seed)
        (home / "annotations").mkdir(exist_ok=True)
        (home / "annotations" / f"{split}.txt").write_text(
            "".join(f"{split}_{name} {label} 1 1\n" for name, label in names)
        )


def write_dtd(root):
    home = root / "dtd" / "dtd"
    (home / "labels").mkdir(parents=True)
    for seed, split in enumerate(("train", "val", "test")):
        names = [f"{class_name}/{split}_{number}.jpg" for class_name in ("dotted", "banded") for number in range(3)]
        for number, name in enumerate(names):
            save_random_image(home / "images" / name, 10 * seed + number)
        (home / "labels" / f"{split}1.txt").write_text("\n".join(names) + "\n")


def write_eurosat(root):
    for seed in range(24):
        save_random_image(root / "eurosat" / "2750" / ("Forest", "River")[seed % 2] / f"{seed}.jpg", seed)


def write_pcam(root):
    home = root / "pcam"
    home.mkdir(parents=True)
    for seed, split in enumerate(("train", "valid", "test")):
        with h5py.File(home / f"camelyonpatch_level_2_split_{split}_x.h5", "w") as file:
            file["x"] = draw_pixels(8, 9, 9, 3, seed=seed)
        with h5py.File(home / f"camelyonpatch_level_2_split_{split}_y.h5", "w") as file:
            file["y"] = (np.arange(8, dtype=np.uint8) % 2).reshape(8, 1, 1, 1)


def write_food(root):
    home = root / "food-101"
    for seed, split in enumerate(("train", "test")):
        listed = {
            class_name: [f"{class_name}/{split}{number}" for number in range(12)]
            for class_name in ("ramen", "apple_pie")
        }
        for number, name in enumerate(name for names in listed.values() for name in names):
            save_random_image(home / "images" / f"{name}.jpg", 30 * seed + number)
        (home / "meta").mkdir(exist_ok=True)
        (home / "meta" / f"{split}.json").write_text(json.dumps(listed))


def write_gtsrb(root):
    home = root / "gtsrb"
    for seed in range(24):
        save_random_image(home / "GTSRB" / "Training" / f"{seed % 3:05d}" / f"{seed}.ppm", seed)
        save_random_image(home / "GTSRB" / "Final_Test" / "Images" / f"{seed}.ppm", 50 + seed)
    rows = "".join(f"{seed}.ppm;10;10;{seed % 3}\n" for seed in range(24))
    (home / "GT-final_test.csv").write_text("Filename;Width;Height;ClassId\n" + rows)


def write_aircraft(root):
    home = root / "fgvc-aircraft-2013b" / "data"
    for seed, split in enumerate(("train", "val", "test")):
        for number in range(4):
            save_random_image(home / "images" / f"{seed}{number}.jpg", 10 * seed + number)
        rows = "".join(f"{seed}{number} {('DC 10', 'A-320')[number % 2]}\n" for number in range(4))
        (home / f"images_variant_{split}.txt").write_text(rows)
    (home / "variants.txt").write_text("DC 10\nA-320\n")


def write_cars(root):
    home = root / "stanford_cars"
    (home / "devkit").mkdir(parents=True)
    for seed, (split, file) in enumerate(
        (("train", "devkit/cars_train_annos.mat"), ("test", "cars_test_annos_withlabels.mat"))
    ):
        names = [f"{number:05d}.jpg" for number in range(1, 25)]
        for number, name in enumerate(names):
            save_random_image(home / f"cars_{split}" / name, 30 * seed + number)
        rows = np.array(
            [(name, number % 2 + 1) for number, name in enumerate(names)], dtype=[("fname", "O"), ("class", "i8")]
        )
        savemat(home / file, {"annotations": rows})
    savemat(home / "devkit" / "cars_meta.mat", {"class_names": np.array(["Audi TT", "BMW X5"], dtype=object)})


def write_caltech(root):
    for seed in range(24):
        class_name = ("ant", "crab")[seed % 2]
        save_random_image(
            root / "caltech101" / "101_ObjectCategories" / class_name / f"image_{seed // 2 + 1:04d}.jpg", seed
        )
    (root / "caltech101" / "101_ObjectCategories" / "BACKGROUND_Google").mkdir()


def write_imagenet(root):
    synsets = {"n01440764": ("tench", "Tinca tinca"), "n02012849": ("crane",), "n03126707": ("crane",)}
    for seed, split in enumerate(("train", "val")):
        for number in range(6):
            save_random_image(
                root / split / list(synsets)[number % 3] / f"{number}.JPEG", 10 * seed + number, format="JPEG"
            )
    torch.save((synsets, []), root / "meta.bin")


DATASET_WRITERS = {
    "CIFAR10": write_cifar10, "CIFAR100": write_cifar100, "MNIST": write_mnist, "EMNIST?split=letters": write_emnist, "SVHN": write_svhn, "STL10": write_stl10,
    "USPS": write_usps, "SEMEION": write_semeion, "Flowers102": write_flowers, "OxfordIIITPet": write_pets, "DTD": write_dtd, "EuroSAT": write_eurosat, "PCAM": write_pcam,
    "Food101": write_food, "GTSRB": write_gtsrb, "FGVCAircraft": write_aircraft, "StanfordCars": write_cars, "Caltech101": write_caltech, "ImageNet": write_imagenet,
}  # fmt: skip
LABEL_OFFSETS = {"EMNIST?split=letters": 1}  # labels of torchvision's "letters" split start at 1


def open_written_dataset(name: str, root: Path) -> tuple[Data, str]:
    DATASET_WRITERS[name](root)
    source = f"torchvision:{name}{'&' if '?' in name else '?'}root={root}"
    return open_data(source), source


@pytest.mark.parametrize("name", DATASET_WRITERS)
def test_labels_and_pixels_match_torchvision(name, tmp_path):
    data, source = open_written_dataset(name, tmp_path / "x")
    dataset_name, _, query = name.partition("?")
    options = dict(option.split("=") for option in query.split("&") if option)
    spec = TORCHVISION_SPECS[dataset_name]
    assert (
        data.name == source
        and (data.full_train_split is not None) == ("val" not in spec.splits)
        and set(data.splits) >= set(spec.splits)
    )
    for split, split_options in spec.splits.items():
        quiet = {"download": False} if dataset_name == "SEMEION" else {}
        theirs = getattr(torchvision.datasets, dataset_name)(str(tmp_path / "x"), **options, **split_options, **quiet)
        ours = data.full_train_split if split == "train" and data.full_train_split else data.splits[split]
        assert len(ours) == len(theirs) > 0
        for sample in range(len(ours)):
            image, label = theirs[sample]
            assert ours.labels[sample] == label - LABEL_OFFSETS.get(name, 0)
            channels = 1 if image.mode == "L" else 3
            assert np.array_equal(
                np.asarray(decode_sample(ours, sample, channels)),
                np.asarray(image.convert({1: "L", 3: "RGB"}[channels])),
            )
        assert ours.labels.dtype == np.int64 and ours.labels.max() < len(data.classes)


def test_named_datasets_have_their_class_names(tmp_path):
    dataset_names = ("CIFAR10", "MNIST", "EMNIST?split=letters", "OxfordIIITPet", "ImageNet", "PCAM")
    names = {name: open_written_dataset(name, tmp_path / name)[0] for name in dataset_names}
    assert names["CIFAR10"].classes[:2] == ("kind 0", "kind 1") and names["MNIST"].classes == tuple("0123456789")
    assert names["EMNIST?split=letters"].classes == tuple("abcdefghijklmnopqrstuvwxyz")
    assert names["PCAM"].classes == ("normal", "tumor") and len(names["OxfordIIITPet"].classes) == 2
    assert names["ImageNet"].classes == ("n01440764", "n02012849", "n03126707")
    assert names["MNIST"].notes[0] == f"MNIST in {tmp_path / 'MNIST'}"
    assert names["ImageNet"].titles == {"n01440764": "tench, Tinca tinca", "n02012849": "crane", "n03126707": "crane"}


@pytest.mark.parametrize("name", ["MNIST", "DTD", "PCAM", "GTSRB"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_continues_anywhere(name, workers, tmp_path):
    _, source = open_written_dataset(name, tmp_path / "x")
    assert_continues(lambda: open_data(source).split("train"), workers, 10 if workers == 0 else 2)


def test_split_order_does_not_depend_on_the_file_system(tmp_path, monkeypatch):
    home = tmp_path / "x" / "SUN397"
    for seed in range(24):
        save_random_image(home / "a" / ("abbey", "arch")[seed % 2] / f"sun_{seed:02d}.jpg", seed)
    (home / "ClassName.txt").write_text("/a/abbey\n/a/arch\n")
    source = f"torchvision:SUN397?root={tmp_path / 'x'}"
    first = open_data(source)
    listed = Path.rglob
    monkeypatch.setattr(Path, "rglob", lambda self, pattern: reversed(list(listed(self, pattern))))
    assert open_data(source).fingerprint() == first.fingerprint()
    assert (
        first.classes == ("abbey", "arch")
        and [p.parent.name for p in first.full_train_split.paths] == ["abbey"] * 12 + ["arch"] * 12
    )


@pytest.mark.parametrize(
    "source, message",
    [
        ("torchvision:cifar", "did you mean torchvision:CIFAR10?"),
        ("torchvision:Kinetics", "no classification dataset Kinetics"),
        ("torchvision:CIFAR10?split=train", "CIFAR10 has no parameter split\n  valid names: root"),
        ("torchvision:EMNIST?split=digit", "has no split digit\n  valid values: balanced"),
    ],
)
def test_invalid_dataset_names_are_rejected(source, message):
    with pytest.raises(UsageError) as error:
        open_data(source)
    assert message in str(error.value)


def test_a_failed_download_is_reported(tmp_path, monkeypatch):
    def no_network(*_, **__):
        print("Downloading")
        raise OSError("no route to host")

    monkeypatch.setattr("torchvision.datasets.dtd.download_and_extract_archive", no_network)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(DataError, match="could not be downloaded") as error:
        open_data("torchvision:DTD")
    assert f"{tmp_path}/vitreous/torchvision" in error.value.message and "?root=DIR" in error.value.hint
    with pytest.raises(DataError, match=r"torchvision:StanfordCars is incomplete") as error:
        open_data("torchvision:StanfordCars")
    assert "manually" in error.value.hint


def test_damaged_dataset_files_are_reported(tmp_path):
    write_mnist(tmp_path / "x")
    file = tmp_path / "x" / "MNIST" / "raw" / "train-images-idx3-ubyte"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(DataError, match="cannot be read"):
        open_data(f"torchvision:MNIST?root={tmp_path / 'x'}")
    write_gtsrb(tmp_path / "y")
    signs = open_data(f"torchvision:GTSRB?root={tmp_path / 'y'}").split("train")
    signs.paths[3].write_bytes(signs.paths[3].read_bytes()[:-1])
    with pytest.raises(DataError, match="not a complete 8-bit PPM file"):
        signs.raw(3)
