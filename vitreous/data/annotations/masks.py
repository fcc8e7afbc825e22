"""Datasets of masks: a class map for each image, or a mask file for each object.

    DIR/images/a.jpg       DIR/masks/a.png          a class map: each pixel is the index, or the colour, of its class
    DIR/a/images/a.png     DIR/a/masks/*.png        a mask for each object, as in the 2018 Data Science Bowl

Split folders `train`, `val` and `test` may be above or below `images` and `masks`. `DIR/classes.txt` has one class name
per line, from index 0, with a colour if maps are coloured: `road 128 64 128`. In index maps, 255 marks ignored pixels,
as in Pascal VOC, and so does `ignore_index`; a black-and-white map (only 0 and 255) has two classes. Grey RGB images,
integral floating-point numbers and .npy arrays are index maps.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vitreous.data.annotations.class_maps import (
    CLASSES_FILE,
    MapClasses,
    Palette,
    class_number_error,
    decode_colour,
    encode_colours,
    read_classes_file,
    read_map_classes,
    unknown_colour_error,
)
from vitreous.data.annotations.mask_files import (
    LOSSY_WHITE_THRESHOLD,
    VOID_VALUE,
    is_lossy,
    read_mask,
    to_numbers_if_grey,
)
from vitreous.data.annotations.mask_pairs import pair_images_with_masks
from vitreous.data.annotations.mask_places import (
    ImageMaskReader,
    MaskLocation,
    find_masks_beside_images,
    find_object_folders,
    locate_masks,
    locate_named_masks,
    locate_sibling_masks,
)
from vitreous.data.annotations.objects import read_image_size
from vitreous.data.annotations.target import (
    IGNORE_INDEX,
    AnnotatedFiles,
    Target,
    create_empty_target,
    masks_to_boxes,
    stack_masks,
)
from vitreous.data.decoding.decode import read_input_file
from vitreous.data.decoding.npy import NPY_MAGIC
from vitreous.data.decoding.spectral import read_void_mask
from vitreous.data.layouts.folder import list_images
from vitreous.data.split import Data, FileSplit, Split, create_empty_labels, ensure_val_split, strip_common_folder
from vitreous.errors import DataError, escape_unprintable, format_first_names

MASK_FOLDER_NAMES = ("masks", "labels", "annotations")  # names of the class map folder
DEFAULT_OBJECT_CLASS = "object"  # the class of objects if no name is defined


@dataclass(frozen=True, eq=False)
class MaskAnnotations:
    """Annotations of the images in a split of a mask dataset.

    - `images`: the image files
    - `files`: the mask files of each image
    - `maps`: each image has one file, a class map; otherwise each file is the mask of one object
    - `reader`: reads images and masks: `IMAGE_MASK_READER`, or that of volumes, which have class maps only
    - `count`: the number of classes
    - `palette`: colour -> class index, for coloured class maps
    - `binary`: class maps are black and white, and values above `threshold` are class 1
    - `ignore_index`: an index of ignored pixels, in addition to 255
    """

    root: Path
    images: Sequence[Path]
    files: Sequence[Sequence[Path]]
    maps: bool
    reader: ImageMaskReader
    count: int = 1
    palette: Palette | None = None
    binary: bool = False
    threshold: int = 0
    ignore_index: int | None = None

    @property
    def axes(self) -> int:
        """Number of axes of an image: 2, or 3 for volumes."""
        return self.reader.axes

    def read(self, index: int) -> Target:
        """Read the annotations of an image. Raises DataError for a mask that cannot be read, differs in size from its
        image, or contains invalid values."""
        size = self.reader.size(self.images[index])
        if self.maps:
            mask_path = self.files[index][0]
            classes = self.values_to_classes(read_mask_values(mask_path, self.palette, self.reader), mask_path)
            classes = self.reader.align(classes, mask_path, self.images[index], size)
            check_mask_size(classes.shape, size, mask_path, self.images[index])
            return create_empty_target(size, classes)
        masks = []
        for mask_path in self.files[index]:
            mask = self.reader.mask(mask_path)
            check_mask_size(mask.shape[:2], size, mask_path, self.images[index])
            mask = mask > (LOSSY_WHITE_THRESHOLD if is_lossy(mask_path) else 0)
            mask = mask.any(-1) if mask.ndim == 3 else mask
            if mask.any():
                masks.append(mask)
        is_crowd = np.zeros(len(masks), bool)
        return Target(size, is_crowd.astype(np.int64), masks_to_boxes(masks), is_crowd, layers=stack_masks(masks, size))

    def values_to_classes(self, values: np.ndarray, mask_path: Path) -> np.ndarray:
        """Convert the values of a class map, indices (*image) or colours (H, W, 3), to classes (*image) int32, with
        IGNORE_INDEX for ignored pixels. Raises DataError for values without a class."""
        if self.palette is None:
            values = to_numbers_if_grey(values)
        if values.ndim > self.reader.axes:
            return self.colours_to_classes(values, mask_path)
        classes = values.astype(np.int32)
        if self.binary:
            return (classes > self.threshold).astype(np.int32)
        classes[(classes == VOID_VALUE) | (classes == self.ignore_index)] = IGNORE_INDEX
        if (error := class_number_error(classes, self.count, mask_path, self.root)) is not None:
            raise error
        return classes

    def colours_to_classes(self, colours: np.ndarray, mask_path: Path) -> np.ndarray:
        """Convert (H, W, 3) uint8 colours to (H, W) int32 classes. Raises DataError for a colour without a class."""
        palette = self.palette or {}
        codes = encode_colours(colours)
        values, inverse = np.unique(codes, return_inverse=True)
        table = []
        for value in values.tolist():
            colour = decode_colour(value)
            if colour not in palette:
                raise unknown_colour_error(colour, mask_path, self.root)
            table.append(palette[colour])
        return np.array(table, np.int32)[inverse].reshape(codes.shape)

    def update(self, digest: Any, indices: np.ndarray) -> None:
        """Update a hashlib digest with the names of the masks of the images at `indices` (n,) int64."""
        mask_paths = [os.fspath(path) for index in indices for path in self.files[int(index)]]
        digest.update(
            "\n".join(strip_common_folder(mask_paths)).encode("utf-8", "surrogateescape") if mask_paths else b""
        )


def has_mask_folders(root: Path) -> bool:
    """Return whether a folder has images and masks in folders named `images` and `masks` (or another name of
    MASK_FOLDER_NAMES)."""
    return bool(locate_named_masks(root, IMAGE_MASK_READER))


def has_sibling_masks(root: Path) -> bool:
    """Return whether a folder has masks in folders or files with other recognised names. Raises DataError as
    `locate_sibling_masks`."""
    return bool(locate_sibling_masks(root))


def open_masks(
    root: Path,
    split_seed: int = 0,
    reader: ImageMaskReader | None = None,
    class_names: Sequence[str] = (),
    ignore_index: int | None = None,
) -> Data:
    """Open a dataset of images with masks, or of volumes if `reader` is that of volumes. If there is no `val`, a tenth
    of `train` is held out.

    `class_names`: names of the classes if there is no `classes.txt`. `ignore_index`: an index of ignored pixels, in
    addition to 255. A held-out split without masks, or without a labelled pixel, is unlabelled.

    Raises DataError for splits without `train`, images without a mask, masks without an image, colours without a class,
    and unreadable files.
    """
    reader = reader or IMAGE_MASK_READER
    names, palette = read_classes_file(root)
    names = names or list(class_names)
    locations = locate_masks(root, reader)
    held_out = {name: location for name, location in locations.items() if name != "train"}
    unlabelled = {name: list_unmasked_images(location, reader) for name, location in held_out.items()}
    labelled = {name: location for name, location in locations.items() if unlabelled.get(name) is None}
    masks_per_split = {name: list_masks_per_image(location, reader) for name, location in labelled.items()}
    if "train" not in masks_per_split:
        raise DataError(
            f"{escape_unprintable(root)} has {', '.join(masks_per_split)} but no train folder",
            "rename one of them to train",
        )
    maps = is_class_map_folder(root, [has_class_maps for has_class_maps, *_ in masks_per_split.values()])
    masks_by_split = {name: masks for name, (_, _, masks) in masks_per_split.items()}
    if maps:
        map_paths = {name: [files[0] for files in masks] for name, masks in masks_by_split.items()}
        read = partial(read_mask_values, palette=palette, reader=reader)
        classes = read_map_classes(
            root, map_paths, names=names, palette=palette, reader=(reader.axes, read), ignore_index=ignore_index
        )
    else:
        classes = build_object_classes(root, names, masks_by_split)
    names, notes = classes.names, classes.notes
    splits: dict[str, Split] = {}
    for name, (_, images, files) in masks_per_split.items():
        store = MaskAnnotations(
            root,
            images,
            files,
            maps=maps,
            reader=reader,
            count=len(names),
            palette=palette,
            binary=classes.binary,
            threshold=classes.threshold,
            ignore_index=ignore_index,
        )
        labels = mark_present_classes(classes.classes_per_mask[name], len(names))
        if name != "train" and not labels.any():
            labels = create_empty_labels(len(images))
        splits[name] = AnnotatedFiles(images, labels, np.arange(len(images)), store)
    splits |= {
        name: FileSplit(images, create_empty_labels(len(images)))
        for name, images in unlabelled.items()
        if images is not None
    }
    splits, full_train = ensure_val_split(splits, split_seed, notes)
    unsplit, title, error = full_train is not None and "test" not in splits, escape_unprintable(root), classes.error
    return Data(
        title, tuple(names), splits=splits, notes=notes, unsplit=unsplit, full_train_split=full_train, unlearnable=error
    )


def is_class_map_folder(root: Path, are_class_maps: Sequence[bool]) -> bool:
    """Return whether the masks of a dataset are class maps rather than one mask per object. `are_class_maps` has
    one value per split. Raises DataError if the splits differ."""
    if len(set(are_class_maps)) > 1:
        problem = f"{escape_unprintable(root)} has class maps in some splits and object masks in others"
        raise DataError(problem, "use either class maps or object masks in all splits")
    return are_class_maps[0]


def build_object_classes(
    root: Path, names: list[str], masks_by_split: Mapping[str, Sequence[Sequence[Path]]]
) -> MapClasses:
    """Build the classes of a dataset with one mask per object, which has a single class: `names[0]`, or by default
    DEFAULT_OBJECT_CLASS. Raises DataError for several `names`."""
    if len(names) > 1:
        hint = f"delete {CLASSES_FILE}, or use class maps"
        raise DataError(f"{escape_unprintable(root)} has object masks, which do not define classes", hint)
    present = {name: [{0} if files else set[int]() for files in masks] for name, masks in masks_by_split.items()}
    return MapClasses(names or [DEFAULT_OBJECT_CLASS], present, [])


def mark_present_classes(present: Sequence[set[int]], num_classes: int) -> np.ndarray:
    """Convert the class indices in each of n masks to labels (n, num_classes) float32: 1 for each class that a mask
    contains."""
    labels = np.zeros((len(present), num_classes), np.float32)
    for sample_index, indices in enumerate(present):
        labels[sample_index, [index for index in indices if 0 <= index < num_classes]] = 1
    return labels


def list_masks_per_image(location: MaskLocation, reader: ImageMaskReader) -> tuple[bool, list[Path], list[list[Path]]]:
    """List the images of a split and the mask files of each image. Returns whether the masks are class maps, the
    images, and the masks of each image. Raises DataError if images and masks do not match."""
    if location.masks is not None:
        images, masks = pair_images_with_masks(location, reader)
        return True, images, [[mask] for mask in masks]
    images, files = [], []
    for folder in find_object_folders(location.images) if reader.axes == 2 else ():
        folder_images = list_images(folder / "images")
        if len(folder_images) != 1:
            raise DataError(
                f"{escape_unprintable(folder / 'images')} has {len(folder_images)} images, not one",
                "keep a single image",
            )
        images.append(folder_images[0])
        files.append(list_images(folder / "masks"))
    if not images:
        raise DataError(
            f"{escape_unprintable(location.images)} has no images with masks", "move them to images/ and masks/"
        )
    return False, images, files


def list_unmasked_images(location: MaskLocation, reader: ImageMaskReader) -> list[Path] | None:
    """List the images of a split that has no masks at all; None if it has masks."""
    if location.masks is None:
        return None if reader.axes == 2 and find_object_folders(location.images) else reader.files(location.images)
    if location.masks == location.images:
        return None if find_masks_beside_images(location.images) else reader.files(location.images)
    return None if location.masks.is_dir() and reader.files(location.masks) else reader.files(location.images)


def read_mask_values(mask_path: Path, palette: Palette | None, reader: ImageMaskReader) -> np.ndarray:
    """Read the values of a mask: indices (*image), or colours (H, W, C) uint8. If there are class colours (`palette`),
    the palette of the file is compared with them (`apply_class_palette`). Raises DataError."""
    values = reader.mask(mask_path)
    return apply_class_palette(values, mask_path, palette) if palette and values.ndim == 2 else values


def check_mask_size(mask_size: tuple[int, ...], image_size: tuple[int, ...], mask_path: Path, image_path: Path) -> None:
    """Raise DataError if a mask differs in size from its image. Sizes are (height, width) or (depth, height, width)."""
    if mask_size != image_size:
        sizes = [" x ".join(map(str, size[::-1] if len(size) == 2 else size)) for size in (mask_size, image_size)]
        unit = "pixels" if len(image_size) == 2 else "voxels"
        raise DataError(
            (
                f"{escape_unprintable(mask_path)} has {sizes[0]} {unit}, but its image "
                f"{escape_unprintable(image_path)} has {sizes[1]}"
            ),
            "resize one of them",
        )


def strip_image_suffix(path: Path) -> Path:
    """Return the path of an image or mask without its suffix, by which images and masks are matched."""
    return path.with_suffix("")


def ignore_void_pixels(classes: np.ndarray, mask_path: Path, image_path: Path, size: tuple[int, ...]) -> np.ndarray:
    """Return the classes (H, W) of a mask, with IGNORE_INDEX at the invalid pixels (nodata) of its image. Raises
    DataError if the image cannot be read."""
    void = read_void_mask(image_path) if classes.shape == size else None
    return classes if void is None else np.where(void, np.int32(IGNORE_INDEX), classes)


IMAGE_MASK_READER = ImageMaskReader(
    2,
    (("images",), MASK_FOLDER_NAMES),
    files=list_images,
    stem=strip_image_suffix,
    size=read_image_size,
    mask=read_mask,
    align=ignore_void_pixels,
)


def apply_class_palette(values: np.ndarray, mask_path: Path, colours: dict[tuple[int, ...], int]) -> np.ndarray:
    """Convert the indices of a mask to colours if the palette of its file has the class colours at other indices.

    Returns colours (H, W, 3) uint8 in this case, otherwise the indices (H, W) unchanged, as for files without a palette
    and for grey palettes. `colours` maps a colour to its class index. Raises DataError for a palette with colours that
    have no class.
    """
    content = read_input_file(mask_path)
    if content.startswith(NPY_MAGIC):
        return values
    with Image.open(io.BytesIO(content)) as image:
        palette = image.convert("P").getpalette("RGB") if image.mode == "P" else None
    if not palette:
        return values
    table = np.zeros((256, 3), np.uint8)
    table[: len(palette) // 3] = np.array(palette, np.uint8).reshape(-1, 3)
    used_colours = {index: tuple(table[index].tolist()) for index in np.unique(values).tolist()}
    listed_colours = {index: colour for index, colour in used_colours.items() if colour in colours}
    if (
        all(colours[colour] == index for index, colour in listed_colours.items())
        and len(listed_colours) >= len(used_colours) - 1
    ):
        return values  # all indices but that of ignored pixels are class indices
    if len(listed_colours) == len(used_colours):
        return table[values]
    if all(colour == (index,) * 3 for index, colour in used_colours.items()):
        return values
    unlisted = format_first_names(
        (" ".join(map(str, colour)) for colour in used_colours.values() if colour not in colours), 3
    )
    problem = f"{escape_unprintable(mask_path)} has a palette with colours that classes.txt does not list: {unlisted}"
    raise DataError(problem, "add them to classes.txt, or delete all colours there to use the indices")
