"""Exported files as they are kept: with a card that says what they are, and a seal that tells whether a bit of them
changed.

The seal is the SHA-256 of everything before it, at the file's end, where readers of the format take it for metadata. It
tells damage, and files that were changed after they were judged; it is no signature. Nothing here needs torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vitreous.errors import WeightsError
from vitreous.inference.card import Card, parse_card
from vitreous.inference.libraries import import_optional_library
from vitreous.version import __version__
from vitreous.weights.entry import open_regular_file

EXPORT_FORMAT = 1
CARD_KEY = "vitreous"  # the name of the metadata that has the card
EXPORT_AGAIN_HINT = "export the model again, or restore the file from a copy"
MAX_EXPORT_BYTES = 2**31 - 1  # bytes of an ONNX file: protobuf ends there

#: how the seal begins in an ONNX file, whose digits follow: an entry of ModelProto.metadata_props, field 14, `sha256`
#: -> 64 characters
ONNX_SEAL = b"\x72\x4a\x0a\x06sha256\x12\x40"
#: the same in an OpenVINO file, of the XML so far and the .bin: a comment
XML_SEAL, XML_END = b"<!-- sha256 ", b" -->\n"
SHA256_DIGITS = 64


def describe_export(card: Card, quantised: str | None = None) -> str:
    """The description in an exported file, as JSON."""
    document = {"format": EXPORT_FORMAT, "vitreous": __version__, "quantised": quantised, "card": card.to_dict()}
    return json.dumps(document, ensure_ascii=False)


def parse_export_precision(text: str | None) -> str:
    """The precision of a file, from `describe_export`: `int8` where products were quantised, else `fp32`."""
    return json.loads(text or "{}").get("quantised") or "fp32"


def parse_export_card(text: str | None, origin: Path) -> Card:
    """The card of an exported file. Raises WeightsError where there is none, or of a later format."""
    if text is None:
        message = f"{origin} was not exported by vitreous: it tells no classes and no preprocessing"
        raise WeightsError(message, "export the model here")
    try:
        document = json.loads(text)
        version, card = document["format"], document["card"]
    except (ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"{origin} has a card that cannot be read ({error})", EXPORT_AGAIN_HINT) from None
    if version != EXPORT_FORMAT:
        message = f"{origin} has export format {version}, this version reads {EXPORT_FORMAT}"
        raise WeightsError(message, "install a newer vitreous")
    return parse_card(card, str(origin))


def read_export_bytes(path: Path) -> bytes:
    """A regular file's bytes. Raises WeightsError for anything else, and for more than an exported file has."""
    with open_regular_file(path) as file:
        raw = file.read(MAX_EXPORT_BYTES + 1)
    if len(raw) > MAX_EXPORT_BYTES:
        raise WeightsError(f"{path} has more than {MAX_EXPORT_BYTES:,} bytes", "exported files have fewer")
    return raw


def seal_onnx(model: bytes) -> bytes:
    """An ONNX file with its seal."""
    return model + ONNX_SEAL + hashlib.sha256(model).hexdigest().encode()


def check_onnx_seal(raw: bytes, path: Path) -> dict[str, str]:
    """The metadata of an ONNX file. Raises WeightsError where its seal is broken or tensors lie in other files."""
    end = len(raw) - len(ONNX_SEAL) - SHA256_DIGITS
    sealed = end >= 0 and raw[end : end + len(ONNX_SEAL)] == ONNX_SEAL
    if sealed and hashlib.sha256(memoryview(raw)[:end]).hexdigest().encode() != raw[-SHA256_DIGITS:]:
        raise WeightsError(f"{path} was altered after it was exported: its checksum is another", EXPORT_AGAIN_HINT)
    model = parse_onnx(raw, path)
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    if not sealed and CARD_KEY in metadata:
        message = f"{path} was cut short or changed after it was exported: its checksum is not at its end"
        raise WeightsError(message, EXPORT_AGAIN_HINT)
    if not sealed:
        message = f"{path} was not exported by vitreous: it tells no classes and no preprocessing"
        raise WeightsError(message, "export the model here")
    if any(tensor.external_data or tensor.data_location for tensor in iterate_tensor_protos(model)):
        raise WeightsError(f"{path} has tensors in other files, which are not read", "save it as one file")
    return metadata


def parse_onnx(raw: bytes, path: Path) -> Any:
    """An ONNX file as onnx.ModelProto; files that it names are not opened. Raises WeightsError for no ONNX file."""
    onnx = import_optional_library("onnx")
    from google.protobuf.message import DecodeError

    try:
        return onnx.load_model_from_string(raw)
    except DecodeError as error:
        raise WeightsError(f"{path} is no ONNX file, or damaged ({error})", EXPORT_AGAIN_HINT) from None


def iterate_tensor_protos(message: Any) -> Iterator[Any]:
    """Every onnx.TensorProto in a protobuf message, in whatever field: onnx's own listing leaves out sparse tensors."""
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        for part in (value,) if hasattr(value, "ListFields") else value:
            if field.message_type.name == "TensorProto":
                yield part
            else:
                yield from iterate_tensor_protos(part)


def seal_xml(xml: bytes, weights: bytes) -> bytes:
    """An OpenVINO .xml with the seal of it and its .bin."""
    return xml + XML_SEAL + hash_openvino_files(xml, weights) + XML_END


def check_xml_seal(raw: bytes, weights: bytes, path: Path) -> None:
    """Raise WeightsError unless an OpenVINO .xml and its .bin are as they were sealed."""
    end = len(raw) - len(XML_SEAL) - SHA256_DIGITS - len(XML_END)
    if end < 0 or raw[end : end + len(XML_SEAL)] != XML_SEAL or raw[-len(XML_END) :] != XML_END:
        message = f"{path} was not exported by vitreous, or was cut short or changed: it has no checksum at its end"
        raise WeightsError(message, EXPORT_AGAIN_HINT)
    if hash_openvino_files(raw[:end], weights) != raw[-len(XML_END) - SHA256_DIGITS : -len(XML_END)]:
        raise WeightsError(
            f"{path} or its .bin was altered after it was exported: the checksum is another", EXPORT_AGAIN_HINT
        )


def hash_openvino_files(xml: bytes, weights: bytes) -> bytes:
    """The SHA-256 of both, each told from the other by its length."""
    hasher = hashlib.sha256(len(xml).to_bytes(8, "little"))
    hasher.update(xml)
    hasher.update(weights)
    return hasher.hexdigest().encode()
