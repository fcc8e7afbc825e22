"""What handlers of all addresses ask of a request: its parameters, its one picture, and whom it may ask instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qsl

from starlette.requests import Request

from vitreous.apps.server.model import Served
from vitreous.apps.server.openapi import POSTS
from vitreous.apps.server.refusal import Refusal, shorten
from vitreous.apps.server.service import RequestInfo, Service
from vitreous.apps.server.uploads import Upload
from vitreous.inference.card import Card

WEIGHT = 4  # pictures that looking at attention, or a picture in tiles, costs as much as, about


def context(request: Request) -> tuple[Service, RequestInfo]:
    """The service, and what it knows of this request."""
    return request.scope["service"], request.scope["info"]


def read_parameters(request: Request) -> dict[str, str]:
    """The query string as names and values. Raises Refusal, 422, for what is unreadable, unknown or given twice."""
    text, path = request.scope["query_string"], request.scope["path"]
    known = POSTS[path][2] if path in POSTS else ()
    try:
        pairs = parse_qsl(text.decode("ascii"), keep_blank_values=True, strict_parsing=bool(text), max_num_fields=20)
    except (ValueError, UnicodeDecodeError):
        message, hint = "the query string cannot be read", "write ?name=value&name=value"
        raise Refusal(422, "bad_parameter", message, hint) from None
    parameters: dict[str, str] = {}
    for name, value in pairs:
        if name not in known:
            hint = f"there are {', '.join(known)}" if known else "there are none here"
            raise Refusal(422, "bad_parameter", f"unknown parameter {shorten(name)}", hint)
        if name in parameters:
            raise Refusal(422, "bad_parameter", f"{name} is given twice", "give it once")
        parameters[name] = value
    return parameters


def model_name(served: Served) -> dict[str, str]:
    """The model, in every answer."""
    return {"name": served.predictor.card.name, "version": served.predictor.card.version}


def on_one(work: Callable[[Any], Any]) -> Callable[[list[Any]], list[Any]]:
    """Work on one input as the batcher takes it."""
    return lambda inputs: [work(inputs[0])]


def only_one(uploads: list[Upload]) -> Upload:
    """The one image of a request. Raises Refusal, 400."""
    if len(uploads) != 1:
        raise Refusal(400, "bad_request", f"{len(uploads)} pictures", "send exactly one")
    return uploads[0]


def parse_int(name: str, text: str, least: int, most: int) -> int:
    """A whole number in a range. Raises Refusal, 422, naming the parameter, the value and what is allowed."""
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and least <= int(text) <= most):
        raise Refusal(422, "bad_parameter", f"{name}={text[:40]!r}", f"{name} is a whole number from {least} to {most}")
    return int(text)


def parse_share(name: str, text: str) -> float:
    """A number from 0 to 1. Raises Refusal, 422."""
    try:
        value = float(text) if text.isascii() and len(text) < 40 else -1.0
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise Refusal(422, "bad_parameter", f"{name}={text[:40]!r}", f"{name} is a number from 0 to 1")
    return value


def parse_word(name: str, parameters: Mapping[str, str], words: tuple[str, ...]) -> str:
    """One of some words, the first where nothing is said. Raises Refusal, 422."""
    word = parameters.get(name, words[0])
    if word not in words:
        raise Refusal(422, "bad_parameter", f"{name}={word[:40]} cannot be", f"{name} is {' or '.join(words)}")
    return word


def address_of(card: Card) -> str:
    """The address that a model answers at."""
    tasks = {"detect": card.object_classes, "segment": card.pixel_classes, "predict": card.classes}
    usual = "sample" if card.makes_images else "embed"
    return f"POST /v1/{next((name for name, classes in tasks.items() if classes), usual)}"


def check_reads(card: Card) -> None:
    """Raise Refusal, 404, for a model that makes images, where one is needed that reads them."""
    if card.makes_images:
        raise Refusal(404, "not_available", "this model makes images, and reads none", address_of(card))
