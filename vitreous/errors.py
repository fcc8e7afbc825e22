"""Errors a user can act on: what was wrong, where, and the option or command that fixes it.

Every verb turns a `VitreousError` into two lines on stderr and the exit code below; nothing else may reach a user.
`message` and `hint` name options as the command line has them, `--image-size 240`. `str(error)`, which Python shows,
has them as keywords, `image_size=240`: `options_to_keywords` converts them.
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
#: options without a value, by their names as keywords
BOOLEAN_OPTIONS = """
allow_data_change boundary calibrate compile dry_run dynamic_size exact greedy keep_best live native_aspect override
overwrite private recompute reproducible resume tiles transformers update
"""
KEYWORD_NAMES = {"license": "licence"}  # options whose keyword has another name
FOREIGN_OPTIONS = ("nproc-per-node", "shm-size", "upgrade", "force-reinstall")  # of torchrun, docker and pip
PYTHON_VERBS = ("train", "evaluate", "inspect", "soup", "sample", "export", "push", "serve")  # public functions
NUMBER_PATTERN = r"-?\d+(?:\.\d+)?(?:e-?\d+)?"


class VitreousError(Exception):
    """A refusal with a way out. `hint` is the second line of the message, `code` the exit code."""

    code: int = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message: str = message
        self.hint: str = hint

    def __str__(self) -> str:
        return options_to_keywords(f"{self.message}\n  {self.hint}" if self.hint else self.message)


class UsageError(VitreousError):
    """An option, a value or a configuration that cannot be meant."""

    code: int = 2


class DataError(VitreousError):
    """Images or labels that cannot be used as they are."""

    code: int = 3


class EmptyImageError(DataError):
    """An image without a pixel that has data, as tiles at the edge of a satellite scene are."""


class WeightsError(VitreousError):
    """Weights or a checkpoint that must not be loaded."""

    code: int = 4


class NonFiniteError(VitreousError):
    """A loss or a gradient that is NaN or infinite."""

    code: int = 5


class ResourceError(VitreousError):
    """Disk, memory or a worker process that gave out."""

    code: int = 6


class CollapseError(VitreousError):
    """A run without labels that was stopped because its features or targets collapsed (`--stop-on-collapse`)."""

    code = 7


class Interrupted(VitreousError):
    """Stopped by a signal, with everything saved. SIGINT exits 130, SIGTERM 143."""

    def __init__(self, message: str, hint: str = "", code: int = 130) -> None:
        super().__init__(message, hint)
        self.code = code


def options_to_keywords(text: str) -> str:
    """A message with options of the command line as keywords of Python: `--image-size 240` as `image_size=240`, and
    `vitreous train DATA --resume` as `vitreous.train(DATA, resume=True)`.

    Commands that Python has no function for stay as they are.
    """
    option, command = compile_option_patterns()
    chunks, end = [], 0
    for match in command.finditer(text):
        chunks += [option.sub(_format_keyword, text[end : match.start()]), _format_call(match)]
        end = match.end()
    return "".join(chunks) + option.sub(_format_keyword, text[end:])


@cache
def compile_option_patterns() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """What matches an option with its value, and a command of this package with its arguments.

    A value is quoted, a number or several, a placeholder in capitals, one of OPTION_WORDS, or has a character that no
    word of a sentence has, as paths and sizes have.
    """
    words = "|".join(re.escape(word) for word in sorted(OPTION_VALUES.split(), key=len, reverse=True))
    value = (
        rf"'[^']*'|{NUMBER_PATTERN}(?: {NUMBER_PATTERN})*(?![\w/.]*[\w/])|[A-Z][A-Z0-9]*(?:-[A-Z]+)*(?![\w/])"
        rf"|(?:{words})(?![\w/:.-]*[\w/])|(?!and/or)[^\s,;()`'\"]*[/:\d=][^\s,;()`'\"]*[^\s,;:.()`'\"]"
    )
    option = re.compile(rf"(?<![\w-])--(no-)?([a-z][a-z0-9]*(?:[-.][a-z0-9]+)*)(?:[ =]({value}))?")
    verb = r"(?<!-m )\bvitreous ([a-z]+(?: (?:check|dedup|convert|pack)\b)?)"
    return option, re.compile(rf"{verb}((?: (?:--[a-z][a-z0-9.-]*(?:=\S+)?|{value}|\.\.\.))*)")


def _format_call(match: re.Match[str]) -> str:
    """A command as a call; as it is where Python has no such function."""
    verb, words = match.groups()
    if verb not in PYTHON_VERBS:
        return match.group()
    arguments = [_format_value(word) for word in re.split(r" --", words)[0].split()]
    arguments += [_format_keyword(option) for option in compile_option_patterns()[0].finditer(words)]
    return f"vitreous.{verb}({', '.join(arguments)})" if words else f"vitreous.{verb}()"


def _format_keyword(match: re.Match[str]) -> str:
    """An option as a keyword; an option with a dot is a setting of the run."""
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
    """A value as Python writes it; placeholders in capitals stay."""
    if re.fullmatch(rf"{NUMBER_PATTERN}|[A-Z][A-Z0-9-]*|'.*'|\.\.\.", value):
        return value
    return value.title() if value in ("true", "false", "True", "False") else f"'{value}'"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory gave out, Python's or PyTorch's, on a GPU or a CPU; PyTorch says the latter with a plain
    RuntimeError."""
    return isinstance(error, MemoryError) or "out of memory" in str(error) or "can't allocate memory" in str(error)


def escape_unprintable(path: str | os.PathLike[str]) -> str:
    """A path as one line of text, whatever bytes it holds."""
    text = os.fspath(path)
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def format_first_lines(lines: Iterable[str], count: int, most: int = 20) -> str:
    """The first `most` of `count` lines, for the end of a message: each on an indented line, and how many more there
    are."""
    more = [f"and {count - most} more"] if count > most else []
    return "".join(f"\n    {line}" for line in [*islice(lines, most), *more])


def format_first_names(names: Iterable[str], most: int = 20) -> str:
    """The first `most` names, for the middle of a message: separated by commas, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(map(escape_unprintable, names[:most])) + more


def install_hint(*extras: str, pip: str = "pip") -> str:
    """Return the command that installs extras of this package, for error hints: `pip install 'vitreous[serve]'`.

    In an environment that has the package, from an index or from a checkout, pip adds the extras' libraries alone.

    Args:
        extras: names of extras; without any, the command installs what the package itself requires.
        pip: the command that runs pip.
    """
    requirement = f"vitreous[{','.join(extras)}]" if extras else "vitreous"
    return f"{pip} install {shlex.quote(requirement)}"


def require_installed(libraries: Iterable[str], extra: str) -> None:
    """Raise ResourceError for a library that is not installed, which the extra of this name brings."""
    for name in libraries:
        if find_spec(name) is None:
            raise ResourceError(f"{name} is not installed", install_hint(extra))


def check_path_argument(value: object, argument: str) -> None:
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


def suggest_nearest(word: str, known: Iterable[str]) -> str:
    """The known word most like `word`, as the text `did you mean X?`, or an empty string."""
    near = find_closest_match(word, known)
    return f"did you mean {near}?" if near else ""


def find_closest_match(word: str, known: Iterable[str]) -> str:
    """The known word most like `word`, or an empty string."""
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else ""
