"""Prompts of zero-shot classification: templates that make a text of a label, and lists of labels.

Does not import NumPy or PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vitreous.errors import UsageError, suggest_nearest

PLACEHOLDER = "{}"  # position of the label in a template
#: templates of CLIP's authors for ImageNet (arXiv:2103.00020, section 3.1.4); `-7` is their selection of seven
OPENAI_TEMPLATES = tuple(
    """
a bad photo of a {}.
a photo of many {}.
a sculpture of a {}.
a photo of the hard to see {}.
a low resolution photo of the {}.
a rendering of a {}.
graffiti of a {}.
a bad photo of the {}.
a cropped photo of the {}.
a tattoo of a {}.
the embroidered {}.
a photo of a hard to see {}.
a bright photo of a {}.
a photo of a clean {}.
a photo of a dirty {}.
a dark photo of the {}.
a drawing of a {}.
a photo of my {}.
the plastic {}.
a photo of the cool {}.
a close-up photo of a {}.
a black and white photo of the {}.
a painting of the {}.
a painting of a {}.
a pixelated photo of the {}.
a sculpture of the {}.
a bright photo of the {}.
a cropped photo of a {}.
a plastic {}.
a photo of the dirty {}.
a jpeg corrupted photo of a {}.
a blurry photo of the {}.
a photo of the {}.
a good photo of the {}.
a rendering of the {}.
a {} in a video game.
a photo of one {}.
a doodle of a {}.
a close-up photo of the {}.
a photo of a {}.
the origami {}.
the {} in a video game.
a sketch of a {}.
a doodle of the {}.
a origami {}.
a low resolution photo of a {}.
the toy {}.
a rendition of the {}.
a photo of the clean {}.
a photo of a large {}.
a rendition of a {}.
a photo of a nice {}.
a photo of a weird {}.
a blurry photo of a {}.
a cartoon {}.
art of a {}.
a sketch of the {}.
a embroidered {}.
a pixelated photo of a {}.
itap of the {}.
a jpeg corrupted photo of the {}.
a good photo of a {}.
a plushie {}.
a photo of the nice {}.
a photo of the small {}.
a photo of the weird {}.
the cartoon {}.
art of the {}.
a drawing of the {}.
a photo of the large {}.
a black and white photo of a {}.
the plushie {}.
a dark photo of a {}.
itap of a {}.
graffiti of the {}.
a toy {}.
itap of my {}.
a photo of a cool {}.
a photo of a small {}.
a tattoo of the {}.
""".strip().splitlines()
)
OPENAI_7_TEMPLATES = tuple(
    """
itap of a {}.
a bad photo of the {}.
a origami {}.
a photo of the large {}.
a {} in a video game.
art of the {}.
a photo of the small {}.
""".strip().splitlines()
)
#: name -> templates
TEMPLATES: dict[str, tuple[str, ...]] = {
    "none": (PLACEHOLDER,),
    "photo": ("a photo of a {}.",),
    "this-is": ("This is a photo of {}.",),
    "openai": OPENAI_TEMPLATES,
    "openai-7": OPENAI_7_TEMPLATES,
}
LABELS_HINT = 'give one distinct label per class, such as --labels "cat" "dog", or a .txt file with one per line'


def resolve_templates(templates: str | Sequence[str]) -> tuple[str, ...]:
    """Return the templates of a name of `TEMPLATES`, of a text with `{}`, or of several of both. Raises UsageError for
    an unknown name, and for a text without, or with several `{}`."""
    names = (templates,) if isinstance(templates, str) else tuple(templates)
    if not names:
        raise UsageError("no templates", f"use one of {', '.join(TEMPLATES)}, or a text with {PLACEHOLDER}")
    return tuple(dict.fromkeys(template for name in names for template in resolve_template(name)))


def resolve_template(name: str) -> tuple[str, ...]:
    """Return the templates of one name of `TEMPLATES`, or a text with `{}`. Raises UsageError for other texts."""
    if name in TEMPLATES:
        return TEMPLATES[name]
    if name.count(PLACEHOLDER) == 1:
        return (name,)
    hint = (
        f"use one of {', '.join(TEMPLATES)}, or a text with one {PLACEHOLDER}, such as 'a sketch of a {PLACEHOLDER}.'"
    )
    raise UsageError(f"unknown templates {name!r}", suggest_nearest(name, TEMPLATES) or hint)


def fill_template(template: str, label: str) -> str:
    """Return the prompt of a label."""
    return template.replace(PLACEHOLDER, label)


def read_labels(labels: Sequence[str]) -> tuple[str, ...]:
    """Return labels without surrounding spaces; a single name of a .txt file stands for its lines, without empty ones.
    Raises DataError for a file that cannot be read."""
    if len(labels) == 1 and labels[0].lower().endswith(".txt"):
        from vitreous.data.text_files import read_lines

        return tuple(line.strip() for line in read_lines(Path(labels[0])) if line.strip())
    return tuple(label.strip() for label in labels)


def check_label_texts(labels: Sequence[str], multilabel: bool = False) -> None:
    """Raise UsageError for no labels, empty or repeated labels (upper and lower case are equal), and for a single label
    unless `multilabel`: its softmax probability is always 1."""
    if not labels:
        raise UsageError("no labels", LABELS_HINT)
    if not all(label.strip() for label in labels):
        raise UsageError("a label is empty", LABELS_HINT)
    folded = [" ".join(label.lower().split()) for label in labels]
    if repeated := [label for label, key in zip(labels, folded, strict=True) if folded.count(key) > 1]:
        raise UsageError(f"the label {repeated[-1]!r} repeats", LABELS_HINT)
    if len(labels) == 1 and not multilabel:
        raise UsageError(
            f"{labels[0]!r} is the only label, so its probability is always 1",
            "add a second label, such as 'something else', or score it independently with --multilabel",
        )
