"""The images on which class maps are worst, each beside what is true and what was answered, for a page."""

from __future__ import annotations

from typing import Any

import torch

from vitreous.data.annotations.drawing import class_colours, lay_over, middle_planes
from vitreous.data.annotations.target import IGNORE, AnnotatedSplit
from vitreous.data.rgb_images import rgb_image
from vitreous.errors import DataError
from vitreous.evaluation.pixels import computing, figures_of, matrices_of
from vitreous.inference.engine import make_engine
from vitreous.inference.tiles import class_map, native_pixels
from vitreous.reports.answers import Answered
from vitreous.reports.pages.thumbnails import data_uri, shrink

SHOWN = 6  # images


def worst_scenes(answers: Answered) -> dict[str, Any]:
    """Return the images of the lowest mIoU, each with it and three pictures as data URIs: the image, the true and the
    answered class map over it, of volumes their middle planes; and the classes with their colours."""
    classes, split = answers.bundle.pixel_classes, answers.split
    assert isinstance(split, AnnotatedSplit), "class maps are judged on annotated data"
    figures = [figures_of(matrix)["miou"] for matrix in matrices_of(answers.raw, len(classes))]
    order = sorted(
        (sample for sample in range(len(split)) if figures[sample] is not None and sample not in answers.bad),
        key=lambda sample: figures[sample] or 0.0,
    )
    engine, colours, rows = make_engine(answers.bundle.model, answers.bundle.preprocess), class_colours(classes), []
    for sample in order[:SHOWN]:
        try:
            pixels = native_pixels(answers.bundle.preprocess.decoded(split.raw(sample), split.name(sample)))
            truth = split.target(sample).class_map()
        except DataError:  # gone since it was judged
            continue
        answer = class_map(computing(engine), pixels, answers.bundle.preprocess.image)
        if answer.ndim == 3:
            pixels = middle_planes(pixels, pixels.min())
            truth, answer = (middle_planes(classes, IGNORE) for classes in (truth, answer))
        image = rgb_image(torch.from_numpy(pixels))
        pictures = [image, lay_over(image, truth, colours), lay_over(image, answer, colours)]
        uris = [data_uri(shrink(picture)) for picture in pictures]
        rows.append({"name": split.name(sample), "miou": figures[sample], "pictures": uris})
    names = [
        {"name": name, "colour": "#{:02x}{:02x}{:02x}".format(*colour)}
        for name, colour in zip(classes, colours, strict=True)
    ]
    return {"rows": rows, "classes": names}
