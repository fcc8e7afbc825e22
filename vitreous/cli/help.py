"""Format the help of `vitreous VERB --help` and `--help-all` from the options dataclass of the verb.

The description of an option is the string below its field. `SECTIONS` of a dataclass maps the first option of a section
to the section's title, and `COMMON` of a verb names the options that `--help` lists; a verb without it lists all.
"""

from __future__ import annotations

import ast
import inspect
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from tyro.conf import Positional, Suppress

MIN_LINE_WIDTH, MAX_LINE_WIDTH = 50, 100  # characters per line; between these, lines have the width of the terminal
DESCRIPTION_COLUMN = 26  # column at which descriptions start
MAX_INLINE_CHOICES = 40  # characters; a longer list of choices follows the description
FIRST_SECTION = "Options"
#: type of an option's value -> placeholder in the help
PLACEHOLDERS = {int: "INT", float: "FLOAT", str: "STR"}


@dataclass(frozen=True, kw_only=True)
class OptionHelp:
    """An option or positional argument in a help text: the field `name`, the title of its section, and its texts.

    `label` has the names of the option and the placeholder of its value, such as `--epochs FLOAT`.
    """

    name: str
    section: str
    label: str
    description: str
    is_positional: bool


def wants_help(arguments: Sequence[str]) -> bool:
    """Return whether the arguments contain `-h`, `--help` or `--help-all`."""
    return any(argument in ("-h", "--help", "--help-all") for argument in arguments)


def format_help(options_type: type[Any], verb: str, show_all: bool) -> str:
    """Format the help of a verb: its common options or, if `show_all` is set, all options by section."""
    entries = list(list_options(options_type))
    positional = [entry for entry in entries if entry.is_positional]
    options = [entry for entry in entries if not entry.is_positional]
    common = getattr(options_type, "COMMON", ())
    columns = shutil.get_terminal_size((MAX_LINE_WIDTH, 24)).columns
    width = max(MIN_LINE_WIDTH, min(MAX_LINE_WIDTH, columns))
    usage = " ".join(("usage: vitreous", verb, "[OPTIONS]", *(entry.label for entry in positional)))
    blocks = [
        usage,
        *(fill_paragraph(text, width) for text in inspect.cleandoc(options_type.__doc__ or "").split("\n\n")),
    ]
    if positional:
        blocks.append(format_section("Arguments", positional, width))
    if common and not show_all:
        entries_by_name = {entry.name: entry for entry in options}
        blocks.append(format_section("Common options", [entries_by_name[name] for name in common], width))
        blocks.append(f"All {len(options)} options: vitreous {verb} --help-all")
    else:
        for section in order_sections(options_type, options):
            section_entries = [entry for entry in options if entry.section == section]
            blocks.append(format_section(section, section_entries, width))
    blocks.append("--json prints one JSON document to stdout and everything else to stderr.")
    return "\n\n".join(blocks)


def fill_paragraph(text: str, width: int) -> str:
    """Wrap a paragraph at `width` characters; examples keep their line breaks."""
    if text.startswith("Example:"):
        return text
    return textwrap.fill(" ".join(text.split()), width, break_on_hyphens=False, break_long_words=False)


def order_sections(options_type: type[Any], options: Sequence[OptionHelp]) -> list[str]:
    """Return the titles of the sections that have options: first those of the verb's class, then those of its bases."""
    titles = [title for base in options_type.__mro__ for title in vars(base).get("SECTIONS", {}).values()]
    present = {entry.section for entry in options}
    return [title for title in dict.fromkeys((FIRST_SECTION, *titles)) if title in present]


def format_section(title: str, entries: Sequence[OptionHelp], width: int) -> str:
    """Format a section: label and description of each entry."""
    lines = [f"{title}:"]
    for entry in entries:
        wrapped = textwrap.wrap(
            entry.description, width - DESCRIPTION_COLUMN, break_on_hyphens=False, break_long_words=False
        )
        label = f"  {entry.label}"
        if len(label) > DESCRIPTION_COLUMN - 2:
            lines.append(label)
            label = ""
        lines.append(f"{label:{DESCRIPTION_COLUMN}}{wrapped[0] if wrapped else ''}".rstrip())
        lines += [" " * DESCRIPTION_COLUMN + line for line in wrapped[1:]]
    return "\n".join(lines)


def list_options(options_type: type[Any]) -> Iterator[OptionHelp]:
    """Yield the options of a dataclass in field order, without those marked `Suppress`."""
    hints = get_type_hints(options_type, include_extras=True)
    descriptions, sections = read_descriptions(options_type), read_sections(options_type)
    section = FIRST_SECTION
    for field in fields(options_type):
        section = sections.get(field.name, section)
        markers = get_annotation_markers(hints[field.name])
        if not any(marker in get_args(Suppress[int]) for marker in markers):
            is_positional = any(marker in get_args(Positional[int]) for marker in markers)
            label, choices = format_label(field, hints[field.name], markers, is_positional)
            texts = [descriptions.get(field.name, ""), choices, format_default(field)]
            description = " ".join(filter(None, texts))
            yield OptionHelp(
                name=field.name, section=section, label=label, description=description, is_positional=is_positional
            )


def read_descriptions(options_type: type[Any]) -> dict[str, str]:
    """Return field name -> description, the string below the field, for a dataclass and its bases."""
    descriptions: dict[str, str] = {}
    for base in reversed(options_type.__mro__[:-1]):
        descriptions |= parse_descriptions(base)
    return descriptions


@cache
def parse_descriptions(options_type: type[Any]) -> dict[str, str]:
    """Return field name -> description for the fields that a class itself defines, parsed from its source."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(options_type))).body
    descriptions: dict[str, str] = {}
    name = ""
    for node in getattr(tree, "body", ()):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and name:
            descriptions[name] = " ".join(str(node.value.value).split())
            name = ""
    return descriptions


def read_sections(options_type: type[Any]) -> dict[str, str]:
    """Return first option -> section title, from `SECTIONS` of a dataclass and its bases."""
    sections: dict[str, str] = {}
    for base in reversed(options_type.__mro__):
        sections |= vars(base).get("SECTIONS", {})
    return sections


def get_annotation_markers(hint: Any) -> tuple[Any, ...]:
    """Return the metadata of an `Annotated` type hint, in which tyro's markers are; empty for other hints."""
    return hint.__metadata__ if get_origin(hint) is Annotated else ()


def format_label(field: Field[Any], hint: Any, markers: Sequence[Any], is_positional: bool) -> tuple[str, str]:
    """Return the label of an option, such as `--epochs FLOAT`, and a sentence with its choices if they are too long for
    the label."""
    name = next((marker.name for marker in markers if getattr(marker, "name", None)), field.name).replace("_", "-")
    metavar = next((marker.metavar for marker in markers if getattr(marker, "metavar", None)), None)
    aliases = [alias for marker in markers for alias in getattr(marker, "aliases", None) or ()]
    if is_positional:
        return metavar or name.upper(), ""
    flags_text = ", ".join((f"--{name}", *aliases))
    if is_flag(hint):
        return (flags_text if field.default is False else f"{flags_text}, --no-{name}"), ""
    placeholder = metavar or format_type(hint)
    if len(placeholder) > MAX_INLINE_CHOICES:
        return f"{flags_text} NAME", f"One of {placeholder.strip('{}').replace(',', ', ')}."
    return f"{flags_text} {placeholder}", ""


def is_flag(hint: Any) -> bool:
    """Return whether an option of this type takes no value (`bool`, optional or not)."""
    if get_origin(hint) is Annotated:
        return is_flag(get_args(hint)[0])
    return hint is bool or set(get_args(hint)) == {bool, NoneType}


def format_type(hint: Any) -> str:
    """Return the placeholder of a type: `INT`, `{a,b}`, `FLOAT...`."""
    arguments = get_args(hint)
    if get_origin(hint) is Annotated:
        return format_type(arguments[0])
    if get_origin(hint) in (Union, UnionType):
        return "|".join(dict.fromkeys(format_type(argument) for argument in arguments if argument is not NoneType))
    if get_origin(hint) is Literal:
        return "{" + ",".join(map(str, arguments)) + "}"
    if get_origin(hint) is tuple:
        if arguments[-1] is Ellipsis:
            return f"{format_type(arguments[0])}..."
        return " ".join(map(format_type, arguments))
    return PLACEHOLDERS.get(hint, "STR")


def format_default(field: Field[Any]) -> str:
    """Format the default of an option: `(default: 8)`; an empty string if it is off, unset or empty by default."""
    default = field.default
    if default is MISSING or default is None or default is False or default in ("", ()):
        return ""
    value_text = (
        " ".join(map(str, default)) if isinstance(default, tuple) else "on" if default is True else str(default)
    )
    return f"(default: {value_text})"
