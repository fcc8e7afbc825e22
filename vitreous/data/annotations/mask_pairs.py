"""Match the images of a split with their masks by file paths or by the keys of file names (see `mask_names`), never by
order. A stem is a path below the folder of images or masks, without suffix."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from vitreous.data.annotations.mask_names import FileKey, parse_file_key
from vitreous.data.annotations.mask_places import ImageMaskReader, MaskLocation, is_mask_stem
from vitreous.data.layouts.file_names import count_shared_end_parts, normalise_name
from vitreous.errors import DataError, escape_unprintable, format_first_names

NAMING_HINT = "name the mask of a.jpg a.png, or a_mask.png"


def pair_images_with_masks(location: MaskLocation, reader: ImageMaskReader) -> tuple[list[Path], list[Path]]:
    """Return the images of a split, and the mask of each image in the same order. Raises DataError for an image without
    a mask, a mask without an image, and ambiguous names."""
    assert location.masks is not None, "the caller requires class maps"
    if location.masks == location.images:
        all_files = list_files_by_stem(location.images, reader)
        images = {stem: path for stem, path in all_files.items() if not is_mask_stem(os.path.basename(stem))}
        masks = {stem: path for stem, path in all_files.items() if stem not in images}
    else:
        images, masks = list_files_by_stem(location.images, reader), list_files_by_stem(location.masks, reader)
    if images and masks and not images.keys() & masks.keys():
        return list(images.values()), match_masks_by_key(images, masks, location)
    check_unpaired_files(images, masks, lambda stem: stem)
    return list(images.values()), [masks[stem] for stem in images]


def match_masks_by_key(images: dict[str, Path], masks: dict[str, Path], location: MaskLocation) -> list[Path]:
    """Return the mask of each image, in the order of `images`. `images` and `masks` map stems to files.

    A mask matches an image with the same key. If several match, that whose folder path ends most like that of the image
    is chosen, then the first of `MASK_VARIANTS`. Raises DataError as `pair_images_with_masks`.
    """
    assert location.masks is not None, "the caller requires class maps"
    mixed = location.masks == location.images
    folder_names = ("", "") if mixed else (location.images.name, location.masks.name)
    image_keys = {stem: parse_file_key(os.path.basename(stem), "images", folder_names[0]) for stem in images}
    keys = {stem: parse_file_key(os.path.basename(stem), "masks", folder_names[1]) for stem in masks}
    check_unpaired_files(images, masks, lambda stem: (image_keys.get(stem) or keys[stem]).key)
    by_key: dict[tuple[str, ...], list[str]] = {}
    for stem, key in keys.items():
        by_key.setdefault(key.key, []).append(stem)
    image_by_mask: dict[Path, Path] = {}
    for stem, image in images.items():
        best = select_best_masks(stem, by_key[image_keys[stem].key], keys)
        if len(best) > 1:
            names = format_first_names([os.fspath(masks[mask_stem]) for mask_stem in best], 3)
            raise DataError(f"{escape_unprintable(image)} matches {len(best)} masks: {names}", NAMING_HINT)
        mask = masks[best[0]]
        if (other_image := image_by_mask.setdefault(mask, image)) != image:
            problem = (
                f"{escape_unprintable(mask)} matches 2 images, {escape_unprintable(other_image)} "
                f"and {escape_unprintable(image)}"
            )
            raise DataError(problem, NAMING_HINT)
    check_unused_masks(by_key, masks, set(image_by_mask), keys)
    return list(image_by_mask)


def select_best_masks(stem: str, candidates: list[str], keys: dict[str, FileKey]) -> list[str]:
    """Select the best matches among `candidates`, the stems of masks with the key of the image `stem`.

    These are the masks whose folder path shares the longest end with that of the image. If there are several, those
    with the first variant of `MASK_VARIANTS` are selected.
    """
    folders = os.path.dirname(stem).split("/")
    shared = {
        candidate: count_shared_end_parts(tuple(os.path.dirname(candidate).split("/")), tuple(folders))
        for candidate in candidates
    }
    best = [candidate for candidate in candidates if shared[candidate] == max(shared.values())]
    best_variant = min(keys[candidate].variant for candidate in best)
    return [candidate for candidate in best if keys[candidate].variant == best_variant]


def check_unused_masks(
    by_key: dict[tuple[str, ...], list[str]], masks: dict[str, Path], used: set[Path], keys: dict[str, FileKey]
) -> None:
    """Raise DataError for a mask that no image uses, unless it is another variant of a used mask in the same folder."""
    for stems in by_key.values():
        folders = {(os.path.dirname(stem)) for stem in stems if masks[stem] in used}
        unused = [stem for stem in stems if masks[stem] not in used and os.path.dirname(stem) not in folders]
        if unused:
            raise DataError(f"{escape_unprintable(masks[unused[0]])} has no image", NAMING_HINT)


def check_unpaired_files(images: dict[str, Path], masks: dict[str, Path], key: Callable[[str], object]) -> None:
    """Raise DataError for images without a mask, and for masks without an image. `key` maps a stem to the value by
    which images and masks are compared."""
    for files, other_files, noun, other_noun in ((images, masks, "images", "mask"), (masks, images, "masks", "image")):
        other_keys = {key(stem) for stem in other_files}
        if missing := [path for stem, path in files.items() if key(stem) not in other_keys]:
            problem = f"{len(missing)} of {len(files)} {noun} have no {other_noun}"
            raise DataError(f"{problem}; the first is {escape_unprintable(missing[0])}", NAMING_HINT)


def list_files_by_stem(folder: Path, reader: ImageMaskReader) -> dict[str, Path]:
    """Return {stem: file} of the images or masks below a folder; empty if there is no such folder. Raises DataError for
    two files with the same stem."""
    files: dict[str, Path] = {}
    for path in reader.files(folder) if folder.is_dir() else ():
        other_path = files.setdefault(normalise_name(os.fspath(reader.stem(path).relative_to(folder))), path)
        if other_path != path:
            problem = (
                f"{escape_unprintable(other_path)} and {escape_unprintable(path)} differ only in suffix or Unicode form"
            )
            raise DataError(problem, "delete one of them: images and masks are matched by name")
    return files
