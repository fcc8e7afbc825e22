"""Named datasets: `digits`, and those of torchvision (`torchvision:CIFAR10`,
`torchvision:EMNIST?split=letters&root=DIR`).

torchvision downloads and opens the datasets. This module converts each torchvision dataset to a `Split`; image files
are decoded by this package, so that results are comparable with other sources.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import urllib.parse
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vitreous.data.decoding.decode import describe_exception, read_input_file
from vitreous.data.decoding.gate import MAX_PIXELS
from vitreous.data.holdout import draw_stratified_splits
from vitreous.data.split import ArraySplit, Data, FileSplit, Split, StoreSplit, create_empty_labels, ensure_val_split
from vitreous.errors import DataError, UsageError, escape_unprintable, find_closest_match
from vitreous.system.disk import get_cache_folder

DIGIT_CLASSES = tuple("0123456789")
SplitReader = Callable[[Any], Split]


@dataclass(frozen=True)
class TorchvisionSpec:
    """How to open a torchvision dataset.

    `splits`: the constructor arguments of each split. `read`: the function that converts the torchvision dataset to a
    `Split`. `classes`: the class names, if torchvision has none or other ones. `extra_arguments`: further constructor
    arguments that users can set, with their valid values, the default first.
    """

    splits: dict[str, dict[str, Any]]
    read: SplitReader
    classes: tuple[str, ...] = ()
    extra_arguments: dict[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class PpmFiles(FileSplit):
    """Split of binary PPM files (P6) with 8-bit colours, which are decoded here, as `decode` does not support PPM."""

    def raw(self, sample: int) -> np.ndarray:
        """Return the pixels of a file, (H, W, 3) uint8. Raises DataError for anything but a complete file of this
        format."""
        try:
            with Image.open(io.BytesIO(read_input_file(self.path(sample))), formats=("PPM",)) as image:
                if image.mode != "RGB" or image.width * image.height > MAX_PIXELS:
                    raise ValueError("unexpected pixel data")
                return np.asarray(image)
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
            raise DataError(f"{self.name(sample)}: not a complete 8-bit PPM file", "download it again") from None


@dataclass(frozen=True, eq=False)
class Hdf5Images:
    """Store of the images in an HDF5 file, in the array `key`, (n, H, W, C) uint8."""

    path: str
    key: str
    _open: dict[int, Any] = field(default_factory=dict)  # process id -> open array: HDF5 handles do not survive a fork

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}

    def pixels(self) -> Any:
        """Return the HDF5 array, opened once per process. Raises DataError if it cannot be read."""
        import h5py

        if os.getpid() not in self._open:
            try:
                self._open[os.getpid()] = h5py.File(self.path, "r")[self.key]
            except (OSError, KeyError) as error:
                raise DataError(
                    f"{self.path}: cannot be read as HDF5 ({describe_exception(error)})", "download it again"
                ) from None
        return self._open[os.getpid()]

    def read(self, index: int) -> np.ndarray:
        """Return the pixels of an image, (H, W, C) uint8. Raises DataError if it cannot be read."""
        try:
            return np.asarray(self.pixels()[index])
        except (OSError, ValueError, IndexError) as error:
            raise DataError(
                f"{self.name(index)}: cannot be read ({describe_exception(error)})", "download the file again"
            ) from None

    def name(self, index: int) -> str:
        """Return the name of an image for messages."""
        return f"{self.path}, row {index}"

    def update(self, digest: Any, indices: np.ndarray) -> None:
        """Update a hashlib digest with the name of the file, the shape of the array and the rows `indices` (n,),
        without reading pixels."""
        digest.update(f"{os.path.basename(self.path)} {self.pixels().shape}\n".encode())
        digest.update(indices.astype(np.int64).tobytes())


def labels_to_int64(labels: Any) -> np.ndarray:
    """Convert n labels, integers or None, to (n,) int64; None becomes -1."""
    return np.array([-1 if label is None else int(label) for label in labels], dtype=np.int64)


def build_file_split(samples: Iterable[tuple[Any, Any]], split_class: type[FileSplit] = FileSplit) -> Split:
    """Build a split from pairs of a file path and a label."""
    samples = list(samples)
    return split_class([path for path, _ in samples], labels_to_int64(label for _, label in samples))


def read_array_split(dataset: Any) -> Split:
    """Convert a torchvision dataset with pixels (n, H, W[, C]) in memory, such as CIFAR10."""
    return ArraySplit(
        np.asarray(dataset.data), labels_to_int64(dataset.targets if hasattr(dataset, "targets") else dataset.labels)
    )


def read_channels_first_split(dataset: Any) -> Split:
    """Convert a torchvision dataset with pixels (n, C, H, W) in memory, such as SVHN."""
    return ArraySplit(np.asarray(dataset.data).transpose(0, 2, 3, 1), labels_to_int64(dataset.labels))


def read_qmnist_split(dataset: Any) -> Split:
    """Convert torchvision's QMNIST, whose targets (n, 8) have the class in the first column."""
    return ArraySplit(np.asarray(dataset.data), labels_to_int64(dataset.targets[:, 0]))


def read_fer2013_split(dataset: Any) -> Split:
    """Convert torchvision's FER2013, which has pairs of an image and a label."""
    images, labels = zip(*dataset._samples, strict=True)
    return ArraySplit(np.stack(list(map(np.asarray, images))), labels_to_int64(labels))


def read_path_lists(dataset: Any) -> Split:
    """Convert a torchvision dataset with a list of paths and a list of labels, such as Flowers102."""
    paths = dataset._images if hasattr(dataset, "_images") else dataset._image_files
    return build_file_split(zip(paths, dataset._labels, strict=True))


def read_path_pairs(dataset: Any, split_class: type[FileSplit] = FileSplit) -> Split:
    """Convert a torchvision dataset with a list of pairs of a path and a label, such as EuroSAT."""
    return build_file_split(
        next(getattr(dataset, n) for n in ("_samples", "samples", "imgs") if hasattr(dataset, n)), split_class
    )


def read_ppm_pairs(dataset: Any) -> Split:
    """Convert a torchvision dataset with pairs of the path of a PPM file and a label, such as GTSRB."""
    return read_path_pairs(dataset, PpmFiles)


def read_sun397_split(dataset: Any) -> Split:
    """Convert torchvision's SUN397, sorted by path, as torchvision lists it in the order of the file system."""
    return build_file_split(sorted(zip(map(os.fspath, dataset._image_files), dataset._labels, strict=True)))


def read_caltech_split(dataset: Any, folder: str, name_format: str) -> Split:
    """Convert torchvision's Caltech101 or Caltech256, whose files are in `folder`. `name_format` formats the name of a
    file from the numbers of its category and image."""
    root, names = os.path.join(dataset.root, folder), dataset.categories
    pairs = zip(dataset.y, dataset.index, strict=True)
    return build_file_split((os.path.join(root, names[y], name_format.format(y + 1, index)), y) for y, index in pairs)


def read_inaturalist_split(dataset: Any) -> Split:
    """Convert torchvision's INaturalist, which has pairs of a category and a file name. They are sorted, as torchvision
    lists them in the order of the file system."""
    names = dataset.all_categories
    return build_file_split((os.path.join(dataset.root, names[y], name), y) for y, name in sorted(dataset.index))


def read_pcam_split(dataset: Any) -> Split:
    """Convert torchvision's PCAM, whose pixels and labels are in HDF5 files."""
    file_table = dataset._FILES[dataset._split]
    images, labels = (os.fspath(dataset._base_folder / file_table[role][0]) for role in ("images", "targets"))
    with dataset.h5py.File(labels) as file:
        return StoreSplit(
            Hdf5Images(images, "x"), np.arange(len(file["y"])), labels_to_int64(np.asarray(file["y"]).reshape(-1))
        )


TRAIN_ONLY_SPLITS = {"train": {}}
TRAIN_FLAG_SPLITS = {"train": {"train": True}, "test": {"train": False}}
TRAIN_TEST_SPLITS, TRAIN_VAL_SPLITS = (
    {name: {"split": name} for name in names} for names in (("train", "test"), ("train", "val"))
)
TRAIN_VAL_TEST_SPLITS = {name: {"split": name} for name in ("train", "val", "test")}
FER2013_CLASSES = ("angry", "disgust", "fear", "happy", "sad", "surprise", "neutral")
INATURALIST_VERSIONS = ("2021_train", "2021_train_mini", "2019", "2018", "2017")
TORCHVISION_SPECS = {
    "Caltech101": TorchvisionSpec(
        TRAIN_ONLY_SPLITS, partial(read_caltech_split, folder="101_ObjectCategories", name_format="image_{1:04d}.jpg")
    ),
    "Caltech256": TorchvisionSpec(
        TRAIN_ONLY_SPLITS, partial(read_caltech_split, folder="256_ObjectCategories", name_format="{0:03d}_{1:04d}.jpg")
    ),
    "CIFAR10": TorchvisionSpec(TRAIN_FLAG_SPLITS, read_array_split),
    "CIFAR100": TorchvisionSpec(TRAIN_FLAG_SPLITS, read_array_split),
    "Country211": TorchvisionSpec(
        {"train": {"split": "train"}, "val": {"split": "valid"}, "test": {"split": "test"}}, read_path_pairs
    ),
    "DTD": TorchvisionSpec(
        TRAIN_VAL_TEST_SPLITS, read_path_lists, extra_arguments={"partition": tuple(map(str, range(1, 11)))}
    ),
    "EMNIST": TorchvisionSpec(
        TRAIN_FLAG_SPLITS,
        read_array_split,
        extra_arguments={"split": ("balanced", "byclass", "bymerge", "letters", "digits", "mnist")},
    ),
    "EuroSAT": TorchvisionSpec(TRAIN_ONLY_SPLITS, read_path_pairs),
    "FashionMNIST": TorchvisionSpec(TRAIN_FLAG_SPLITS, read_array_split),
    "FER2013": TorchvisionSpec(TRAIN_TEST_SPLITS, read_fer2013_split, FER2013_CLASSES),
    "FGVCAircraft": TorchvisionSpec(
        TRAIN_VAL_TEST_SPLITS,
        read_path_lists,
        extra_arguments={"annotation_level": ("variant", "family", "manufacturer")},
    ),
    "Flowers102": TorchvisionSpec(TRAIN_VAL_TEST_SPLITS, read_path_lists),
    "Food101": TorchvisionSpec(TRAIN_TEST_SPLITS, read_path_lists),
    "GTSRB": TorchvisionSpec(TRAIN_TEST_SPLITS, read_ppm_pairs, tuple(map(str, range(43)))),
    "ImageNet": TorchvisionSpec(TRAIN_VAL_SPLITS, read_path_pairs),
    "Imagenette": TorchvisionSpec(
        TRAIN_VAL_SPLITS, read_path_pairs, extra_arguments={"size": ("full", "320px", "160px")}
    ),
    "INaturalist": TorchvisionSpec(
        {"train": {}, "val": {"version": "2021_valid"}},
        read_inaturalist_split,
        extra_arguments={"version": INATURALIST_VERSIONS},
    ),
    "KMNIST": TorchvisionSpec(TRAIN_FLAG_SPLITS, read_array_split),
    "MNIST": TorchvisionSpec(TRAIN_FLAG_SPLITS, read_array_split, DIGIT_CLASSES),
    "OxfordIIITPet": TorchvisionSpec({"train": {"split": "trainval"}, "test": {"split": "test"}}, read_path_lists),
    "PCAM": TorchvisionSpec(TRAIN_VAL_TEST_SPLITS, read_pcam_split, ("normal", "tumor")),
    "Places365": TorchvisionSpec(
        {"train": {"split": "train-standard"}, "val": {"split": "val"}},
        read_path_pairs,
        extra_arguments={"small": ("False", "True")},
    ),
    "QMNIST": TorchvisionSpec(TRAIN_FLAG_SPLITS, read_qmnist_split, DIGIT_CLASSES),
    "RenderedSST2": TorchvisionSpec(TRAIN_VAL_TEST_SPLITS, read_path_pairs),
    "SEMEION": TorchvisionSpec(TRAIN_ONLY_SPLITS, read_array_split, DIGIT_CLASSES),
    "StanfordCars": TorchvisionSpec(TRAIN_TEST_SPLITS, read_path_pairs),
    "STL10": TorchvisionSpec(TRAIN_TEST_SPLITS, read_channels_first_split),
    "SUN397": TorchvisionSpec(TRAIN_ONLY_SPLITS, read_sun397_split),
    "SVHN": TorchvisionSpec(TRAIN_TEST_SPLITS, read_channels_first_split, DIGIT_CLASSES),
    "USPS": TorchvisionSpec(TRAIN_FLAG_SPLITS, read_array_split, DIGIT_CLASSES),
}
MANUAL_DOWNLOADS = ("FER2013", "ImageNet", "StanfordCars")  # datasets that torchvision cannot download


def open_torchvision(source: str, split_seed: int = 0) -> Data:
    """Open a torchvision dataset, downloaded if missing, in torchvision's order of classes and images.

    A predefined `val` is kept; if there is none, a tenth of the training images is held out. The argument `root` of the
    source is `$XDG_CACHE_HOME/vitreous/torchvision` by default. Raises UsageError for an unknown dataset or argument,
    DataError if the dataset cannot be downloaded or read.
    """
    name, spec, root, arguments = parse_torchvision_source(source)
    splits: dict[str, Split] = {}
    notes = [f"{name} in {escape_unprintable(root)}"]
    classes: tuple[str, ...] = ()
    titles: dict[str, str] = {}
    for split_name, split_arguments in spec.splits.items():
        if split_name != "train" and arguments.get("version", "").isdigit():
            continue  # iNaturalist before 2021 has no validation images
        dataset = load_torchvision_dataset(name, root, {**arguments, **split_arguments})
        split = spec.read(dataset)
        if split_name == "train":
            classes, titles = get_torchvision_classes(spec, dataset, split)
        if len(split) and (split.labels < 0).all():
            split = split.take(np.arange(len(split)), create_empty_labels(len(split)))
        splits[split_name] = split
    if "N/A" in classes[:1]:  # the letters of EMNIST are numbered from 1
        classes = classes[1:]
        splits = {
            split_name: split.take(np.arange(len(split)), split.labels - 1) for split_name, split in splits.items()
        }
    are_labels_valid = all(0 <= label < len(classes) for split in splits.values() for label in np.unique(split.labels))
    if not are_labels_valid or len(set(classes)) < len(classes):
        problem = f"{source}: labels and class names of {name} do not match"
        raise DataError(problem, f"delete it from {root}, and it is downloaded again")
    splits, full_train = ensure_val_split(splits, split_seed, notes)
    return Data(
        source,
        classes,
        splits=splits,
        notes=notes,
        unsplit=len(spec.splits) == 1,
        full_train_split=full_train,
        titles=titles,
    )


def parse_torchvision_source(source: str) -> tuple[str, TorchvisionSpec, Path, dict[str, Any]]:
    """Parse a source such as `torchvision:EMNIST?split=letters` into the name of the dataset, its specification, the
    folder `root` of its files, and its constructor arguments. Raises UsageError for an unknown dataset, argument or
    value."""
    name, _, query = source.removeprefix("torchvision:").partition("?")
    name_by_lower = {spec.lower(): spec for spec in TORCHVISION_SPECS}
    if name.lower() not in name_by_lower:
        closest = name_by_lower.get(find_closest_match(name.lower(), name_by_lower))
        hint = f"did you mean torchvision:{closest}?" if closest else f"choose one of {', '.join(TORCHVISION_SPECS)}"
        raise UsageError(f"torchvision has no classification dataset {escape_unprintable(name)}", hint)
    name = name_by_lower[name.lower()]
    spec = TORCHVISION_SPECS[name]
    arguments: dict[str, Any] = {argument: values[0] for argument, values in spec.extra_arguments.items()}
    root = get_cache_folder("torchvision")
    for argument, value in urllib.parse.parse_qsl(query.replace("+", "%2B"), keep_blank_values=True):
        if argument == "root" and value:
            root = Path(value).expanduser()
        elif argument not in arguments:
            hint = f"valid names: {', '.join(['root', *arguments])}"
            raise UsageError(f"torchvision:{name} has no parameter {escape_unprintable(argument)}", hint)
        elif value not in spec.extra_arguments[argument]:
            hint = f"valid values: {', '.join(spec.extra_arguments[argument])}"
            raise UsageError(f"torchvision:{name} has no {argument} {escape_unprintable(value)}", hint)
        else:
            arguments[argument] = value
    booleans = {"True": True, "False": False}
    return (
        name,
        spec,
        root,
        {key: int(text) if key == "partition" else booleans.get(text, text) for key, text in arguments.items()},
    )


def load_torchvision_dataset(name: str, root: Path, arguments: dict[str, Any]) -> Any:
    """Construct a split of a torchvision dataset, with the files in `root`, which are downloaded if missing. Raises
    DataError if it cannot be downloaded or read, UsageError if a library is missing."""
    import torchvision.datasets

    dataset_class = getattr(torchvision.datasets, name)
    problem = ""
    try:
        return dataset_class(os.fspath(root), **arguments, **({"download": False} if name == "SEMEION" else {}))
    except ImportError as error:
        raise UsageError(f"torchvision:{name} needs a missing library ({error})", "install the library") from None
    except (RuntimeError, OSError) as error:
        if "h5py" in str(error):
            raise UsageError(f"torchvision:{name} needs h5py, which is not installed", "pip install h5py") from None
        problem = str(error)
    except Exception as error:  # exceptions for damaged files depend on the dataset
        raise damaged_files_error(name, root, error) from None
    message = f"torchvision:{name} is incomplete in {escape_unprintable(root)}"
    if name in MANUAL_DOWNLOADS:
        hint = f"download it manually, and set its folder: torchvision:{name}?root=DIR"
        raise DataError(f"{message} ({shorten_to_one_line(problem)})", hint)
    try:
        os.makedirs(root, exist_ok=True)
        with contextlib.redirect_stdout(sys.stderr):  # a command's stdout is reserved for its document
            return dataset_class(os.fspath(root), **arguments, download=True)
    except (RuntimeError, OSError, ValueError, EOFError) as error:
        if str(error) == problem:  # no files are missing, so nothing was downloaded
            raise damaged_files_error(name, root, error) from None
        hint = f"check the network and the disk, or set the folder of a copy: torchvision:{name}?root=DIR"
        raise DataError(f"{message} and could not be downloaded ({shorten_to_one_line(str(error))})", hint) from None
    except Exception as error:
        raise damaged_files_error(name, root, error) from None


def damaged_files_error(name: str, root: Path, error: Exception) -> DataError:
    """Return the error for files of a torchvision dataset in `root` that cannot be read."""
    problem = shorten_to_one_line(f"{type(error).__name__}: {error}")
    message = f"torchvision:{name}: the files in {escape_unprintable(root)} cannot be read ({problem})"
    return DataError(message, "delete them, and they are downloaded again")


def shorten_to_one_line(text: str) -> str:
    """Return the first 200 characters of a text on one line."""
    return re.sub(r"\s+", " ", text)[:200]


def get_torchvision_classes(
    spec: TorchvisionSpec, dataset: Any, split: Split
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the class names of a torchvision dataset in label order, and {class: title} if the classes are synsets."""
    if hasattr(dataset, "wnids"):
        return tuple(dataset.wnids), dict(zip(dataset.wnids, map(", ".join, dataset.classes), strict=True))
    attributes = ("classes", "categories", "all_categories")
    class_names = next((getattr(dataset, name) for name in attributes if hasattr(dataset, name)), ())
    return spec.classes or tuple(map(str, class_names)) or tuple(
        map(str, range(int(split.labels.max(initial=-1)) + 1))
    ), {}


def open_digits(split_seed: int = 0) -> Data:
    """Open scikit-learn's handwritten digits (1,797 grey images of 8 x 8), split 80/10/10 within each class."""
    table = load_digits_table()
    pixels = np.rint(table[:, :-1].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    labels = table[:, -1].astype(np.int64)
    indices_by_split = draw_stratified_splits(labels, split_seed, {"val": 0.1, "test": 0.1})
    splits: dict[str, Split] = {
        name: ArraySplit(pixels[indices], labels[indices]) for name, indices in indices_by_split.items()
    }
    train_val_indices = np.sort(np.concatenate([indices_by_split["train"], indices_by_split["val"]]))
    return Data(
        "digits",
        tuple(map(str, range(10))),
        splits,
        full_train_split=ArraySplit(pixels[train_val_indices], labels[train_val_indices]),
    )


def load_digits_table() -> np.ndarray:
    """Load scikit-learn's digits as a table (1797, 65) float64: 64 pixels from 0 to 16, then the label.

    The table is read from scikit-learn's file, since importing `sklearn.datasets` takes longer than an epoch. If the
    file is not found, `sklearn.datasets.load_digits` is called.
    """
    spec = find_spec("sklearn")
    for package_folder in (spec.submodule_search_locations or ()) if spec else ():
        file = Path(package_folder) / "datasets" / "data" / "digits.csv.gz"
        if file.is_file():
            return np.loadtxt(file, delimiter=",")
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return np.column_stack([images, labels])
