"""Errors a user can act on: what was wrong, where, and the option or command that mends it.

Every verb turns a `VitreousError` into two lines on stderr and the exit code below; nothing else may reach a user.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from importlib.util import find_spec
from itertools import islice


class VitreousError(Exception):
    """A refusal with a way out. `hint` is the second line of the message, `code` the exit code."""

    code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message, self.hint = message, hint

    def __str__(self) -> str:
        return f"{self.message}\n  {self.hint}" if self.hint else self.message


class UsageError(VitreousError):
    """An option, a value or a configuration that cannot be meant."""

    code = 2


class DataError(VitreousError):
    """Images or labels that cannot be used as they are."""

    code = 3


class WeightsError(VitreousError):
    """Weights or a checkpoint that must not be loaded."""

    code = 4


class NonFiniteError(VitreousError):
    """A loss or a gradient that is NaN or infinite."""

    code = 5


class ResourceError(VitreousError):
    """Disk, memory or a worker process that gave out."""

    code = 6


class CollapseError(VitreousError):
    """A run without labels that was stopped because its features or targets collapsed (`--stop-on-collapse`)."""

    code = 7


class Interrupted(VitreousError):
    """Stopped by a signal, with everything saved. SIGINT exits 130, SIGTERM 143."""

    def __init__(self, message: str, hint: str = "", code: int = 130) -> None:
        super().__init__(message, hint)
        self.code = code


def out_of_memory(error: BaseException) -> bool:
    """Whether memory gave out, Python's or PyTorch's, on a GPU or a CPU; PyTorch says the latter with a plain
    RuntimeError."""
    return isinstance(error, MemoryError) or "out of memory" in str(error) or "can't allocate memory" in str(error)


def printable(path: str | os.PathLike[str]) -> str:
    """A path as one line of text, whatever bytes it holds."""
    text = os.fspath(path)
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def first_lines(lines: Iterable[str], count: int, most: int = 20) -> str:
    """The first `most` of `count` lines, for the end of a message: each on an indented line, and how many more there
    are."""
    more = [f"and {count - most} more"] if count > most else []
    return "".join(f"\n    {line}" for line in [*islice(lines, most), *more])


def first_names(names: Iterable[str], most: int = 20) -> str:
    """The first `most` names, for the middle of a message: separated by commas, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(map(printable, names[:most])) + more


def check_installed(libraries: Iterable[str], extra: str) -> None:
    """Raise ResourceError for a library that is not installed, which the extra of this name brings."""
    for name in libraries:
        if find_spec(name) is None:
            raise ResourceError(f"{name} is not installed", f"pip install 'vitreous[{extra}]'")


def check_path(value: object, argument: str) -> None:
    """Raise UsageError for what is no path or name, such as a torch.nn.Module; `argument` says what it stands for,
    `load(run)`."""
    if isinstance(value, (str, os.PathLike)):
        return
    kind = type(value).__name__
    if hasattr(value, "state_dict"):
        hint = "write it with vitreous.save(module, FOLDER) and give the folder"
        raise UsageError(f"{argument} is a path or a name, not a module ({kind})", hint)
    raise UsageError(
        f"{argument} is a path or a name, not a {kind}", "give the path of a run, a bundle or a file of weights"
    )


def nearest(word: str, known: Iterable[str]) -> str:
    """The known word most like `word`, as the text `did you mean X?`, or an empty string."""
    near = closest(word, known)
    return f"did you mean {near}?" if near else ""


def closest(word: str, known: Iterable[str]) -> str:
    """The known word most like `word`, or an empty string."""
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else ""
