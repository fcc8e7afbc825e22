"""Expected errors: a message with the problem and its place, and a hint with the option or command that fixes it.

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

#: words that are the value of an option if they follow it; other words after an option belong to the sentence
OPTION_VALUES = """
auto balanced bf16 bicubic bicubic-antialias bicubic-offset class clip coco compiled cpu crop cuda ddim ddp ddpm detect
digits dino dinov2 dit dpm-solver euler even false fewshot fp16 fp32 fsdp heads heun huber inception int8 knn l1 linear
local mae masks mean-colour mlflow mse multiscale onnx openvino pixels regression repeat-factor retrieval segment siglip
sigmoid sit skip softmax tensorboard test timm torch torchvision train true val videomae vtab wandb yolo
"""
#: keyword names of options without a value
BOOLEAN_OPTIONS = """
allow_data_change boundary calibrate compile dry_run dynamic_size exact greedy keep_best live native_aspect override
overwrite private recompute reproducible resume tiles transformers update
"""
KEYWORD_NAMES = {"license": "licence"}  # option -> keyword, if their names differ
FOREIGN_OPTIONS = ("nproc-per-node", "shm-size", "upgrade", "force-reinstall")  # options of torchrun, docker and pip
PYTHON_VERBS = ("train", "evaluate", "inspect", "soup", "sample", "export", "push", "serve")  # verbs with a function
NUMBER_PATTERN = r"-?\d+(?:\.\d+)?(?:e-?\d+)?"


class VitreousError(Exception):
    """An expected error. `message` is the problem, `hint` the fix, `code` the exit code of the command."""

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
    """A self-supervised run that stopped because its features or targets collapsed (`--stop-on-collapse`)."""

    code = 7


class Interrupted(VitreousError):
    """A command stopped by a signal, after its state was saved. The exit code is 130 for SIGINT, 143 for SIGTERM."""

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
    """Compile two patterns: an option with its value, and a command of this package with its arguments.

    The value of an option is a quoted text, one or more numbers, a placeholder in capitals, a word of OPTION_VALUES, or
    a text with a character that words do not contain, such as a path or a size.
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
    """Format a command as a Python call; a command without a Python function is returned unchanged."""
    verb, argument_text = match.groups()
    if verb not in PYTHON_VERBS:
        return match.group()
    arguments = [_format_value(word) for word in re.split(r" --", argument_text)[0].split()]
    arguments += [_format_keyword(option) for option in compile_option_patterns()[0].finditer(argument_text)]
    return f"vitreous.{verb}({', '.join(arguments)})" if argument_text else f"vitreous.{verb}()"


def _format_keyword(match: re.Match[str]) -> str:
    """Format an option as a Python keyword; an option with a dot as an entry of the keyword `settings`."""
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
    """Format an option's value in Python syntax; placeholders in capitals are returned unchanged."""
    if re.fullmatch(rf"{NUMBER_PATTERN}|[A-Z][A-Z0-9-]*|'.*'|\.\.\.", value):
        return value
    return value.title() if value in ("true", "false", "True", "False") else f"'{value}'"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of Python or PyTorch means that memory ran out, on a GPU or a CPU.

    For a CPU, PyTorch raises a RuntimeError, which only its message distinguishes.
    """
    return isinstance(error, MemoryError) or "out of memory" in str(error) or "can't allocate memory" in str(error)


def escape_unprintable(path: str | os.PathLike[str]) -> str:
    """Return a path as printable text on one line; unprintable characters and invalid bytes are escaped."""
    text = os.fspath(path)
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def format_first_lines(lines: Iterable[str], count: int, limit: int = 20) -> str:
    """Format the first `limit` of `count` lines for the end of a message, one indented line each.

    If lines are omitted, their number follows.
    """
    more = [f"and {count - limit} more"] if count > limit else []
    return "".join(f"\n    {line}" for line in [*islice(lines, limit), *more])


def format_first_names(names: Iterable[str], limit: int = 20) -> str:
    """Format the first `limit` names for a message, separated by commas: `a, b and 3 more`."""
    names = list(names)
    more = f" and {len(names) - limit:,} more" if len(names) > limit else ""
    return ", ".join(map(escape_unprintable, names[:limit])) + more


def install_hint(*extras: str, pip: str = "pip") -> str:
    """Return the command that installs extras of this package, for error hints: `pip install 'vitreous[serve]'`.

    If the package is already installed, from an index or from a checkout, pip only installs the libraries of the
    extras.

    Args:
        extras: names of extras; if there are none, the command installs the required libraries of the package.
        pip: the command that runs pip.
    """
    requirement = f"vitreous[{','.join(extras)}]" if extras else "vitreous"
    return f"{pip} install {shlex.quote(requirement)}"


def require_installed(libraries: Iterable[str], extra: str) -> None:
    """Raise ResourceError, with the command that installs `extra`, if one of its `libraries` is not installed."""
    for name in libraries:
        if find_spec(name) is None:
            raise ResourceError(f"{name} is not installed", install_hint(extra))


def check_path_argument(value: object, argument: str) -> None:
    """Raise UsageError for a value that is not a path or a name, such as a torch.nn.Module.

    `argument` names the argument in the message: `load(run)`.
    """
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
    """Return the hint `did you mean X?` for the candidate that is most similar to `name`; empty if none is similar."""
    match = find_closest_match(name, candidates)
    return f"did you mean {match}?" if match else ""


def find_closest_match(name: str, candidates: Iterable[str]) -> str:
    """Return the candidate that is most similar to `name`; an empty string if none is similar."""
    matches = difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.6)
    return matches[0] if matches else ""
