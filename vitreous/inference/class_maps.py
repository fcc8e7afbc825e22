"""Semantic segmentation in `predict`: class maps of images, and their output files.

K classes, H and W pixels of an image at its native size; a volume has D slices.
"""

from __future__ import annotations

import gzip
import io
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from vitreous.data.annotations.drawing import (
    class_map_to_image,
    create_class_colours,
    encode_png,
    overlay_class_map,
    tile_middle_planes,
)
from vitreous.data.annotations.target import IGNORE_INDEX
from vitreous.data.decoding.spectral import DecodedSample, get_void_mask
from vitreous.data.decoding.tiff import encode_geotiff, read_georeference
from vitreous.data.decoding.volumes import read_nifti_header, strip_volume_suffix
from vitreous.data.modalities.base import Preprocess
from vitreous.errors import DataError, UsageError, escape_unprintable
from vitreous.inference.card import Card
from vitreous.inference.pipeline import run_pipeline
from vitreous.inference.sources import Item
from vitreous.system.disk import atomic_path
from vitreous.tasks.tiles import predict_class_map, to_native_array

if TYPE_CHECKING:
    from vitreous.inference.engine import Engine

MAPS_FILE = "maps.jsonl"  # in an output folder: one line per image


@dataclass(frozen=True, eq=False)
class ClassMap:
    """The predicted class map of an image, or the error if it could not be read.

    `classes` (H, W) or (D, H, W) int32 are indices in `names`; pixels without data in the image are IGNORE.
    `class_shares`: class name -> share of the pixels, for classes with any pixels, largest first. `image`: the RGB
    image, or the middle planes of a volume, if requested. `header`: nibabel's header of a NIfTI volume, or the
    georeference tags of a GeoTIFF. `file` and `overlay`: the paths of the output files.
    """

    path: str
    names: tuple[str, ...] = ()
    classes: np.ndarray | None = None
    image: Image.Image | None = None
    _: KW_ONLY
    class_shares: dict[str, float] = field(default_factory=dict[str, float])
    error: str | None = None
    file: str | None = None
    overlay: str | None = None
    header: Any = None

    def draw_overlay(self) -> Image.Image:
        """Draw the classes over the image in colours. Raises UsageError if the image was not kept."""
        if self.classes is None or self.image is None:
            raise UsageError(
                f"{self.path}: the image was not kept, so the classes cannot be drawn over it",
                "use segment(…, keep_images=True)",
            )
        classes = tile_middle_planes(self.classes, IGNORE_INDEX) if self.classes.ndim == 3 else self.classes
        return overlay_class_map(self.image, classes, create_class_colours(self.names))


def iterate_class_maps(
    card: Card, engine: Engine, items: Iterable[Item], bad_images: str, keep_images: bool
) -> Iterator[ClassMap]:
    """Yield the class maps of items in order, with at most a few images in memory; `keep_images` keeps each image in
    its result. Raises UsageError for a model without per-pixel classes, DataError for an unreadable image if
    `bad_images` is stop."""
    names, preprocess = card.task.classes, card.preprocess
    card.task.require_endpoint("segment", f"{card.name} {card.task.verb_phrase} and has no per-pixel classes")

    void_masks: dict[int, np.ndarray] = {}  # pixels without data: id() of an item -> mask, until the item is computed

    def decode(item: Item) -> np.ndarray | DataError:
        """Decode an item to pixels at its native size, and store its mask of pixels without data; return the error if
        it fails."""
        try:
            decoded = decode_item(preprocess, item)
        except DataError as error:
            return error
        if (void_mask := get_void_mask(decoded)) is not None:
            void_masks[id(item)] = void_mask
        return to_native_array(decoded)

    def compute(batch: np.ndarray) -> np.ndarray:
        """Compute the class map of a batch of one image."""
        return predict_class_map(engine.logits, batch[0], preprocess.image)[None]

    for chunk in run_pipeline(items, decode, compute, 1):
        for item, class_map in chunk:
            if isinstance(class_map, DataError):
                if bad_images == "stop":
                    raise class_map
                yield ClassMap(item.name, error=class_map.message)
            else:
                if (void_mask := void_masks.pop(id(item), None)) is not None:
                    class_map[void_mask] = IGNORE_INDEX
                image = pixels_to_rgb(decode_native_pixels(preprocess, item)) if keep_images else None
                yield ClassMap(
                    item.name,
                    names,
                    class_map,
                    image,
                    class_shares=class_pixel_shares(class_map, names),
                    header=read_spatial_reference(item, class_map.ndim),
                )


def read_spatial_reference(item: Item, axes: int) -> Any:
    """Read the spatial reference of an item's image: nibabel's header if it has three `axes` (a volume), or the
    georeference of a GeoTIFF; None for other images."""
    if item.pixels is not None:
        return None
    return read_nifti_header(item.content()) if axes == 3 else read_georeference(item.content())


def class_pixel_shares(classes: np.ndarray, names: tuple[str, ...]) -> dict[str, float]:
    """Compute the share of pixels of each class in a class map (H, W) or (D, H, W), without IGNORE pixels. Returns
    class name -> share, for classes with any pixels, largest first."""
    known_classes = classes[classes != IGNORE_INDEX]
    counts = np.bincount(known_classes, minlength=len(names))
    return {names[k]: int(counts[k]) / known_classes.size for k in np.argsort(-counts, kind="stable") if counts[k]}


def decode_native_pixels(preprocess: Preprocess, item: Item) -> np.ndarray:
    """Decode an item to (C, H, W) pixels or (C, D, H, W) voxels at its native size. Raises DataError, which names the
    item."""
    return to_native_array(decode_item(preprocess, item))


def decode_item(preprocess: Preprocess, item: Item) -> DecodedSample:
    """Decode an item at its native size. Raises DataError, which names the item."""
    content = item.content() if item.pixels is None else item.pixels()
    name = None if isinstance(content, str) else escape_unprintable(item.name)
    return preprocess.decode(content, name)


def pixels_to_rgb(pixels: np.ndarray) -> Image.Image:
    """Convert (C, H, W) pixels, or the middle planes of (C, D, H, W) voxels, to an RGB image. It shows the first three
    channels, or the first as grey, contrast-stretched unless they have 8 bits."""
    pixels = tile_middle_planes(pixels, pixels.min()) if pixels.ndim == 4 else pixels
    bands = (pixels[:3] if len(pixels) >= 3 else np.repeat(pixels[:1], 3, 0)).transpose(1, 2, 0)
    if bands.dtype != np.uint8:
        low, high = float(bands.min()), float(bands.max())
        bands = np.clip((bands - low) / max(high - low, 1e-9) * 255, 0, 255).astype(np.uint8)
    return Image.fromarray(np.ascontiguousarray(bands))


class OutputFileNames:
    """Names of output files, derived from the images' paths relative to `root`, their common folder."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.used_paths: set[Path] = set()

    def get_output_path(self, name: str, suffix: str = ".png") -> Path:
        """Return an unused output path for an image, relative to the output folder. It is the image's path below `root`
        with the given suffix. If that is used already, the image's suffix is kept as well."""
        path = Path(os.path.relpath(name, self.root) if self.root else name)
        relative_path = Path(*(segment for segment in path.parts if segment not in ("..", path.anchor)))
        stem = strip_volume_suffix(relative_path)
        preferred = stem.with_name(stem.name + suffix)
        output_path = (
            preferred if preferred not in self.used_paths else relative_path.with_name(relative_path.name + suffix)
        )
        self.used_paths.add(output_path)
        return output_path


class MapFiles:
    """Output files of `predict` for segmentation: the class map `FOLDER/NAME.png` of each image, and
    `FOLDER/maps.jsonl`.

    Pixels are class indices with a colour palette, in the format that `train` reads. Maps of GeoTIFF files are
    `NAME.tif` with their georeference. Maps of volumes are `NAME.nii.gz` with the affine of the image if that is NIfTI,
    else `NAME.npy`. `overlays` is a folder for images with the classes drawn over them. Names are relative to `root`,
    the common folder of the images.
    """

    formats: tuple[str, ...] = (".jsonl",)
    rows_per_chunk = 1

    def __init__(self, folder: str, root: str, classes: tuple[str, ...], overlays: str | None = None) -> None:
        self.folder, self.overlays = Path(folder), None if overlays is None else Path(overlays)
        self.colours, self.names = create_class_colours(classes), OutputFileNames(root)

    @property
    def index(self) -> str:
        """Path of `maps.jsonl`, which has one line per image."""
        return os.fspath(self.folder / MAPS_FILE)

    def resume(self) -> None:
        """Reserve the names of the files that an earlier, unfinished run wrote."""
        lines = Path(self.index).read_text("utf-8").splitlines() if Path(self.index).is_file() else []
        for text in lines:
            try:
                self.names.used_paths.add(Path(json.loads(text)["file"]).relative_to(self.folder))
            except (ValueError, KeyError, TypeError):  # a truncated line, or an unreadable image
                continue

    def write(self, predictions: Sequence[ClassMap]) -> list[ClassMap]:
        """Write the files of predictions; return the predictions without pixels, with the files' paths. Raises
        OSError."""
        return [self.write_one(prediction) for prediction in predictions]

    def write_one(self, prediction: ClassMap) -> ClassMap:
        """Write the files of one prediction; return it without pixels, with the files' paths. Raises OSError."""
        if prediction.classes is None:
            return prediction
        is_volume, overlay = prediction.classes.ndim == 3, None
        image_suffix, volume_suffix = (".png", ".npy") if prediction.header is None else (".tif", ".nii.gz")
        relative_path = self.names.get_output_path(prediction.path, volume_suffix if is_volume else image_suffix)
        if is_volume:
            save_file(encode_volume(prediction.classes, prediction.header), self.folder / relative_path)
        else:
            image = class_map_to_image(prediction.classes, self.colours)
            content = encode_png(image) if prediction.header is None else encode_geotiff(image, prediction.header)
            save_file(content, self.folder / relative_path)
        if self.overlays is not None:
            overlay_path = self.overlays / (
                relative_path.with_name(relative_path.name + ".png") if is_volume else relative_path.with_suffix(".png")
            )
            save_png(prediction.draw_overlay(), overlay_path)
            overlay = os.fspath(overlay_path)
        file = os.fspath(self.folder / relative_path)
        return replace(prediction, classes=None, image=None, header=None, file=file, overlay=overlay)

    def to_dict(self, prediction: ClassMap) -> dict[str, Any]:
        """Return the line of maps.jsonl for an image: its path, map file, share of the pixels of each class, and
        error."""
        overlay_fields = {"overlay": prediction.overlay} if self.overlays is not None else {}
        return {
            "path": prediction.path,
            "file": prediction.file,
            **overlay_fields,
            "class_shares": prediction.class_shares,
            "error": prediction.error,
        }


def encode_volume(classes: np.ndarray, header: Any) -> bytes:
    """Encode a class map (D, H, W) as .npy or, with nibabel's `header` of its image, as .nii.gz with the affine of the
    image."""
    voxels, file = classes.astype(np.uint8 if classes.max(initial=0) < 256 else np.uint16), io.BytesIO()
    if header is None:
        np.save(file, voxels)
        return file.getvalue()
    import nibabel

    image_class: Any = nibabel.Nifti2Image if header.sizeof_hdr == 540 else nibabel.Nifti1Image
    header.set_data_dtype(voxels.dtype)
    header.set_slope_inter(1, 0)
    header["cal_min"] = header["cal_max"] = 0
    image = image_class(voxels, header.get_best_affine(), header)
    return gzip.compress(image.to_bytes(), 6, mtime=0)


def save_png(image: Image.Image, path: Path) -> None:
    """Write an image as PNG, atomically. Raises OSError."""
    save_file(encode_png(image), path)


def save_file(content: bytes, path: Path) -> None:
    """Write a file atomically. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as temporary:
        temporary.write_bytes(content)


def find_common_root(sources: Sequence[str]) -> str:
    """Return the common folder of the source arguments: a folder counts itself, a file or pattern its parent. Returns
    "" if an argument is a list or stdin, whose names are kept unchanged."""
    folders: list[str] = []
    for source in sources:
        if source == "-" or source.startswith("@"):
            return ""
        folder = source
        while any(wildcard in folder for wildcard in "*?[{"):
            folder = os.path.dirname(folder)
        folders.append(os.path.abspath(folder if os.path.isdir(folder) else os.path.dirname(folder)))
    return os.path.commonpath(folders) if folders else ""
