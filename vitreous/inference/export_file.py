"""Metadata of exported files: the card, which describes the model, and a checksum that detects changes.

The checksum is the SHA-256 of everything before it. It is at the end of the file, where readers of the format parse it
as metadata. It detects damage and later changes, but it is not a signature. This module does not import torch.
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
CARD_KEY = "vitreous"  # the metadata key of the card
EXPORT_AGAIN_HINT = "export the model again, or restore the file from a copy"
MAX_EXPORT_BYTES = 2**31 - 1  # largest ONNX file: the protobuf limit

#: bytes before the 64 digits of the checksum in an ONNX file: an entry of ModelProto.metadata_props, field 14, with the
#: key `sha256`
ONNX_CHECKSUM_TAG = b"\x72\x4a\x0a\x06sha256\x12\x40"
#: start and end of the XML comment in an OpenVINO file that has the checksum of the preceding XML and of the .bin
XML_CHECKSUM_START, XML_CHECKSUM_END = b"<!-- sha256 ", b" -->\n"
SHA256_DIGITS = 64


def describe_export(card: Card, quantised: str | None = None) -> str:
    """Build the JSON description that an exported file stores: card, versions, and quantisation."""
    document = {"format": EXPORT_FORMAT, "vitreous": __version__, "quantised": quantised, "card": card.to_dict()}
    return json.dumps(document, ensure_ascii=False)


def parse_export_precision(text: str | None) -> str:
    """Return the precision of an exported file from its stored description: `int8` if it is quantised, else `fp32`."""
    return json.loads(text or "{}").get("quantised") or "fp32"


def parse_export_card(text: str | None, origin: Path) -> Card:
    """Parse the card from the stored description of an exported file. Raises WeightsError if it is missing, or has a
    later format."""
    if text is None:
        message = f"{origin} was not exported by vitreous: its classes and preprocessing are missing"
        raise WeightsError(message, "export the model with vitreous")
    try:
        document = json.loads(text)
        version, card = document["format"], document["card"]
    except (ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"{origin} has an invalid card ({error})", EXPORT_AGAIN_HINT) from None
    if version != EXPORT_FORMAT:
        message = f"{origin} has export format {version}, but this version reads {EXPORT_FORMAT}"
        raise WeightsError(message, "install a newer vitreous")
    return parse_card(card, str(origin))


def read_export_bytes(path: Path) -> bytes:
    """Read an exported file. Raises WeightsError unless it is a regular file of at most `MAX_EXPORT_BYTES` bytes."""
    with open_regular_file(path) as file:
        raw = file.read(MAX_EXPORT_BYTES + 1)
    if len(raw) > MAX_EXPORT_BYTES:
        raise WeightsError(f"{path} is larger than {MAX_EXPORT_BYTES:,} bytes", "use an exported file")
    return raw


def append_onnx_checksum(model: bytes) -> bytes:
    """Append a SHA-256 checksum to the bytes of an ONNX file."""
    return model + ONNX_CHECKSUM_TAG + hashlib.sha256(model).hexdigest().encode()


def read_verified_onnx_metadata(raw: bytes, path: Path) -> dict[str, str]:
    """Verify the checksum of an ONNX file and return its metadata. Raises WeightsError for a wrong or missing checksum,
    and for tensors in other files."""
    end = len(raw) - len(ONNX_CHECKSUM_TAG) - SHA256_DIGITS
    has_checksum = end >= 0 and raw[end : end + len(ONNX_CHECKSUM_TAG)] == ONNX_CHECKSUM_TAG
    if has_checksum and hashlib.sha256(memoryview(raw)[:end]).hexdigest().encode() != raw[-SHA256_DIGITS:]:
        raise WeightsError(f"{path} was modified after its export: the checksum does not match", EXPORT_AGAIN_HINT)
    model = parse_onnx(raw, path)
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    if not has_checksum and CARD_KEY in metadata:
        message = f"{path} was truncated or modified after its export: it does not end with its checksum"
        raise WeightsError(message, EXPORT_AGAIN_HINT)
    if not has_checksum:
        message = f"{path} was not exported by vitreous: its classes and preprocessing are missing"
        raise WeightsError(message, "export the model with vitreous")
    if any(tensor.external_data or tensor.data_location for tensor in iterate_tensor_protos(model)):
        raise WeightsError(f"{path} has tensors in other files, which is not supported", "save it as one file")
    return metadata


def parse_onnx(raw: bytes, path: Path) -> Any:
    """Parse an ONNX file as onnx.ModelProto without opening external files. Raises WeightsError for an invalid file."""
    onnx = import_optional_library("onnx")
    from google.protobuf.message import DecodeError

    try:
        return onnx.load_model_from_string(raw)
    except DecodeError as error:
        raise WeightsError(f"{path} is not an ONNX file, or is damaged ({error})", EXPORT_AGAIN_HINT) from None


def iterate_tensor_protos(message: Any) -> Iterator[Any]:
    """Yield every onnx.TensorProto in any field of a protobuf message, including sparse tensors, which onnx does not
    check."""
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        for submessage in (value,) if hasattr(value, "ListFields") else value:
            if field.message_type.name == "TensorProto":
                yield submessage
            else:
                yield from iterate_tensor_protos(submessage)


def append_xml_checksum(xml: bytes, weights: bytes) -> bytes:
    """Append the SHA-256 checksum of an OpenVINO .xml and its .bin to the .xml."""
    return xml + XML_CHECKSUM_START + hash_openvino_files(xml, weights) + XML_CHECKSUM_END


def verify_xml_checksum(raw: bytes, weights: bytes, path: Path) -> None:
    """Raise WeightsError if an OpenVINO .xml or its .bin changed after the checksum was written."""
    end = len(raw) - len(XML_CHECKSUM_START) - SHA256_DIGITS - len(XML_CHECKSUM_END)
    if (
        end < 0
        or raw[end : end + len(XML_CHECKSUM_START)] != XML_CHECKSUM_START
        or raw[-len(XML_CHECKSUM_END) :] != XML_CHECKSUM_END
    ):
        message = f"{path} was not exported by vitreous, or was truncated or modified: it does not end with a checksum"
        raise WeightsError(message, EXPORT_AGAIN_HINT)
    if hash_openvino_files(raw[:end], weights) != raw[-len(XML_CHECKSUM_END) - SHA256_DIGITS : -len(XML_CHECKSUM_END)]:
        raise WeightsError(
            f"{path} or its .bin was modified after the export: the checksum does not match", EXPORT_AGAIN_HINT
        )


def hash_openvino_files(xml: bytes, weights: bytes) -> bytes:
    """Return the SHA-256, in hexadecimal digits, of an OpenVINO .xml and its .bin."""
    hasher = hashlib.sha256(len(xml).to_bytes(8, "little"))
    hasher.update(xml)
    hasher.update(weights)
    return hasher.hexdigest().encode()
