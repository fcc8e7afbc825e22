"""Errors with a fix: what is wrong, where, and the option or command that fixes it.

Every command prints a `VitreousError` as two lines on stderr and exits with its code; other exceptions are bugs.
`message` and `hint` name options as on the command line, `--image-size 240`. `str(error)` has them as Python keywords,
`image_size=240`: `options_to_keywords` converts them.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from itertools import islice

#: words that are values of options; other words after an option belong to the sentence
OPTION_VALUES = """
auto balanced bf16 bicubic bicubic-antialias bicubic-offset class coco compiled cpu crop cuda ddim ddp ddpm detect
digits dino dinov2 dit dpm-solver euler even false fp16 fp32 fsdp heun huber inception int8 knn l1 linear local mae
masks mean-colour mlflow mse multiscale onnx openvino pixels regression repeat-factor segment sigmoid sit skip softmax
tensorboard test timm torch torchvision train true val videomae vtab wandb yolo
"""
#: flags (options without a value), by their names as keywords
BOOLEAN_OPTIONS = """
allow_data_change boundary calibrate compile dry_run dynamic_size exact greedy keep_best live native_aspect override
overwrite private recompute reproducible resume tiles transformers update
"""
KEYWORD_NAMES = {"license": "licence"}  # options whose keyword has another name
FOREIGN_OPTIONS = ("nproc-per-node", "shm-size", "upgrade", "force-reinstall")  # of torchrun, docker and pip
PYTHON_VERBS = ("train", "evaluate", "inspect", "soup", "sample", "export", "push", "serve")  # public functions
NUMBER_PATTERN = r"-?\d+(?:\.\d+)?(?:e-?\d+)?"


class VitreousError(Exception):
    """An expected error with a fix. `hint` is the second line of the message, `code` the exit code."""

    code: int = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message: str = message
        self.hint: str = hint

    def __str__(self) -> str:
        return options_to_keywords(f"{self.message}\n  {self.hint}" if self.hint else self.message)


class UsageError(VitreousError):
    """An invalid option, value or configuration."""

    code: int = 2


class DataError(VitreousError):
    """Images or labels that cannot be used."""

    code: int = 3


class EmptyImageError(DataError):
    """An image without any valid pixel, such as a tile at the edge of a satellite scene."""


class WeightsError(VitreousError):
    """Weights or a checkpoint that cannot be loaded."""

    code: int = 4


class NonFiniteError(VitreousError):
    """A loss or a gradient that is NaN or infinite."""

    code: int = 5


class ResourceError(VitreousError):
    """A failure of disk, memory or a worker process."""

    code: int = 6


class CollapseError(VitreousError):
    """A run without labels that stopped because its features or targets collapsed (`--stop-on-collapse`)."""

    code = 7


class Interrupted(VitreousError):
    """A run stopped by a signal, with everything saved. SIGINT exits with 130, SIGTERM with 143."""

    def __init__(self, message: str, hint: str = "", code: int = 130) -> None:
        super().__init__(message, hint)
        self.code = code


def options_to_keywords(text: str) -> str:
    """Convert command-line options in a message to Python keywords: `--image-size 240` to `image_size=240`, and
    `vitreous train DATA --resume` to `vitreous.train(DATA, resume=True)`.

    Commands without a Python function are unchanged.
    """
    option, command = compile_option_patterns()
    chunks, end = [], 0
    for match in command.finditer(text):
        chunks += [option.sub(_format_keyword, text[end : match.start()]), _format_call(match)]
        end = match.end()
    return "".join(chunks) + option.sub(_format_keyword, text[end:])


@cache
def compile_option_patterns() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Compile the patterns of an option with its value, and of a command of this package with its arguments.

    A value is quoted, one or several numbers, a placeholder in capitals, one of OPTION_VALUES, or contains a character
    that is not used in words, as in paths and sizes.
    """
    value_words = "|".join(re.escape(word) for word in sorted(OPTION_VALUES.split(), key=len, reverse=True))
    value = (
        rf"'[^']*'|{NUMBER_PATTERN}(?: {NUMBER_PATTERN})*(?![\w/.]*[\w/])|[A-Z][A-Z0-9]*(?:-[A-Z]+)*(?![\w/])"
        rf"|(?:{value_words})(?![\w/:.-]*[\w/])|(?!and/or)[^\s,;()`'\"]*[/:\d=][^\s,;()`'\"]*[^\s,;:.()`'\"]"
    )
    option = re.compile(rf"(?<![\w-])--(no-)?([a-z][a-z0-9]*(?:[-.][a-z0-9]+)*)(?:[ =]({value}))?")
    verb = r"(?<!-m )\bvitreous ([a-z]+(?: (?:check|dedup|convert|pack)\b)?)"
    return option, re.compile(rf"{verb}((?: (?:--[a-z][a-z0-9.-]*(?:=\S+)?|{value}|\.\.\.))*)")


def _format_call(match: re.Match[str]) -> str:
    """Format a command as a Python call; unchanged if there is no such function."""
    verb, argument_text = match.groups()
    if verb not in PYTHON_VERBS:
        return match.group()
    arguments = [_format_value(word) for word in re.split(r" --", argument_text)[0].split()]
    arguments += [_format_keyword(option) for option in compile_option_patterns()[0].finditer(argument_text)]
    return f"vitreous.{verb}({', '.join(arguments)})" if argument_text else f"vitreous.{verb}()"


def _format_keyword(match: re.Match[str]) -> str:
    """Format an option as a keyword; an option with a dot is a setting of the run."""
    negated, option, value = match.groups()
    if option in FOREIGN_OPTIONS:
        return match.group()
    if "." in option:
        name = option.replace("-", "_")
        return f"settings={{'{name}': [{', '.join(map(repr, value.split()))}]}}" if value else f"setting {name}"
    name = KEYWORD_NAMES.get(option, option.replace("-", "_"))
    if value is not None:
        values = [_format_value(word) for word in ([value] if value[0] == "'" else value.split())]
        return f"{name}={values[0] if len(values) == 1 else '(' + ', '.join(values) + ')'}"
    return f"{name}=False" if negated else f"{name}=True" if name in BOOLEAN_OPTIONS.split() else name


def _format_value(value: str) -> str:
    """Format a value in Python syntax; placeholders in capitals are unchanged."""
    if re.fullmatch(rf"{NUMBER_PATTERN}|[A-Z][A-Z0-9-]*|'.*'|\.\.\.", value):
        return value
    return value.title() if value in ("true", "false", "True", "False") else f"'{value}'"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means out of memory, of Python or PyTorch, on a GPU or a CPU; for the latter PyTorch
    raises a plain RuntimeError."""
    return isinstance(error, MemoryError) or "out of memory" in str(error) or "can't allocate memory" in str(error)


def escape_unprintable(path: str | os.PathLike[str]) -> str:
    """Return a path as one line of printable text, for any bytes."""
    text = os.fspath(path)
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def format_first_lines(lines: Iterable[str], count: int, limit: int = 20) -> str:
    """Format the first `limit` of `count` lines for appending to a message: one indented line each, then the number of
    omitted lines."""
    more = [f"and {count - limit} more"] if count > limit else []
    return "".join(f"\n    {line}" for line in [*islice(lines, limit), *more])


def format_first_names(names: Iterable[str], limit: int = 20) -> str:
    """Format the first `limit` names for a message, separated by commas, then the number of omitted names."""
    names = list(names)
    more = f" and {len(names) - limit:,} more" if len(names) > limit else ""
    return ", ".join(map(escape_unprintable, names[:limit])) + more


def install_hint(*extras: str, pip: str = "pip") -> str:
    """Return the command that installs extras of this package, for error hints: `pip install 'vitreous[serve]'`.

    In an environment with the package, from an index or from a checkout, pip only adds the extras' libraries.

    Args:
        extras: names of extras; without any, the command installs what the package itself requires.
        pip: the command that runs pip.
    """
    requirement = f"vitreous[{','.join(extras)}]" if extras else "vitreous"
    return f"{pip} install {shlex.quote(requirement)}"


def require_installed(libraries: Iterable[str], extra: str) -> None:
    """Raise ResourceError for a library that is not installed, with the extra that contains it."""
    for name in libraries:
        if find_spec(name) is None:
            raise ResourceError(f"{name} is not installed", install_hint(extra))


def check_path_argument(value: object, argument: str) -> None:
    """Raise UsageError for a value that is not a path or a name, such as a torch.nn.Module; `argument` is the argument
    in messages, `load(run)`."""
    if isinstance(value, (str, os.PathLike)):
        return
    type_name = type(value).__name__
    if hasattr(value, "state_dict"):
        hint = "save it with vitreous.save(module, FOLDER) and pass the folder"
        raise UsageError(f"{argument} must be a path or a name, not a module ({type_name})", hint)
    raise UsageError(
        f"{argument} must be a path or a name, not a {type_name}",
        "pass the path of a run, a bundle or a file of weights",
    )


def suggest_nearest(name: str, candidates: Iterable[str]) -> str:
    """Return the text `did you mean X?` for the known word most similar to `name`, or an empty string."""
    match = find_closest_match(name, candidates)
    return f"did you mean {match}?" if match else ""


def find_closest_match(name: str, candidates: Iterable[str]) -> str:
    """Return the known word most similar to `name`, or an empty string."""
    matches = difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.6)
    return matches[0] if matches else ""
