"""`evaluate` of a model that makes images."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from vitreous.cli.console import Console
from vitreous.cli.figures import percent
from vitreous.errors import UsageError

#: options of `evaluate` that are about answers, which a generator gives none of
OF_ANSWERS = ("calibrate", "abstain", "outliers", "against", "suspects", "boundary", "tiles", "report")


def evaluate_generator(options: Any, console: Console) -> dict[str, Any]:
    """Make images, compare them with those of a split, and print the figures; the options are those of `evaluate`.
    Raises UsageError for those that are about answers."""
    from vitreous.reports.evaluate import evaluate
    from vitreous.reports.generated import GenerationOptions

    o = options
    if words := [name for name in OF_ANSWERS if getattr(o, name)]:
        raise UsageError(f"--{words[0]} is about answers, and {o.run} makes images", "leave it out")
    asked = GenerationOptions(**{field.name: getattr(o, field.name) for field in fields(GenerationOptions)})
    ways: dict[str, Any] = {
        name: getattr(o, name) for name in ("split", "batch_size", "workers", "bad_images", "protocol")
    }
    document = evaluate(o.source(o.run), o.data, how=o.how(), listener=console, settings=asked, **ways)
    judged = document[document["split"]]
    compared = f"{judged['images']:,} {document['split']} images" if judged["images"] else document["data"]
    where = f"{compared} by {judged['features']} ({judged['dimensions']} numbers)"
    manner = f"{document['sampler']} in {document['steps']} steps, guidance {document['guidance']:g}"
    console.say(f"{judged['samples']:,} samples of {judged['size']} ({manner}) beside {where}")
    train = judged["frechet_distance_of_train"]
    beside = "" if train is None else f" (training images {train:.4g}: {judged['frechet_distance'] / train:.2f} times)"
    console.say(f"Fréchet distance {judged['frechet_distance']:.4g}{beside}")
    if judged.get("fid") is not None:
        spatial = "" if judged["sfid"] is None else f", sFID {judged['sfid']:.2f}"
        score = f"Inception score {judged['inception_score']:.2f}"
        console.say(f"FID {judged['fid']:.2f}{spatial}, {score}, of {judged['samples']:,} samples")
    if judged["precision"] is not None:
        shares = {name: percent(judged[name]) for name in ("precision", "recall")}
        shares |= {"density": f"{judged['density']:.3f}", "coverage": percent(judged["coverage"])}
        console.table(list(shares), [list(shares.values())])
    if judged["recognised"] is not None:
        console.say(f"recognised: {percent(judged['recognised'])} of the samples, by the model of the features")
    if judged["copies"] is not None:
        console.say(f"near copies of training images: {percent(judged['copies'])} of the samples (chance: 1 %)")
    return document
