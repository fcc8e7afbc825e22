"""Requests to a generative model: parsed from JSON, and checked against limits."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from importlib.util import find_spec
from typing import Any

from vitreous.apps.server.responses import Refusal, shorten_text
from vitreous.errors import suggest_nearest
from vitreous.generation.process import Process
from vitreous.generation.settings import (
    DEFAULT_SAMPLER_STEPS,
    MAX_GUIDANCE,
    SamplingOptions,
    count_forward_passes,
    cycle_classes,
    get_default_steps,
    max_sampler_steps,
)

MAX_SAMPLE_IMAGES = 64  # maximum images of a request
MAX_STEPS_PER_IMAGE = 250  # maximum steps with the maximum number of images; with fewer images, more steps are allowed
MAX_SAMPLE_BODY_BYTES = 2**14  # maximum bytes of a request
MAX_JSON_SEED = 2**53 - 1  # largest integer that every JSON parser reads exactly
SAMPLE_KEYS = ("class", "count", "guidance", "steps", "seed", "to_seed", "sampler")


@dataclass(frozen=True)
class SampleLimits:
    """Limits of a request: the names of the `classes`, the maximum number of `images` and of `steps`, and whether
    inpainting is supported. `samplers` maps the name of a sampler to its default steps; the first is the default
    sampler."""

    classes: tuple[str, ...]
    process: str
    samplers: dict[str, int]
    steps: int
    _: KW_ONLY
    images: int
    inpaint: bool = True

    def describe(self) -> dict[str, Any]:
        """Return limits and defaults for GET /v1/model."""
        defaults = {"count": 1, "guidance": 1.0, "seed": 0, "sampler": next(iter(self.samplers))}
        guidance = MAX_GUIDANCE if self.classes else 1.0
        limits = {"count": self.images, "steps": self.steps, "image_steps": self.image_steps}
        limits |= {"seed": MAX_JSON_SEED, "guidance": guidance}
        document = {"process": self.process, "samplers": self.samplers, "inpaint": self.inpaint}
        return document | {"defaults": defaults, "limits": limits}

    @property
    def image_steps(self) -> int:
        """Return the maximum product of images and steps of a request."""
        return max(self.images * MAX_STEPS_PER_IMAGE, self.steps)


def make_sample_limits(
    classes: Sequence[str], process: Process, image: tuple[int, int], pixels: int, inpaint: bool = True
) -> SampleLimits:
    """Make the limits for a model with image size `image` (H, W). `pixels` is the maximum number of pixels of a
    response."""
    steps = max_sampler_steps(process)
    samplers = {name: get_default_steps(process, name) for name in DEFAULT_SAMPLER_STEPS[type(process)]}
    if find_spec("diffusers") is None:
        samplers.pop("dpm-solver", None)
    images = max(1, min(MAX_SAMPLE_IMAGES, pixels // math.prod(image)))
    return SampleLimits(tuple(classes), process.name, samplers=samplers, steps=steps, images=images, inpaint=inpaint)


@dataclass(frozen=True)
class SampleRequest:
    """The images that a request asks for: `count` images of the class `name`, or cycling through the classes without a
    name. With `to_seed`, they interpolate from the noise of one seed to that of the other."""

    name: str | None
    count: int
    options: SamplingOptions
    sampler: str
    _: KW_ONLY
    steps: int
    to_seed: int | None = None

    def list_class_number_pairs(self, classes: Sequence[str]) -> list[tuple[int, int]]:
        """Return (class index, image number) of each image. `vitreous sample` generates the same image from the same
        pair."""
        if self.name is not None:
            return [(classes.index(self.name), index) for index in range(self.count)]
        return cycle_classes(self.count, len(classes))

    def cost(self, limits: SampleLimits) -> int:
        """Return the cost of the request, in images with default settings; at least 1."""
        passes = count_forward_passes(self.sampler, self.steps) * (
            2 if limits.classes and self.options.guidance != 1 else 1
        )
        default_passes = count_forward_passes(*next(iter(limits.samplers.items())))
        return max(1, math.ceil(self.count * passes / default_passes))

    def describe(self, precision: str) -> dict[str, Any]:
        """Return the settings of the images for the response."""
        settings = {"class": self.name, "count": self.count, "guidance": self.options.guidance, "steps": self.steps}
        seeds = {"seed": self.options.seed, "to_seed": self.to_seed}
        return settings | seeds | {"sampler": self.sampler, "precision": precision}


def parse_sample_request(content_type: str, body: bytes, limits: SampleLimits) -> SampleRequest:
    """Parse a request body.

    Raises Refusal: 413 if the body is too large, or has too many images or steps together; 415 for another content
    type; 400 for a body that is not a JSON object; 422 for an invalid value.
    """
    fields = parse_json_fields(content_type, body)
    if unknown := next((name for name in fields if name not in SAMPLE_KEYS), None):
        raise Refusal(422, "bad_parameter", f"unknown key {shorten_text(unknown)}", f"use {', '.join(SAMPLE_KEYS)}")
    name, sampler = fields.get("class"), fields.get("sampler")
    sampler = next(iter(limits.samplers)) if sampler is None else sampler
    if name is not None:
        check_sample_class(name, limits.classes)
    if not isinstance(sampler, str) or sampler not in limits.samplers:
        hint = f"use {' or '.join(limits.samplers)}"
        raise Refusal(422, "bad_parameter", f"unknown sampler {shorten_text(str(sampler))} for {limits.process}", hint)
    count = parse_whole_number("count", fields, 1, 1, limits.images)
    steps = parse_whole_number("steps", fields, limits.samplers[sampler], 1, limits.steps)
    seed, guidance = (
        parse_whole_number("seed", fields, 0, 0, MAX_JSON_SEED),
        parse_guidance(fields.get("guidance"), limits),
    )
    to_seed = parse_to_seed(fields, name, count, limits)
    if count * steps > limits.image_steps:
        max_images = max(1, limits.image_steps // steps)
        hint = f"use at most {max_images} images, or at most {limits.image_steps // count} steps"
        raise Refusal(413, "too_large", f"{count} images with {steps} steps exceed the limit", hint)
    options = SamplingOptions(guidance=guidance, sampler=sampler, steps=steps, seed=seed)
    return SampleRequest(name, count, options=options, sampler=sampler, steps=steps, to_seed=to_seed)


def parse_to_seed(fields: dict[str, Any], name: str | None, count: int, limits: SampleLimits) -> int | None:
    """Parse `to_seed`, the last seed of an interpolation, if set. Raises Refusal, 422, also for a single image, and for
    images of several classes."""
    if fields.get("to_seed") is None:
        return None
    if count < 2:
        message = "to_seed interpolates between two images, so count must be at least 2"
        raise Refusal(422, "bad_parameter", message, "set count to 2 or more")
    if name is None and len(limits.classes) > 1:
        raise Refusal(422, "bad_parameter", "to_seed interpolates within one class", "set class")
    return parse_whole_number("to_seed", fields, 0, 0, MAX_JSON_SEED)


def parse_json_fields(content_type: str, body: bytes) -> dict[str, Any]:
    """Parse a JSON body to a dict. Raises Refusal: 413 for a too large body, 415 for another content type, 400 for a
    body that is not a JSON object, 422 for a duplicate key."""
    media_type = content_type.split(";", 1)[0].strip().lower()
    if media_type != "application/json":
        message = f"unsupported content type {shorten_text(media_type)}" if media_type else "no content type"
        raise Refusal(415, "unsupported_media", message, "send a JSON object as application/json")
    if len(body) > MAX_SAMPLE_BODY_BYTES:
        raise Refusal(413, "too_large", "the body is too large", f"send at most {MAX_SAMPLE_BODY_BYTES:,} bytes")
    try:
        pairs = json.loads(body, object_pairs_hook=JsonPairs)
    except (ValueError, RecursionError):
        raise Refusal(400, "bad_request", "the body is not JSON", 'send {"class": null, "count": 4}') from None
    if not isinstance(pairs, JsonPairs):
        raise Refusal(400, "bad_request", "the body is not an object", 'send {"class": null, "count": 4}')
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        duplicate = next(name for name in names if names.count(name) > 1)
        raise Refusal(422, "bad_parameter", f"duplicate key {shorten_text(duplicate)}", "send it once")
    return fields


class JsonPairs(list[tuple[str, Any]]):
    """The (key, value) pairs of a JSON object, including duplicate keys."""


def check_sample_class(name: Any, classes: Sequence[str]) -> None:
    """Raise Refusal, 422, if `name` is not a class of the model."""
    if not isinstance(name, str):
        raise Refusal(422, "bad_parameter", f"invalid class={shorten_json(name)}", "use a name or null")
    if not classes:
        hint = "remove class"
        raise Refusal(422, "bad_parameter", "the model is unconditional: it has no classes", hint)
    if name not in classes:
        hint = suggest_nearest(name[:60], classes) or f"use one of {', '.join(classes[:20])}"
        raise Refusal(422, "bad_parameter", f"unknown class {shorten_text(name)}", hint)


def parse_whole_number(name: str, fields: dict[str, Any], default: int, minimum: int, maximum: int) -> int:
    """Parse an integer in a range; return `default` if it is not set. Raises Refusal, 422, with the value and the
    range."""
    value = fields.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        hint = f"use an integer from {minimum} to {maximum}"
        raise Refusal(422, "bad_parameter", f"invalid {name}={shorten_json(value)}", hint)
    return value


def parse_guidance(value: Any, limits: SampleLimits) -> float:
    """Parse the guidance scale; 1 if it is not set. Raises Refusal, 422, also for guidance of a model without
    classes."""
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_GUIDANCE:
        hint = f"use a number from 0 to {MAX_GUIDANCE:g}"
        raise Refusal(422, "bad_parameter", f"invalid guidance={shorten_json(value)}", hint)
    if value != 1 and not limits.classes:
        raise Refusal(422, "bad_parameter", "guidance needs classes, and the model has none", "remove guidance")
    return float(value)


def shorten_json(value: Any) -> str:
    """Format a value as one shortened line of JSON."""
    return shorten_text(json.dumps(value))
