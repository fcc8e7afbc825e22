"""Open a dataset by its name or path, and detect its layout."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path

from vitreous.data.annotations.coco import has_class_folders, is_coco, open_coco
from vitreous.data.annotations.coco_captions import is_captions_file, open_coco_captions
from vitreous.data.annotations.labelme import is_labelme, open_labelme
from vitreous.data.annotations.mask_places import list_subfolders
from vitreous.data.annotations.masks import has_mask_folders, has_sibling_masks, open_masks
from vitreous.data.annotations.panoptic import is_panoptic, open_panoptic
from vitreous.data.annotations.unread import find_unused_annotations
from vitreous.data.annotations.voc import is_voc, open_voc
from vitreous.data.annotations.volumes import has_volume_masks, open_volume_masks
from vitreous.data.annotations.yolo import CONFIG_FILES, has_config, is_yolo, open_yolo
from vitreous.data.grouping import split_by_groups
from vitreous.data.layouts.arrow import is_parquet_source, open_hub_data, open_parquet_data
from vitreous.data.layouts.csv_files import find_label_table, open_csv_file
from vitreous.data.layouts.folder import FOLDER_LAYOUT_HINT, iterate_images, list_images, open_image_folder
from vitreous.data.layouts.imagenet import is_imagenet, open_imagenet
from vitreous.data.layouts.lists import has_image_lists, open_image_lists
from vitreous.data.layouts.named import open_digits, open_torchvision
from vitreous.data.layouts.packed import is_pack, open_pack
from vitreous.data.layouts.split_names import find_split_folders
from vitreous.data.layouts.tars import COMPRESSED_SUFFIXES, has_tar_archives, open_webdataset
from vitreous.data.layouts.video import frames_note, has_clips, has_only_clips, open_clip_folder
from vitreous.data.modalities.table import MODALITIES
from vitreous.data.split import Data, FileSplit, create_empty_labels
from vitreous.data.values import with_targets
from vitreous.errors import DataError, UsageError, VitreousError, escape_unprintable, suggest_nearest

MAX_SEARCHED_FOLDERS = 20  # maximum folders to search for a dataset
NAMED_SOURCE_PREFIXES = ("hf:", "torchvision:")

#: annotation layouts: pairs of a function that detects the layout of a folder, and a function that opens it. COCO is
#: tried before mask layouts, since its folders may also have PNG files next to `images`
COCO_LAYOUTS = ((is_panoptic, open_panoptic), (is_coco, open_coco))
MASK_LAYOUTS = ((has_volume_masks, open_volume_masks), (has_mask_folders, open_masks))
OBJECT_LAYOUTS = ((is_voc, open_voc), (is_yolo, open_yolo), (is_labelme, open_labelme))
#: mask layouts with other folder or file names, which may have annotation files next to them
SIBLING_MASK_LAYOUTS = ((has_sibling_masks, open_masks),)


def open_data(
    source: str | os.PathLike[str],
    split_seed: int = 0,
    group_by: str | None = None,
    stills: bool = False,
    axes: int | None = None,
    ignore_index: int | None = None,
    targets: tuple[str, ...] = (),
) -> Data:
    """Open a dataset by name or path.

    Sources:

    - `digits`, `hf:org/name` or `torchvision:CIFAR10`
    - a folder with splits, with classes or with images, a folder of ImageNet, or one with image lists as in VTAB-1k
    - a folder of a YOLO dataset, or its `data.yaml`
    - a CSV file, Parquet files, a JSON file of COCO, or a pack of `vitreous data pack`
    - WebDataset archives: a folder, a file, or a pattern such as `x-{000..127}.tar`

    Options:

    - `split_seed`: seed of the draw that holds out a tenth of the images if the source has no splits
    - `group_by`: groups that are not divided between splits, see `vitreous.data.grouping`
    - `stills`: open a folder of clips and images as clips, with images as clips of one frame, instead of as images
    - `axes`: open ambiguous files of a folder or table as signals (1), images (2) or volumes (3)
    - `ignore_index`: index in class maps that is ignored
    - `targets`: table columns whose values are the labels; a single name if the class names of the data are numbers

    Images without labels, or with a single class, are opened without classes; `require_labels` rejects them.

    Raises DataError for a missing or empty folder, or a class that only a held-out split has; UsageError for an unknown
    name.
    """
    data = open_by_layout(
        os.fspath(source),
        split_seed,
        group_by=group_by,
        stills=stills,
        axes=axes,
        ignore_index=ignore_index,
        targets=targets,
    )
    data = with_targets(data, targets, split_seed)
    return data if group_by is None else split_by_groups(data, group_by, source, split_seed)


def resolve_source(source: str | os.PathLike[str]) -> str:
    """Return a source name that does not depend on the working directory: the absolute path of a source on disk, with
    symbolic links kept; other names are unchanged."""
    name = os.fspath(source)
    return os.path.abspath(name) if is_on_disk(name) else name


def is_on_disk(source: str) -> bool:
    """Return whether a source is a path or a pattern of paths, rather than a name such as `digits` or `hf:org/name`."""
    return source != "digits" and not source.startswith(NAMED_SOURCE_PREFIXES)


def get_public_name(source: str) -> str:
    """Return the name of a source without its parent folders, which may be private: `pets` for `/home/me/pets`."""
    return Path(source).name if is_on_disk(source) else source


def open_run_source(
    run: str | os.PathLike[str],
    source: str,
    split_seed: int = 0,
    group_by: str | None = None,
    stills: bool = False,
    axes: int | None = None,
    ignore_index: int | None = None,
    targets: tuple[str, ...] = (),
) -> Data:
    """Open the dataset that a run was trained on, `source` in its config.yaml, with options and errors of `open_data`.
    Raises DataError, with the way to pass a new location, if it was moved."""
    try:
        return open_data(
            source, split_seed, group_by=group_by, stills=stills, axes=axes, ignore_index=ignore_index, targets=targets
        )
    except DataError as error:
        if not is_on_disk(source) or os.path.lexists(source):
            raise
        hint = f"pass the new location, as in `vitreous evaluate {escape_unprintable(run)} DATA`, or restore the data"
        problem = f"{escape_unprintable(run)} was trained on {escape_unprintable(source)}"
        if not os.path.isabs(source):
            problem += f", a relative path that does not exist in {escape_unprintable(os.getcwd())}"
            raise DataError(problem, f"change to the folder that it is relative to, or {hint}") from None
        parent = next(folder for folder in Path(source).parents if folder.exists())
        problem += f", which no longer exists: the last existing folder of its path is {escape_unprintable(parent)}"
        raise DataError(problem + (f" ({error.message})" if "{" in source else ""), hint) from None


def open_images(source: str | os.PathLike[str], targets: tuple[str, ...] = ()) -> Data | FileSplit:
    """Open the images of a source, labelled or not. A dataset is opened as by `open_data`. If it has neither labels nor
    splits, or the layout is not recognised, every image below the folder is opened as one `FileSplit`. Raises DataError
    if there are no images."""
    try:
        data = open_data(source, targets=targets)
    except DataError:
        paths = list_images(Path(source)) if os.path.isdir(source) else []
        if not paths:
            raise
        return FileSplit(paths, create_empty_labels(len(paths)))
    full_train = data.full_train_split or data.split("train")
    return full_train if data.unsplit and not data.labelled and isinstance(full_train, FileSplit) else data


def check_digits_folder() -> None:
    """Raise UsageError if `digits` is ambiguous: the working directory has a folder of images with this name."""
    folder = Path("digits")
    if not folder.is_dir() or (folder / "config.yaml").exists():  # a folder with config.yaml is a run
        return
    if next(iterate_images(folder), None):
        folder_text = f"a folder of images in {escape_unprintable(os.getcwd())}"
        problem = f"digits is ambiguous: it is both the built-in dataset and {folder_text}"
        raise UsageError(problem, "write ./digits for the folder, or change to another directory for the dataset")


def check_ignore_index(path: Path, ignore_index: int) -> None:
    """Raise UsageError for a negative index, and for data without class map files."""
    if ignore_index < 0:
        raise UsageError(f"--ignore-index {ignore_index} is negative", "use a mask value, such as 100")
    if not path.is_dir() or not any(
        matches_layout(path) for matches_layout, _ in (*MASK_LAYOUTS, *SIBLING_MASK_LAYOUTS)
    ):
        problem = f"--ignore-index needs class maps, but {escape_unprintable(path)} has none"
        raise UsageError(problem, "omit it, or choose a folder with images/ and masks/")


def open_unannotated_folder(path: Path, split_seed: int) -> Data:
    """Open a folder of images as class folders, after no annotation layout matched. If it has no images or no labels,
    the error suggests a dataset inside the folder. Raises DataError as `open_image_folder`."""
    try:
        data = open_image_folder(path, split_seed)
    except DataError as error:
        if error.hint != FOLDER_LAYOUT_HINT or (inner_source := find_inner_source(path)) is None:
            raise
        raise DataError(error.message, f"did you mean {escape_unprintable(inner_source)}?") from None
    if data.labelled:
        unread = find_unused_annotations(path) or find_inner_source(path, annotated=True)
        data = replace(data, unread_annotations=unread and escape_unprintable(unread))
    elif data.unlabelled is not None and (inner_source := find_inner_source(path)) is not None:
        data = replace(
            data, unlabelled=DataError(data.unlabelled.message, f"did you mean {escape_unprintable(inner_source)}?")
        )
    return replace(data, notes=[*data.notes, *frames_note(data)])


def find_inner_source(root: Path, annotated: bool = False) -> Path | None:
    """Return the first dataset in a folder and in its subfolders, up to two levels down, for a suggestion; None if
    there is none. With `annotated`, only annotated datasets count, otherwise class folders and tables of labels too."""
    level = [root]
    for _ in range(3):
        for folder in level:
            if not annotated and (table_file := find_label_table(folder)) is not None:
                return table_file
            if folder != root and (is_annotated(folder) or (not annotated and has_class_layout(folder))):
                return folder
        level = [subfolder for folder in level for subfolder in list_subfolders(folder)[:MAX_SEARCHED_FOLDERS]][
            : MAX_SEARCHED_FOLDERS**2
        ]
    return None


def is_annotated(folder: Path) -> bool:
    """Return whether a folder has images with annotations in a recognised layout, even an invalid one."""
    try:
        return any(
            matches_layout(folder)
            for matches_layout, _ in (*COCO_LAYOUTS, *MASK_LAYOUTS, *OBJECT_LAYOUTS, *SIBLING_MASK_LAYOUTS)
        )
    except DataError:
        return True


def has_class_layout(folder: Path) -> bool:
    """Return whether a folder, or a split folder in it, has at least two folders of images that may be classes."""
    try:
        return any(map(has_class_folders, (folder, *find_split_folders(folder).values())))
    except DataError:
        return False


def open_by_layout(
    name: str,
    split_seed: int,
    group_by: str | None = None,
    stills: bool = False,
    axes: int | None = None,
    ignore_index: int | None = None,
    targets: tuple[str, ...] = (),
) -> Data:
    """Detect the layout of a source and open it. Of `group_by`, only a table column is used; other options are those of
    `open_data`. Raises DataError and UsageError as `open_data`."""
    if ignore_index is not None:
        check_ignore_index(Path(name), ignore_index)
    if name == "digits":
        check_digits_folder()
        return open_digits(split_seed)
    if name.startswith(NAMED_SOURCE_PREFIXES):
        return (
            open_hub_data(name, split_seed, targets) if name.startswith("hf:") else open_torchvision(name, split_seed)
        )
    path = Path(name)
    if path.name in CONFIG_FILES and path.is_file():
        path = path.parent
    if axes not in (None, 1, 2, 3):
        raise UsageError(f"--axes {axes} is not 1, 2 or 3", "use 1 for signals, 2 for images, 3 for volumes")
    requested_modality = next((m for m in MODALITIES.values() if axes is not None and m.array_axes == axes), None)
    if requested_modality is not None and path.is_dir() and not (axes == 3 and has_volume_masks(path)):
        data = requested_modality.open_folder(path, split_seed, is_asked=True)
        if data is not None:
            return data
    if path.is_dir() and is_pack(path):
        return open_pack(path, split_seed)
    if is_parquet_source(name):
        return open_parquet_data(name, split_seed, targets)
    if path.is_dir():
        list_layouts = () if has_config(path) else ((has_image_lists, open_image_lists),)
        clip_layout = (
            (has_clips, partial(open_clip_folder, stills=True)) if stills else (has_only_clips, open_clip_folder)
        )
        mask_layouts, sibling_layouts = (
            tuple((matches_layout, partial(read, ignore_index=ignore_index)) for matches_layout, read in layouts)
            for layouts in (MASK_LAYOUTS, SIBLING_MASK_LAYOUTS)
        )
        layouts = (
            (has_tar_archives, open_webdataset),
            *list_layouts,
            (is_imagenet, open_imagenet),
            *COCO_LAYOUTS,
            *mask_layouts,
            *OBJECT_LAYOUTS,
            *sibling_layouts,
            clip_layout,
        )
        if reader := next((read for matches_layout, read in layouts if matches_layout(path)), None):
            return reader(path, split_seed)
        opened_data = (modality.open_folder(path, split_seed) for modality in MODALITIES.values() if axes is None)
        return next((data for data in opened_data if data is not None), None) or open_unannotated_folder(
            path, split_seed
        )
    if path.name.lower().endswith((".tar", *COMPRESSED_SUFFIXES)) and (os.path.lexists(path) or "{" in name):
        return open_webdataset(path, split_seed)
    if path.suffix.lower() == ".json" and path.is_file():
        if is_captions_file(path):
            return open_coco_captions(path, split_seed)
        return (open_panoptic if is_panoptic(path) else open_coco)(path, split_seed)
    if path.suffix.lower() == ".csv" and os.path.lexists(path):
        return open_csv_file(path, split_seed, group_by, axes, targets)
    raise make_source_error(path)


def make_source_error(path: Path) -> VitreousError:
    """Make the error for a source that no layout matches: a file of another type, or a name that does not exist."""
    name = str(path)
    if path.suffix.lower() in (".yaml", ".yml") and path.is_file():
        hint = f"rename the description of a YOLO dataset to {CONFIG_FILES[0]}"
        return DataError(f"{escape_unprintable(path)} is not a dataset", hint)
    if path.exists():
        return DataError(f"{escape_unprintable(path)} is a file, not a dataset", FOLDER_LAYOUT_HINT)
    if "/" not in name and os.sep not in name and suggest_nearest(name, ["digits"]):
        return DataError(f"no folder or dataset named {escape_unprintable(name)}", suggest_nearest(name, ["digits"]))
    if ":" in name:
        return UsageError(f"data source {name} is not supported yet", FOLDER_LAYOUT_HINT)
    kind = "file" if path.suffix.lower() == ".csv" else "folder"
    return DataError(f"no such {kind}: {escape_unprintable(path)}", FOLDER_LAYOUT_HINT)
