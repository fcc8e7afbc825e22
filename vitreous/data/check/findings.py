"""What the facts mean for training, in sentences, each with the command that helps."""

from __future__ import annotations

import shlex
from typing import Any

from vitreous.errors import first_names

SHOWN = 20  # names in a sentence's list
# of the model's input: images up to this side gain by a smaller input; from 28 to 32 pixels is rounding to patches
SMALLER = 0.75
UNEVEN = 10.0  # times that the largest class is larger than the smallest, from which it is told
FAILS, WARNS, TELLS = "fails", "warns", "tells"

Finding = dict[str, str]


def findings(facts: dict[str, Any]) -> list[Finding]:
    """Findings in the order of their weight: what fails the check, what to look at, and what the loader does by itself.

    The check fails on what no run takes or what makes its figures untrue: a layout that is none, unreadable images, the
    same image in two splits or under two labels, groups in two splits.
    """
    source = shlex.quote(facts["data"])
    results = [*failures(facts, source), *shares(facts, source), *classes(facts, source), *pictures(facts, source)]
    return [finding for level in (FAILS, WARNS, TELLS) for finding in results if finding["level"] == level]


def finding(level: str, kind: str, text: str, hint: str = "") -> Finding:
    """One finding: how grave, a word for programs, a sentence, and the way out."""
    return {"level": level, "what": kind, "text": text, "way": hint}


def images(count: int) -> str:
    """`1 image`, `1,234 images`."""
    return f"{count:,} image" + ("" if count == 1 else "s")


def failures(facts: dict[str, Any], source: str) -> list[Finding]:
    """What hinders training."""
    results = []
    if facts["refused"]:
        results.append(finding(FAILS, "refused", facts["refused"]["message"], facts["refused"]["hint"]))
    if facts["unlabelled"]:
        results.append(finding(WARNS, "unlabelled", facts["unlabelled"]["message"], facts["unlabelled"]["hint"]))
    if bad := len(facts["unreadable"]):
        total = sum(split["images"] for split in facts["splits"].values())
        hint = f"mend or remove them, or `vitreous train {source} --bad-images skip`"
        results.append(finding(FAILS, "unreadable", f"{bad:,} of {images(total)} cannot be read", hint))
    for pair, count in facts["copies"]["across"].items():
        one, other = pair.split("/")
        hint = f"`vitreous data dedup {source} --against {source} --against-split {other} --out copies.csv` lists them"
        results.append(finding(FAILS, "leak", f"{images(count)} of {other} are in {one} too, byte for byte", hint))
    if count := facts["copies"]["contrary"]:
        results.append(
            finding(
                FAILS,
                "contrary",
                f"{images(count)} found under two labels",
                "keep one of them, or one image with both labels in a table",
            )
        )
    for row in facts["groups"]["parted"]:
        where = " and in ".join(row["splits"]) or "more than one split"
        names = f" ({', '.join(row['names'][:5])}{', …' if len(row['names']) > 5 else ''})" if row["names"] else ""
        level = FAILS if facts["groups"]["by"] else WARNS
        results.append(
            finding(level, "groups", f"{row['groups']:,} groups are in {where}{names}", "move each to one of them")
        )
    return results


def shares(facts: dict[str, Any], source: str) -> list[Finding]:
    """Copies that are no failure: near ones, and those within a split."""
    results, near = [], facts["near_copies"]
    for pair, count in near["across"].items():
        one, other = pair.split("/")
        command = f"vitreous data dedup {source} --against {source} --against-split {other} --out copies.csv"
        hint = f"look at them; `{command}` lists them, and compares parts of images too"
        results.append(finding(WARNS, "near_leak", f"{images(count)} of {other} look like one of {one}", hint))
    if near["contrary"]:
        results.append(
            finding(
                WARNS,
                "near_contrary",
                f"{near['contrary']:,} groups of images that look alike have two labels",
                "look at them",
            )
        )
    within = {"repeat another": facts["copies"]["extra"], "look like another": near["extra"]}
    if any(within.values()):
        hint = (
            f"`vitreous data dedup {source} --within --out copies.csv`; frames of one scene are kept together by "
            "--group-by"
        )
        text = ", ".join(f"{images(count)} {kind}" for kind, count in within.items() if count)
        text += " (only whole images were compared; the command below compares parts too)" if near["extra"] else ""
        results.append(finding(TELLS, "copies", text, hint))
    return results


def classes(facts: dict[str, Any], source: str) -> list[Finding]:
    """How the images spread over the classes."""
    spread, results = facts["balance"], []
    if spread is None:
        return []
    if spread["largest"] >= UNEVEN * max(spread["smallest"], 1):
        text = (
            f"the largest class has {spread['largest']:,} images, the smallest {spread['smallest']:,}; as hard to "
            "tell apart as"
        )
        text += f" {spread['effective']:.1f} even classes of {len(facts['classes'])}"
        results.append(
            finding(
                WARNS, "imbalance", text, f"`vitreous train {source} --sampling balanced`, or --class-weights balanced"
            )
        )
    if few := spread["few"]:
        results.append(
            finding(
                WARNS,
                "few",
                f"{len(few):,} classes have fewer than 10 images: {first_names(list(few))}",
                "find more, or join classes",
            )
        )
    for name, missing in spread["missing"].items():
        results.append(
            finding(
                WARNS,
                "missing",
                f"{name} has no image of {len(missing):,} classes: {first_names(missing)}",
                "their figures will be unknown",
            )
        )
    return results


def pictures(facts: dict[str, Any], source: str) -> list[Finding]:
    """What the images are like, and what the loader does with them."""
    traits, size, results = facts["traits"], facts["sizes"], []
    deep, found_kinds = facts["depths"].get("16", 0), facts["modes"]
    if traits["one_colour"]:
        results.append(
            finding(
                WARNS,
                "one_colour",
                f"{images(traits['one_colour'])} of one colour",
                "are they broken, or placeholders?",
            )
        )
    if outside := facts["left_out"].get("images", 0):
        results.append(
            finding(
                WARNS,
                "outside",
                f"{images(outside)} in the folder belong to no split or class and are left out",
                "move them",
            )
        )
    notes = (
        ("misnamed", traits["misnamed"], "named as another format; the content decides"),
        ("turned", traits["turned"], "turned by EXIF; they are loaded upright"),
        ("alpha", traits["alpha"], "with transparency; they are laid over white"),
        ("animated", traits["animated"], "with several frames; the first is taken"),
        ("cmyk", found_kinds.get("CMYK", 0), "in CMYK; they become RGB"),
        ("deep", deep, "of 16 bits; they are scaled to 8"),
    )
    results += [finding(TELLS, kind, f"{images(count)} {text}") for kind, count, text in notes if count]
    if others := sum(count for name, count in facts["left_out"].items() if name != "images"):
        ends = first_names([name for name in facts["left_out"] if name != "images"])
        results.append(
            finding(TELLS, "others", f"{others:,} files are no images by their names and are left out: {ends}")
        )
    if (
        size
        and size["smaller"] > 0.5
        and min(size["width"]["median"], size["height"]["median"]) <= SMALLER * size["input"]
    ):
        text = (
            f"{size['smaller']:.0%} of the images are smaller than the model's {size['input']} pixels and are enlarged"
        )
        results.append(finding(TELLS, "small", text, "a smaller --image-size costs less and loses nothing"))
    if size and size["twice"] > 0.5:
        text = (
            f"{size['twice']:.0%} of the images have twice the model's {size['input']} pixels: most of the "
            "decoding "
            "is for nothing"
        )
        results.append(
            finding(TELLS, "large", text, f"`vitreous data pack {source} --out PACKED` once, then train on that")
        )
    return results
