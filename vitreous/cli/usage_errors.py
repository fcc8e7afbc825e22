"""Find the invalid option, value or argument of a command that the parser rejects."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vitreous.cli.help import list_options
from vitreous.config import get_annotated_hints, get_field_types, get_literal_values, get_tagged_union
from vitreous.errors import UsageError, suggest_nearest

NUMBERS = {"INT": (int, "a whole number"), "FLOAT": (float, "a number")}


@dataclass(frozen=True)
class Parameter:
    """An option or argument of a verb: its names and its allowed values.

    `placeholder` is that of the help (`INT`), empty for an option without value. `choices` are the allowed values, if
    they are listed. With `takes_many`, any number of values is allowed.
    """

    names: tuple[str, ...]
    placeholder: str
    choices: tuple[str, ...]
    takes_many: bool
    is_required: bool

    def explain_value(self, name: str, value: str) -> UsageError | None:
        """Return the error for a value of the wrong type, or None."""
        if self.choices and value not in self.choices:
            nearest = suggest_nearest(value, self.choices)
            return UsageError(f"{name} cannot be {value!r}", nearest or f"use one of {', '.join(self.choices)}")
        number_type, noun = NUMBERS.get(self.placeholder.rstrip("."), (str, ""))
        try:
            number_type(value)
        except ValueError:
            return UsageError(f"{name} cannot be {value!r}", f"use {noun}")
        return None


def explain_usage_error(options_type: type[Any], verb: str, arguments: Sequence[str]) -> UsageError:
    """Return the error for the first invalid option, value or argument, in the order of the command line."""
    options, positionals = list_parameters(options_type)
    options_by_name = {name: option for option in options for name in option.names}
    words, values = list(arguments), []
    while words:
        word = words.pop(0)
        if not word.startswith("-") or is_number(word) or word == "-":
            values.append(word)
            continue
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        if name not in options_by_name:
            setting = suggest_setting(name) if "settings" in options_type.__dataclass_fields__ else ""
            hint = (
                setting or suggest_nearest(name, options_by_name) or f"`vitreous {verb} --help-all` lists all options"
            )
            return UsageError(f"unknown option {name}", hint)
        option = options_by_name[name]
        if not option.placeholder:
            continue
        option_values = [value] if equals else []
        while words and not equals and (not words[0].startswith("-") or is_number(words[0])):
            option_values.append(words.pop(0))
            if not option.takes_many:
                break
        if not option_values:
            return UsageError(f"{name} needs a value", f"use {name} {option.placeholder}")
        for item in option_values:
            if error := option.explain_value(name, item):
                return error
    return explain_arguments(verb, positionals, values)


def explain_arguments(verb: str, positionals: Sequence[Parameter], values: Sequence[str]) -> UsageError:
    """Return the error for missing, surplus or invalid positional arguments; a general one if all seem valid."""
    usage = " ".join([f"vitreous {verb}", *(parameter.names[0] for parameter in positionals)])
    remaining = list(values)
    for parameter in positionals:
        if not remaining:
            if parameter.is_required:
                return UsageError(f"{parameter.names[0]} is missing", f"use {usage}")
            break
        parameter_values, remaining = (remaining, []) if parameter.takes_many else (remaining[:1], remaining[1:])
        for value in parameter_values:
            if error := parameter.explain_value(parameter.names[0], value):
                return error
    if remaining:
        return UsageError(f"unexpected argument {remaining[0]!r}", f"use {usage}")
    return UsageError("invalid options", f"`vitreous {verb} --help` shows the options")


def list_parameters(options_type: type[Any]) -> tuple[list[Parameter], list[Parameter]]:
    """Return the options and the positional arguments of a verb."""
    types = get_field_types(options_type)
    fields = {field.name: field for field in dataclasses.fields(options_type)}
    options: list[Parameter] = []
    positionals: list[Parameter] = []
    for entry in list_options(options_type):
        names = tuple(re.findall(r"(?<!\S)--?[A-Za-z][\w-]*", entry.label))
        placeholder = entry.label.partition(" ")[2].split(", ")[-1].rpartition(" ")[2] if names else entry.label
        placeholder = "" if placeholder.startswith("-") else placeholder
        field = fields[entry.name]
        is_required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        parameter = Parameter(
            names=names or (entry.label,),
            placeholder=placeholder,
            choices=tuple(map(str, get_literal_values(types[entry.name]))),
            takes_many="tuple" in str(types[entry.name]),
            is_required=is_required,
        )
        (positionals if entry.is_positional else options).append(parameter)
    return options, positionals


def suggest_setting(name: str) -> str:
    """Return `did you mean --views.flip?` for `--flip`: a setting of `config.yaml` that ends in the name; else ""."""
    from vitreous.training.run import Run

    field = name.removeprefix("--").replace("-", "_")
    paths = [path for path in iterate_setting_paths(Run) if path.rpartition(".")[2] == field]
    return f"did you mean --{paths[0]}?" if paths else ""


def iterate_setting_paths(config_type: type[Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted path of each field in a config's sections. Of several variants, only the default is used."""
    for name, hint in get_annotated_hints(config_type).items():
        union = get_tagged_union(hint)
        section = union.pick({}) if union else hint
        if isinstance(section, type) and dataclasses.is_dataclass(section):
            yield from iterate_setting_paths(section, f"{prefix}{name}.")
        elif prefix:
            yield f"{prefix}{name}"


def is_number(word: str) -> bool:
    """Return whether a word that begins with a minus sign is a negative number."""
    return bool(re.fullmatch(r"-\.?\d.*", word))
