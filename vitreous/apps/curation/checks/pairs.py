"""Checks of image-text pairs: numbers of pairs and captions, lengths, and repeated captions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from vitreous.data.pairs import PairSplit
from vitreous.data.split import Split
from vitreous.errors import escape_unprintable

MAX_LISTED_CAPTIONS = 20  # maximum listed repeated captions
REPEATED_SHARE = 0.05  # share of pairs with a repeated caption above which it is reported


def summarise_pairs(splits: Mapping[str, Split]) -> dict[str, Any] | None:
    """Summarise the captions of all splits for the document; None for other data.

    `repeated` counts pairs whose caption belongs to another image too, and `repeated_captions` lists the most frequent
    ones. `words` and `captions_per_image` have `min`, `median` and `max`. Pairs without a caption are not part of the
    splits.
    """
    pair_splits = [split for split in splits.values() if isinstance(split, PairSplit)]
    if len(pair_splits) < len(splits):
        return None
    captions = [caption for split in pair_splits for caption in split.captions()]
    images_by_caption: dict[str, set[int]] = {}
    image_indices = np.concatenate([split.image_indices for split in pair_splits]).tolist()
    for caption, image in zip(captions, image_indices, strict=True):
        images_by_caption.setdefault(caption, set()).add(image)
    repeated = {caption for caption, images in images_by_caption.items() if len(images) > 1}
    counts = Counter(caption for caption in captions if caption in repeated)
    return {
        "pairs": len(captions),
        "images": len(set(image_indices)),
        "captions": len(images_by_caption),
        "captions_per_image": summarise_counts(list(Counter(image_indices).values())),
        "words": summarise_counts([len(caption.split()) for caption in captions]),
        "repeated": sum(counts.values()),
        "repeated_captions": [
            {"caption": escape_unprintable(caption), "pairs": count}
            for caption, count in counts.most_common(MAX_LISTED_CAPTIONS)
        ],
    }


def summarise_counts(values: list[int]) -> dict[str, float]:
    """Return minimum, median and maximum of numbers."""
    return {"min": min(values), "median": float(np.median(values)), "max": max(values)}


def keep_images_of_pairs(splits: dict[str, Split]) -> dict[str, Split]:
    """Return splits in which every image of image-text pairs occurs once; other splits are returned unchanged."""
    return {
        name: split.table.images.take(np.unique(split.image_indices)) if isinstance(split, PairSplit) else split
        for name, split in splits.items()
    }


def report_repeated_captions(document: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """Yield the finding that many pairs have a caption of another image, as (level, code, message, hint)."""
    pairs = document["pairs"]
    if not pairs or pairs["repeated"] <= REPEATED_SHARE * pairs["pairs"]:
        return
    most_frequent = pairs["repeated_captions"][0]
    text = f"{pairs['repeated']:,} of {pairs['pairs']:,} pairs have a caption of another image; the most frequent: "
    text += f"{most_frequent['caption']!r} ({most_frequent['pairs']:,} pairs)"
    yield "warning", "repeated_captions", text, "contrastive losses separate an image from equal captions of others"


def describe_pairs(pairs: dict[str, Any]) -> str:
    """Format the summary of pairs for the terminal."""
    words, per_image = pairs["words"], pairs["captions_per_image"]
    return (
        f"{pairs['pairs']:,} pairs of {pairs['images']:,} images and {pairs['captions']:,} different captions; "
        f"{per_image['min']:g} to {per_image['max']:g} captions per image; "
        f"{words['min']:g} to {words['max']:g} words, median {words['median']:g}"
    )
