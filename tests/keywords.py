"""Write the generated part of `vitreous/keywords.py`: `python -m tests.keywords`.

The file has the types of the public functions' keywords and the names of models. Type checkers cannot derive a
`TypedDict` from a dataclass, so this module does, from the option dataclasses. `tests/test_typing.py` fails if the file
differs from the output of this module.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from vitreous.config import FilePath
from vitreous.inference.options import InferenceOptions
from vitreous.inference.samples import SampleOptions
from vitreous.models.config import BiTConfig, DiTConfig, ModelConfig, PositionResize, SwinConfig, ViTConfig
from vitreous.models.names import MODEL_NAMES, config_from_name
from vitreous.recipes.options import TrainOptions
from vitreous.reports.evaluate import EvaluateOptions
from vitreous.reports.figures.subject import InspectOptions
from vitreous.reports.generated import GenerationOptions
from vitreous.reports.protocols.task import ProtocolOptions

KEYWORDS_FILE = Path(__file__).parent.parent / "vitreous" / "keywords.py"
GENERATED_MARKER = "# Everything below is written by `python -m tests.keywords`.\n"
NAME_TYPES: dict[str, type[ModelConfig]] = {
    "ViTName": ViTConfig,
    "SwinName": SwinConfig,
    "BiTName": BiTConfig,
    "DiTName": DiTConfig,
}
LOADER_PARAMETERS = ("batch_size", "seed", "workers")  # parameters of `create_loader`
EVALUATE_PARAMETERS = ("split", "batch_size", "workers", "bad_images", "protocol")


class KeywordClass(NamedTuple):
    """A class of keywords: its name, base and docstring, and the dataclasses of its fields, minus excluded fields."""

    name: str
    base: str
    text: str
    kinds: tuple[type[Any], ...]
    without: tuple[str, ...] = ()


EVALUATE_GROUPS = (EvaluateOptions, ProtocolOptions, GenerationOptions)
KEYWORD_CLASSES = (
    KeywordClass(
        "LoaderKeywords",
        "TypedDict",
        "Fields of `TrainOptions` that are keywords of `vitreous.create_loader` besides its parameters.",
        (TrainOptions,),
        ("data", *LOADER_PARAMETERS),
    ),
    KeywordClass(
        "TrainKeywords",
        "LoaderKeywords",
        "Fields of `TrainOptions`: keywords of `vitreous.train`.",
        (TrainOptions,),
        tuple(name for name in TrainOptions.__dataclass_fields__ if name not in LOADER_PARAMETERS),
    ),
    KeywordClass(
        "ComputeKeywords",
        "TypedDict",
        "Fields of `InferenceOptions`: keywords of `vitreous.load`.",
        (InferenceOptions,),
    ),
    KeywordClass(
        "EvaluateKeywords",
        "ComputeKeywords",
        "Fields of the options of evaluations, protocols and generated images: keywords of `vitreous.evaluate`.",
        EVALUATE_GROUPS,
        EVALUATE_PARAMETERS,
    ),
    KeywordClass(
        "InspectKeywords", "TypedDict", "Fields of `InspectOptions`: keywords of `vitreous.inspect`.", (InspectOptions,)
    ),
    KeywordClass(
        "SampleKeywords", "TypedDict", "Fields of `SampleOptions`: keywords of `vitreous.sample`.", (SampleOptions,)
    ),
)


def render_type(hint: Any, path: bool = False) -> str:
    """Render a type as source text, with additional types accepted from Python: any path for text marked `FilePath`, a
    sequence or a single value for a tuple of any length."""
    if hint == PositionResize:
        return "PositionResize"
    arguments = get_args(hint)
    if get_origin(hint) is Annotated:
        return render_type(arguments[0], FilePath in hint.__metadata__)
    if get_origin(hint) in (Union, UnionType):
        ordered = sorted(arguments, key=lambda argument: argument is NoneType)
        return " | ".join(render_type(argument, path) for argument in ordered)
    if get_origin(hint) is Literal:
        return f"Literal[{', '.join(map(repr, arguments))}]"
    if get_origin(hint) is tuple and arguments[-1] is Ellipsis:
        argument = render_type(arguments[0], path)
        return f"{argument} | Sequence[{argument}]"
    if get_origin(hint) is not None:
        return f"{get_origin(hint).__name__}[{', '.join(map(render_type, arguments))}]"
    return "PathLike" if path and hint is str else "None" if hint is NoneType else hint.__name__


def render_keywords(keywords: KeywordClass) -> Iterator[str]:
    """Render a class of keywords as lines."""
    yield f"class {keywords.name}({keywords.base}, total=False):"
    yield f'    """{keywords.text}"""\n'
    names: dict[str, str] = {}
    for options_class in keywords.kinds:
        hints = get_type_hints(options_class, include_extras=True)
        for field in dataclasses.fields(options_class):
            if field.name not in keywords.without:
                names.setdefault(field.name, render_type(hints[field.name]))
    yield from (f"    {name}: {text}" for name, text in names.items())
    yield "\n"


def render_names() -> Iterator[str]:
    """Render the names that `vitreous models` lists as literal types, by model class."""
    yield "#: names that `vitreous models` lists, by the class of their models, also in lower case"
    for name, config_class in NAME_TYPES.items():
        class_names = [text for text in MODEL_NAMES if isinstance(config_from_name(text), config_class)]
        both = dict.fromkeys(word for text in class_names for word in (text, text.lower()))
        literals = ", ".join(f'"{word}"' for word in both)
        lines = textwrap.wrap(literals, 116, break_on_hyphens=False)
        yield f"{name}: TypeAlias = Literal[\n{textwrap.indent(chr(10).join(lines), '    ')}\n]\n"


def render_file() -> str:
    """Render the file before formatting: the handwritten part above the marker, and the generated part."""
    written, mark, _ = KEYWORDS_FILE.read_text("utf-8").partition(GENERATED_MARKER)
    lines = [
        "# fmt: off",
        *render_names(),
        "# fmt: on\n\n",
        *(line for keywords in KEYWORD_CLASSES for line in render_keywords(keywords)),
    ]
    return written + mark + "\n".join(lines)


if __name__ == "__main__":
    KEYWORDS_FILE.write_text(render_file(), "utf-8")
    subprocess.run([sys.executable, "-m", "ruff", "format", str(KEYWORDS_FILE)], check=True)
