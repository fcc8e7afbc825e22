"""Parse the names of image and mask folders and files, to find masks and match them with images.

The role of a folder or file is to contain images or masks. The key of a file is its name without the words for its
role: `x_leftImg8bit.png` and `x_gtFine_labelIds.png` have the key `x`; `mask_001.png` and `image001.jpg` have the key
`001`.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from vitreous.data.layouts.file_names import normalise_name
from vitreous.data.layouts.split_names import SPLIT_OF_NAME

FileRole = Literal["images", "masks"]
IMAGE_WORDS = frozenset(["image", "images", "img", "imgs", "jpegimages", "leftimgbit", "input", "inputs", "rgb"])
MASK_WORDS = frozenset(
    ["mask", "masks", "label", "labels", "annotation", "annotations", "annot", "annots", "gt", "groundtruth"]
    + ["gtfine", "gtcoarse", "seg", "segmentation", "segmentations", "segmentationclass", "labelids"]
)
#: words in names of mask files; if an image has several masks, that of the first word is preferred
MASK_VARIANTS = ("labeltrainids", "trainids", "labelids")
MASK_STEM_WORDS = MASK_WORDS | {*MASK_VARIANTS, "instanceids", "color", "colour", "colors", "truth", "ground", "l"}
IMAGE_STEM_WORDS = IMAGE_WORDS | {"im", "sat", "photo"}
CITYSCAPES_IMAGE_WORD = re.compile("leftimg8bit")  # Cityscapes' word for images, whose digit is not a separate number
WORD_PATTERN = re.compile(r"[^\W\d_]+|\d+")


class FolderRole(NamedTuple):
    """The split in the name of a folder, and the role in it, images or masks; each is None if the name has none."""

    split: str | None
    role: FileRole | None


def parse_folder_role(name: str) -> FolderRole:
    """Parse the split and the role in the name of a folder. `trainannot`, `train_masks` and `masks-train` are folders
    of masks, `train` and `train_images` are folders of images, and `post_fire` has no role."""
    text = "".join(split_name_words(name, years=False))
    for split_word in sorted(SPLIT_OF_NAME, key=len, reverse=True):
        for role_word in {text.removeprefix(split_word), text.removesuffix(split_word)} - {text}:
            if not role_word or role_word in IMAGE_WORDS:
                return FolderRole(SPLIT_OF_NAME[split_word], "images")
            if role_word in MASK_WORDS:
                return FolderRole(SPLIT_OF_NAME[split_word], "masks")
    return FolderRole(None, "images" if text in IMAGE_WORDS else "masks" if text in MASK_WORDS else None)


def split_name_words(name: str, years: bool = True) -> list[str]:
    """Split a name into its words and numbers, in lower case. Unless `years`, years at the end are dropped."""
    words = WORD_PATTERN.findall(CITYSCAPES_IMAGE_WORD.sub("leftimgbit", normalise_name(name).casefold()))
    while not years and len(words) > 1 and re.fullmatch(r"(19|20)\d\d", words[-1]):
        words.pop()
    return words


class FileKey(NamedTuple):
    """The key of a file (its name as words and numbers, without role words), and the removed role words."""

    key: tuple[str, ...]
    words: tuple[str, ...]

    @property
    def variant(self) -> int:
        """The rank of the mask variant of a file: the index of its role word in `MASK_VARIANTS`, or their number if it
        has none of them."""
        return next((rank for rank, word in enumerate(MASK_VARIANTS) if word in self.words), len(MASK_VARIANTS))


def parse_file_key(stem: str, role: FileRole, folder: str = "") -> FileKey:
    """Parse the key of a file from its stem. Role words, and the name of the `folder`, are removed at both ends; from
    the names of masks, words for images are removed too."""
    names = IMAGE_STEM_WORDS | (MASK_STEM_WORDS if role == "masks" else frozenset())
    words, folder_words, role_words = split_name_words(stem), split_name_words(folder), list[str]()
    for length in (len(folder_words),) if folder_words else ():
        if len(words) > length and words[-length:] == folder_words:
            words, role_words = words[:-length], words[-length:]
        elif len(words) > length and words[:length] == folder_words:
            words, role_words = words[length:], words[:length]
    while len(words) > 1 and words[-1] in names:
        role_words.append(words.pop())
    while len(words) > 1 and words[0] in names:
        role_words.append(words.pop(0))
    return FileKey(tuple(words), tuple(role_words))
