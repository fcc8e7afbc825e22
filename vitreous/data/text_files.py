"""Read the text of annotation files, image lists and class lists, with one strict reader for all formats.

UTF-8 is read with or without a byte-order mark, UTF-16 and UTF-32 only with a mark. Other encodings are rejected with
an error that contains the line and the likely encoding.
"""

from __future__ import annotations

import codecs
import os
from pathlib import Path

from vitreous.data.decoding.decode import read_input_file
from vitreous.errors import DataError, escape_unprintable

BYTE_ORDER_MARK = "\ufeff"
ENCODINGS = {  # byte-order mark -> encoding; UTF-32 first, as the mark of UTF-16 LE is its prefix
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
SAVE_AS_UTF8 = "save the file as UTF-8"


def read_text(path: str | os.PathLike[str]) -> str:
    """Read a regular text file; an empty file yields an empty text.

    Raises DataError for a file that cannot be read, and, with the line, for an unsupported encoding.
    """
    file_path = Path(path)
    if file_path.is_file() and not file_path.stat().st_size:
        return ""
    return decode_text(read_input_file(path), escape_unprintable(path))


def read_lines(path: str | os.PathLike[str]) -> list[str]:
    """Read the lines of a text file, without line ends. Raises DataError as `read_text`."""
    return split_lines(read_text(path))


def contains_word(path: str | os.PathLike[str], word: str) -> bool:
    """Return whether a file contains an ASCII word in UTF-8, UTF-16 or UTF-32. Raises DataError for an unreadable
    file."""
    content = read_input_file(path)
    return any(
        word.encode(encoding) in content for encoding in ("utf-8", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be")
    )


def split_lines(text: str) -> list[str]:
    """Split a text at LF, CR LF and CR only: `str.splitlines` also splits at characters that names may contain."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return lines[:-1] if not lines[-1] else lines


def decode_text(content: bytes, name: str) -> str:
    """Decode the bytes of the text file `name`, and remove byte-order marks at the start of lines.

    Raises DataError, with `name` and the line, for an encoding other than UTF-8, UTF-16 and UTF-32, and for NUL
    bytes.
    """
    encoding = next(
        (encoding_name for byte_order_mark, encoding_name in ENCODINGS.items() if content.startswith(byte_order_mark)),
        "UTF-8",
    )
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        if encoding != "UTF-8":
            raise DataError(f"{name} is not valid {encoding} ({error.reason})", SAVE_AS_UTF8) from None
        raise wrong_encoding_error(content, name, error.start) from None
    if "\0" in text:
        raise wrong_encoding_error(content, name, content.index(b"\0"))
    # concatenated files have byte-order marks at the start of later lines
    return text.replace("\n" + BYTE_ORDER_MARK, "\n").removeprefix(BYTE_ORDER_MARK)


def wrong_encoding_error(content: bytes, name: str, position: int) -> DataError:
    """Return the error for the content of the file `name`, which is not UTF-8 at byte `position`, with the likely
    encoding."""
    line = content.count(b"\n", 0, position) + 1
    zero_shares = [
        content[start : start + 4096 : 2].count(0) / max(1, len(content[start : start + 4096 : 2])) for start in (0, 1)
    ]
    if max(zero_shares) > 0.4 and min(zero_shares) < 0.1:
        encoding_name = "UTF-16 LE" if zero_shares[1] > zero_shares[0] else "UTF-16 BE"
        return DataError(f"{name} looks like {encoding_name} without a byte-order mark", SAVE_AS_UTF8)
    if 0 in content[:4096]:
        return DataError(f"{name}, line {line}: NUL bytes; this is not a text file", "restore the text file")
    likely = "Windows-1252" if any(0x80 <= byte < 0xA0 for byte in content) else "Latin-1 (ISO 8859-1)"
    problem = f"{name}, line {line}: byte 0x{content[position]:02X} is not valid UTF-8; the file looks like {likely}"
    codec = "WINDOWS-1252" if likely.startswith("W") else "ISO-8859-1"
    return DataError(problem, f"{SAVE_AS_UTF8}, as with: iconv -f {codec} -t UTF-8")
