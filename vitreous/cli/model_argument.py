"""Refuse commands that name images and no model, with the command that was meant."""

from __future__ import annotations

import os
import shlex
from dataclasses import MISSING, fields
from typing import Any

from vitreous.errors import UsageError, printable

ANSWERS_ABOUT_IMAGES = ("predict", "embed", "evaluate", "inspect")  # verbs that take images or data after the model
LONGER = ("predict", "embed", "sample", "push")  # verbs that need more than a model
SHOWN = 3  # words after the model that a hint repeats


def needs_model(kind: type[Any]) -> bool:
    """Whether a verb's options have a model that no default stands for."""
    return any(field.name == "run" and field.default is MISSING for field in fields(kind))


def require_model(verb: str, kind: type[Any], words: list[str]) -> None:
    """Raise UsageError for a verb that needs a model, where no word names one."""
    if not words and needs_model(kind):
        raise no_model(verb, "", [])


def refuse_images(verb: str, options: Any) -> None:
    """Raise UsageError where images stand in the place of the model."""
    from vitreous.weights.model_paths import holds_images, is_run

    if not needs_model(type(options)) or is_run(run := options.run) or not holds_images(run):
        return
    others = [*getattr(options, "images", ()), *filter(None, (getattr(options, "data", None),))]
    if verb in ANSWERS_ABOUT_IMAGES:
        if named := next((word for word in others if is_run(word)), None):
            words = shlex.join(["vitreous", verb, named, run])
            raise UsageError(f"the model comes first, and {printable(run)} holds images", f"try {words}")
        raise no_model(verb, run, [run, *others])
    raise no_model(verb, run, [])


def no_model(verb: str, path: str, others: list[str]) -> UsageError:
    """The refusal of a command without a model: `path` stands in its place, `others` are the words after it."""
    from vitreous.weights.model_paths import find_newest_run

    problem = "no model given"
    if path:
        problem += f": {printable(path)} {'holds images' if os.path.isdir(path) else 'names images'}"
    if not (newest := find_newest_run()):
        hint = f"name one: vitreous {verb} RUN …; there is no run below this folder, and vitreous train DATA makes one"
        return UsageError(problem, hint)
    shown = [printable(word) for word in others[:SHOWN]]
    words = shlex.join(["vitreous", verb, newest, *shown]) + " …" * (
        len(others) > SHOWN or (verb in LONGER and not others)
    )
    return UsageError(problem, f"try {words}; {newest} is the newest run here")
