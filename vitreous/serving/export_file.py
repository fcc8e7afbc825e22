"""Exported files as they are kept: with a card that says what they are, and a seal that tells whether a bit of them
changed.

The seal is the SHA-256 of everything before it, at the file's end, where readers of the format take it for metadata. It
tells damage, and files that were changed after they were judged; it is no signature. Nothing here needs torch, or an
extra.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from vitreous.data.preprocess import Preprocess
from vitreous.errors import WeightsError
from vitreous.serving.card import Card, read_card
from vitreous.version import __version__
from vitreous.weights.entry import regular

FORMAT = 1
CARD = "vitreous"  # the name of the metadata that has the card
AGAIN = "export the model again, or restore the file from a copy"
MOST = 2**31 - 1  # bytes of an ONNX file: protobuf ends there

#: how the seal begins in an ONNX file, whose digits follow: an entry of ModelProto.metadata_props, field 14, `sha256`
#: -> 64 characters
ONNX_SEAL = b"\x72\x4a\x0a\x06sha256\x12\x40"
#: the same in an OpenVINO file, of the XML so far and the .bin: a comment
XML_SEAL, XML_END = b"<!-- sha256 ", b" -->\n"
DIGITS = 64

#: where tensors are in an ONNX file: message -> field -> message, as onnx.proto3 numbers them
TREE: dict[str, dict[int, str]] = {
    "model": {7: "graph", 14: "entry", 25: "function"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
}
EXTERNAL, PLACE = 13, 14  # fields of a tensor: what it is called in another file, and whether it lies in one (1)
DEEPEST = 32  # messages in messages
FIELDS = 1_000_000  # of a file; the largest models here have 30,000


def told(card: Card, quantised: str | None = None) -> str:
    """What an exported file says of itself, as JSON."""
    document = {"format": FORMAT, "vitreous": __version__, "quantised": quantised, "card": card.plain()}
    return json.dumps(document, ensure_ascii=False)


def precision_in(text: str | None) -> str:
    """What a file computes in, of the text that `told` wrote: `int8` where its products were quantised, else `fp32`."""
    return json.loads(text or "{}").get("quantised") or "fp32"


def card_in(text: str | None, origin: Path) -> Card:
    """The card of an exported file. Raises WeightsError where there is none, or of a later format."""
    if text is None:
        raise WeightsError(
            f"{origin} was not exported by vitreous: it tells no classes and no preprocessing", "export the model here"
        )
    try:
        document = json.loads(text)
        found, card = document["format"], document["card"]
    except (ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"{origin} has a card that cannot be read ({error})", AGAIN) from None
    if found != FORMAT:
        raise WeightsError(
            f"{origin} has export format {found}, this version reads {FORMAT}", "install a newer vitreous"
        )
    return read_card(card, str(origin))


def content(path: Path) -> bytes:
    """A regular file's bytes. Raises WeightsError for anything else, and for more than an exported file has."""
    with regular(path) as file:
        raw = file.read(MOST + 1)
    if len(raw) > MOST:
        raise WeightsError(f"{path} has more than {MOST:,} bytes", "exported files have fewer")
    return raw


def seal_onnx(model: bytes) -> bytes:
    """An ONNX file with its seal."""
    return model + ONNX_SEAL + hashlib.sha256(model).hexdigest().encode()


def check_onnx(raw: bytes, path: Path) -> None:
    """Raise WeightsError unless an ONNX file is as it was sealed, and alone: none of its tensors lies in another
    file."""
    end = len(raw) - len(ONNX_SEAL) - DIGITS
    if end < 0 or raw[end : end + len(ONNX_SEAL)] != ONNX_SEAL:
        metadata, _ = look(raw, path)
        if CARD in metadata:
            raise WeightsError(
                f"{path} was cut short or changed after it was exported: its checksum is not at its end", AGAIN
            )
        raise WeightsError(
            f"{path} was not exported by vitreous: it tells no classes and no preprocessing", "export the model here"
        )
    if hashlib.sha256(memoryview(raw)[:end]).hexdigest().encode() != raw[-DIGITS:]:
        raise WeightsError(f"{path} was altered after it was exported: its checksum is another", AGAIN)
    if look(raw, path)[1]:
        raise WeightsError(f"{path} has tensors in other files, which are not read", "save it as one file")


def seal_xml(xml: bytes, weights: bytes) -> bytes:
    """An OpenVINO .xml with the seal of it and its .bin."""
    return xml + XML_SEAL + digest(xml, weights) + XML_END


def check_xml(raw: bytes, weights: bytes, path: Path) -> None:
    """Raise WeightsError unless an OpenVINO .xml and its .bin are as they were sealed."""
    end = len(raw) - len(XML_SEAL) - DIGITS - len(XML_END)
    if end < 0 or raw[end : end + len(XML_SEAL)] != XML_SEAL or raw[-len(XML_END) :] != XML_END:
        raise WeightsError(
            f"{path} was not exported by vitreous, or was cut short or changed: it has no checksum at its end", AGAIN
        )
    if digest(raw[:end], weights) != raw[-len(XML_END) - DIGITS : -len(XML_END)]:
        raise WeightsError(f"{path} or its .bin was altered after it was exported: the checksum is another", AGAIN)


def digest(xml: bytes, weights: bytes) -> bytes:
    """The SHA-256 of both, each told from the other by its length."""
    made = hashlib.sha256(len(xml).to_bytes(8, "little"))
    made.update(xml)
    made.update(weights)
    return made.hexdigest().encode()


def look(raw: bytes, path: Path) -> tuple[dict[str, str], bool]:
    """An ONNX file's metadata, and whether a tensor of it lies in another file. Raises WeightsError for what is no ONNX
    file."""
    metadata: dict[str, str] = {}
    outside, seen = False, 0
    waiting = [("model", memoryview(raw), 0)]
    try:
        while waiting:
            kind, message, depth = waiting.pop()
            if depth > DEEPEST:
                raise ValueError("messages in messages in messages")
            if kind == "entry":
                pair = {
                    number: bytes(value).decode() for number, value in fields(message) if isinstance(value, memoryview)
                }
                metadata[pair.get(1, "")] = pair.get(2, "")
                continue
            for number, value in fields(message):
                seen += 1
                if seen > FIELDS:
                    raise ValueError(f"more than {FIELDS:,} fields")
                outside = outside or (kind == "tensor" and (number == EXTERNAL or (number == PLACE and value != 0)))
                inner = TREE.get(kind, {}).get(number)
                if inner is not None and isinstance(value, memoryview):
                    waiting.append((inner, value, depth + 1))
    except (ValueError, IndexError) as error:
        raise WeightsError(f"{path} is no ONNX file, or damaged ({error})", AGAIN) from None
    return metadata, outside


def fields(message: memoryview) -> Iterator[tuple[int, memoryview | int | None]]:
    """The fields of a protobuf message: their numbers, and whole numbers or bytes; no fractions. Raises ValueError or
    IndexError."""
    place = 0
    while place < len(message):
        key, place = number_at(message, place)
        value: memoryview | int | None = None
        if key & 7 == 0:
            value, place = number_at(message, place)
        elif key & 7 == 2:
            length, place = number_at(message, place)
            value = message[place : place + length]
            place += length
        elif key & 7 in (1, 5):
            place += 8 if key & 7 == 1 else 4
        else:
            raise ValueError(f"a field of type {key & 7}")
        if place > len(message):
            raise ValueError("a field beyond the end")
        yield key >> 3, value


def number_at(message: memoryview, place: int) -> tuple[int, int]:
    """The number at a place, seven bits to a byte, and the place behind it."""
    number = 0
    for shift in range(0, 70, 7):
        byte = message[place]
        place += 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number, place
    raise ValueError("a number without an end")


def normalised(pixels: np.ndarray, preprocess: Preprocess) -> np.ndarray:
    """(B, C, *image) in 0..peak -> the same as float32 that a model takes: `Preprocess.normalise`, to the last bit,
    without torch."""
    shape = (1, -1) + (1,) * (pixels.ndim - 2)
    mean, std = (
        np.array(values, np.float32).reshape(shape) * np.float32(preprocess.peak)
        for values in (preprocess.mean, preprocess.std)
    )
    floats = pixels.astype(np.float32)
    floats -= mean
    floats /= std
    return floats
