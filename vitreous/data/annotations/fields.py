"""Read single values of annotation files (ids, flags and class names) with the same checks for all formats."""

from __future__ import annotations

from typing import Any, TypeGuard

from vitreous.errors import DataError, escape_unprintable

FLAG_VALUES = {"0": False, "1": True, "false": False, "true": True, "": False}


def read_id(entry: dict[str, Any], key: str, location: str) -> int:
    """Read the integer id `key` of a JSON object. `7.0`, as spreadsheets write it, is read as 7.

    Raises DataError, with `location`, for a missing id and for values that are not integers.
    """
    value: Any = entry.get(key)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if is_integer(value):
        return value
    if key not in entry:
        raise DataError(f"{location} has no {key}", f"give it an integer {key}")
    raise DataError(f"{location}: {key} {shorten_value(value)} is not an integer", f"give it an integer {key}")


def is_integer(value: Any) -> TypeGuard[int]:
    """Return whether a JSON value is an integer; true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def read_flag(value: Any, name: str, location: str) -> bool:
    """Read a flag: 0 or 1, or true or false, as a number or as text; a missing value (None) is false.

    Raises DataError, with `location`, for any other value.
    """
    if value is None:
        return False
    flag = FLAG_VALUES.get(str(value).strip().lower()) if isinstance(value, int | str) else None
    if flag is None and isinstance(value, float) and value in (0.0, 1.0):
        flag = bool(value)
    if flag is None:
        raise DataError(f"{location}: {name} {shorten_value(value)} is not 0 or 1", f"set {name} to 0 or 1")
    return flag


def read_class_name(value: Any, location: str, key: str = "name") -> str:
    """Read the name of a class, the value of `key`, without surrounding spaces. Raises DataError, with `location`, if
    it is empty or not text."""
    if value is None or (isinstance(value, str) and not value.strip()):
        raise DataError(f"{location} has no {key}", "add the class name")
    if not isinstance(value, str):
        raise DataError(f"{location}: {key} {shorten_value(value)} is not text", "write the name of the class as text")
    return value.strip()


def shorten_value(value: Any, max_length: int = 40) -> str:
    """Format a value of an annotation file for a message, on one line of at most `max_length` characters."""
    text = escape_unprintable(repr(value))
    return text if len(text) <= max_length else text[: max_length - 1] + "…"
