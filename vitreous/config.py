"""Convert frozen dataclasses to and from YAML and JSON: strict, typed, with all errors reported together."""

from __future__ import annotations

import dataclasses
import os
import typing
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeGuard, TypeVar

from vitreous.errors import UsageError, find_closest_match, suggest_nearest

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")
#: return type of `json.loads`
Json: TypeAlias = dict[str, Any] | list[Any] | str | float | bool | None


def is_mapping(value: object) -> TypeGuard[Mapping[str, Any]]:
    """Return whether a value is a mapping, as the settings of a group are."""
    return isinstance(value, Mapping)


def is_list(value: object) -> TypeGuard[list[Any]]:
    """Return whether a value is a list."""
    return isinstance(value, list)


MAX_YAML_CHARACTERS = 1_000_000


class FilePath:
    """Marks an option, by `Annotated[str, FilePath]`, as a path or a name of weights: text in its dataclass, but Python
    callers may pass any `os.PathLike`."""


OptionalPath: TypeAlias = Annotated[str | None, FilePath]


class OptionAliases:
    """Marks an option, by `Annotated[type, OptionAliases(name, ...)]`, with its names in other libraries. An error for
    an unknown keyword of such a name suggests the option."""

    def __init__(self, *names: str) -> None:
        self.names = names


class TaggedUnion:
    """Marks a field, by `Annotated[base, TaggedUnion(table)]`, or a base class, by its attribute `get_tagged_union`, as
    one of a table of dataclasses. The `key` in the value selects the row; if it is missing, the `default`, or the first
    row. Rows are classes, or their names for `import_object`."""

    def __init__(self, table: Mapping[str, Any], key: str = "name", default: str = "") -> None:
        self.table, self.key, self.default = table, key, default

    def pick(self, value: Any) -> Any:
        """Return the dataclass of a dict. Raises UsageError for a name that is not in the table."""
        name = value.get(self.key) if isinstance(value, dict) else None
        if name is not None and (not isinstance(name, str) or name not in self.table):
            raise UsageError(
                f"unknown name {name!r}",
                suggest_nearest(str(name), self.table) or f"use one of {', '.join(self.table)}",
            )
        return self.row(name or self.default or next(iter(self.table)))

    def row(self, name: str) -> Any:
        """Return the table's class for a name, imported if necessary."""
        row = self.table[name]
        return import_object(row) if isinstance(row, str) else row

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        """Accept any value: `from_builtins` has already converted it to a row of the table."""
        from pydantic_core import core_schema

        return core_schema.any_schema()


def import_object(name: str) -> Any:
    """Import the object named "package.module:Class"."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


def to_builtins(value: Any) -> Any:
    """Convert a dataclass to dicts, lists, numbers and strings."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_builtins(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [to_builtins(item) for item in value]
    if isinstance(value, dict):
        return {key: to_builtins(item) for key, item in value.items()}
    return value


def list_field_names(kind: Any) -> tuple[str, ...]:
    """Return the names of the fields of a dataclass, or of an instance, in order. Raises TypeError for others."""
    return tuple(field.name for field in dataclasses.fields(kind))


@cache
def get_annotated_hints(kind: Any) -> dict[str, Any]:
    """Return the types of a dataclass's fields by name, cached, since resolving them takes longer than reading a
    config."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


@cache
def get_field_types(kind: Any) -> dict[str, Any]:
    """Return the types of a dataclass's fields by name, without the marks of `Annotated`."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def get_field_markers(kind: Any, mark: type[T]) -> dict[str, T]:
    """Return the marks of one type in the annotations of a dataclass, by the names of the fields that have one."""
    marked = {name: getattr(hint, "__metadata__", ()) for name, hint in get_annotated_hints(kind).items()}
    return {name: one for name, marks in marked.items() for one in marks if isinstance(one, mark)}


@cache
def get_type_adapter(kind: Any) -> TypeAdapter[Any]:
    """Return the validator of a type, cached, since creating it takes longer than using it."""
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def from_builtins(kind: type[T] | Any, value: Any) -> T:
    """Convert dicts, lists, numbers and strings to a dataclass, or to the member of a union that their `family`
    selects.

    Raises UsageError with every unknown key and every value of a wrong type, by its dotted path.
    """
    from pydantic import ValidationError

    kind = resolve_config_class(kind, value)
    unknown = find_unknown_keys(kind, value)
    if unknown:
        path, hint = unknown[0]
        raise UsageError(
            f"unknown setting {', '.join(p for p, _ in unknown)}", hint or f"{path} is not a field of {kind.__name__}"
        )
    if isinstance(value, dict) and dataclasses.is_dataclass(kind):
        hints = get_annotated_hints(kind)
        value = value | {
            key: from_builtins(hints[key], item) for key, item in value.items() if get_tagged_union(hints[key])
        }
    try:
        return get_type_adapter(kind).validate_python(value)
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise UsageError("invalid settings:" + "".join(f"\n    {line}" for line in lines[:20])) from None


def resolve_config_class(kind: Any, value: Any) -> Any:
    """Return the dataclass for a value if `kind` is a tagged union, or a union: of the latter the member with the
    value's `family`, else the first."""
    if table := get_tagged_union(kind):
        return type(value) if dataclasses.is_dataclass(value) else table.pick(value)
    kinds = [one for one in typing.get_args(kind) if dataclasses.is_dataclass(one)]
    if not kinds or typing.get_origin(kind) is dict:
        return kind
    if not isinstance(value, dict):
        return kind
    return next((one for one in kinds if getattr(one, "family", None) == value.get("family")), kinds[0])


def get_tagged_union(kind: Any) -> TaggedUnion | None:
    """Return the tagged union of a field or a base class, if it has one."""
    own = kind.__dict__.get("tagged") if isinstance(kind, type) else None
    return own or next((mark for mark in getattr(kind, "__metadata__", ()) if isinstance(mark, TaggedUnion)), None)


def find_unknown_keys(kind: Any, value: Any, path: str = "") -> list[tuple[str, str]]:
    """List dotted paths in `value` that are not fields of `kind`, each with a suggestion of the nearest field."""
    kind = resolve_config_class(kind, value)
    if typing.get_origin(kind) is dict and isinstance(value, dict):
        inner = typing.get_args(kind)[1]
        return [pair for key, item in value.items() for pair in find_unknown_keys(inner, item, f"{path}{key}.")]
    if not dataclasses.is_dataclass(kind) or not isinstance(value, dict):
        return []
    hints = get_annotated_hints(kind)
    unknown = []
    for key, item in value.items():
        if key in hints:
            unknown += find_unknown_keys(hints[key], item, f"{path}{key}.")
        else:
            unknown.append((f"{path}{key}", suggest_path(str(key), get_field_types(kind), path)))
    return unknown


def apply_keyword_options(
    verb: str, options: dict[str, Any], *values: Any, known: Iterable[str] = ()
) -> tuple[Any, ...]:
    """Copy dataclasses with the keywords of a Python call as their fields; each option sets the first dataclass that
    has it.

    Lists become tuples, a single value becomes a tuple of one, and paths become text. `known` are additional names for
    suggestions. Raises UsageError for an unknown option, with the option that lists it in its `OptionAliases` or the
    nearest one, and for a value of a wrong type.
    """
    homes = [{field.name for field in dataclasses.fields(value)} for value in values]
    names = {*known, *(name for home in homes for name in home)}
    unknown = [name for name in options if not any(name in home for home in homes)]
    if unknown:
        meant = {
            word: name
            for value in values
            for name, mark in get_field_markers(type(value), OptionAliases).items()
            for word in mark.names
        }
        best = meant.get(unknown[0]) or find_closest_match(unknown[0], sorted(names))
        hint = f"perhaps you meant {best}" if best else f"use one of {', '.join(sorted(names))}"
        raise UsageError(f"{verb} has no option {', '.join(unknown)}", hint)
    from pydantic import ValidationError

    changes: list[dict[str, Any]] = [{} for _ in values]
    for name, option in options.items():
        place = next(number for number, home in enumerate(homes) if name in home)
        takes_many = isinstance(getattr(values[place], name), tuple)
        types = get_field_types(type(values[place]))
        option = (
            os.fspath(option)
            if isinstance(option, os.PathLike)
            else tuple(option)
            if isinstance(option, list)
            else option
        )
        option = (option,) if takes_many and not isinstance(option, tuple) else option
        try:
            changes[place][name] = get_type_adapter(types[name]).validate_python(option)
        except ValidationError as error:
            choices = [one for one in get_literal_values(types[name]) if isinstance(one, str)]
            hint = suggest_nearest(option, choices) if isinstance(option, str) and choices else ""
            raise UsageError(f"{verb}: {name} cannot be {option!r} ({error.errors()[0]['msg']})", hint) from None
    return tuple(dataclasses.replace(value, **change) for value, change in zip(values, changes, strict=True))


def get_literal_values(hint: Any) -> tuple[Any, ...]:
    """Return the values of a literal type, or of the literal in a union; empty for others."""
    if typing.get_origin(hint) is typing.Literal:
        return typing.get_args(hint)
    return tuple(
        value
        for one in typing.get_args(hint)
        if typing.get_origin(one) is typing.Literal
        for value in get_literal_values(one)
    )


def set_dotted_paths(value: T, settings: dict[str, list[str]], before: str = "") -> T:
    """Copy a dataclass, or a dict of them, with fields at dotted paths set from command-line words, each converted to
    its field's type.

    The fields of one dataclass are set together, so that settings that depend on each other can be changed. `before` is
    prepended to paths in messages. Raises UsageError for an unknown path, with the nearest one, or for invalid words.
    """
    import yaml
    from pydantic import TypeAdapter, ValidationError

    hints = dict(get_field_types(type(value))) if dataclasses.is_dataclass(value) else {}
    hints |= getattr(value, "SETTABLE", {}) or {name: type(one) for name, one in dict_or_empty(value).items()}
    changes: dict[str, Any] = {}
    deeper: dict[str, dict[str, list[str]]] = {}
    for path, words in settings.items():
        head, _, rest = path.partition(".")
        name, whole = head.replace("-", "_"), f"{before}{path}"
        if name not in hints:
            hint = suggest_path(name, hints, before) or f"use one of {', '.join(hints)}"
            raise UsageError(f"unknown setting {whole}", hint)
        if rest:
            deeper.setdefault(name, {})[rest] = words
            continue
        if dataclasses.is_dataclass(hints[name]):
            paths = (f"{whole}.{field.name}" for field in dataclasses.fields(hints[name]))
            raise UsageError(f"{whole} is a group of settings", f"set one of {', '.join(paths)}")
        plain = [yaml.safe_load(word) for word in words]
        takes_many = "tuple" in str(hints[name]) or len(plain) != 1
        try:
            changes[name] = TypeAdapter(hints[name]).validate_python(plain if takes_many else plain[0])
        except ValidationError as error:
            raise UsageError(f"{whole} cannot be {' '.join(words)} ({error.errors()[0]['msg']})") from None
    for name, inner in deeper.items():
        owned = dict_or_empty(value)[name] if name in dict_or_empty(value) else getattr(value, name)
        changes[name] = set_dotted_paths(owned, inner, f"{before}{name}.")
    if isinstance(value, dict):
        changed: Any = {**value, **changes}
        return changed
    if not changes:
        return value
    with_options = getattr(value, "with_options", None)  # for a dataclass whose type depends on its fields
    return with_options(**changes) if with_options else dataclasses.replace(value, **changes)  # type: ignore[type-var]


def suggest_path(name: str, hints: Mapping[str, Any], before: str = "") -> str:
    """Suggest the path of an unknown setting, with the prefix `before`: the group that has a field of this name, else
    the nearest field by its type in `hints`; "" if none is near."""
    groups = {key: hint for key, hint in hints.items() if isinstance(hint, type) and dataclasses.is_dataclass(hint)}
    for key, group in groups.items():
        if name in get_annotated_hints(group):
            return f"perhaps you meant {before}{key}.{name}"
    return suggest_nearest(name, hints)


def nest_paths(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by dotted path as nested dicts: `{"attention.window": 7}` is `{"attention": {"window": 7}}`."""
    nested: dict[str, Any] = {}
    for path, value in values.items():
        *groups, name = path.split(".")
        inner = nested
        for group in groups:
            inner = inner.setdefault(group, {})
        inner[name] = value
    return nested


def list_paths(values: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten nested dicts to values by dotted path, the inverse of `nest_paths`."""
    paths: dict[str, Any] = {}
    for name, value in values.items():
        inner = list_paths(value) if isinstance(value, Mapping) else {}
        paths |= {f"{name}.{path}": one for path, one in inner.items()} or {name: value}
    return paths


def change_fields(value: T, changes: Mapping[str, Any], before: str = "") -> T:
    """Copy a dataclass with these fields changed.

    If a field is a dataclass, a dict changes only the fields that it contains. `before` is prepended to field names in
    messages. Raises UsageError for an unknown field.
    """
    changed: dict[str, Any] = {}
    for name, change in changes.items():
        if name not in get_annotated_hints(type(value)):
            hint = suggest_path(name, get_field_types(type(value)), before)
            raise UsageError(
                f"unknown setting {before}{name}", hint or f"use one of {', '.join(get_annotated_hints(type(value)))}"
            )
        current = getattr(value, name)
        inside = isinstance(change, Mapping) and dataclasses.is_dataclass(current)
        changed[name] = change_fields(current, change, f"{before}{name}.") if inside else change
    return dataclasses.replace(value, **changed)  # type: ignore[type-var]


def dict_or_empty(value: Any) -> dict[str, Any]:
    """Return a dict with string keys; empty for any other value."""
    return value if isinstance(value, dict) else {}


def to_yaml(value: Any) -> str:
    """Convert a dataclass to YAML, with fields in their order."""
    import yaml

    return yaml.safe_dump(to_builtins(value), sort_keys=False, allow_unicode=True)


def from_yaml(kind: type[T], text: str) -> T:
    """Convert YAML to a dataclass. Raises UsageError as `read_yaml`, and for unknown keys and wrong types."""
    return from_builtins(kind, read_yaml(text))


def read_yaml(text: str) -> Any:
    """Parse YAML to dicts, lists, numbers and strings. Raises UsageError for a file over 1 MB, aliases, and invalid
    YAML."""
    import yaml

    if len(text) > MAX_YAML_CHARACTERS:
        raise UsageError(f"a config of {len(text):,} characters exceeds the limit of {MAX_YAML_CHARACTERS:,}")
    try:
        marked = "&" in text or "*" in text  # true for every anchor and alias; scanning takes as long as parsing
        if marked and any(isinstance(token, (yaml.AliasToken, yaml.AnchorToken)) for token in yaml.scan(text)):
            raise UsageError("the config has YAML anchors or aliases", "write the values out")
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text)  # libyaml's takes a tenth of the time
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        raise UsageError(f"not valid YAML: {str(error).splitlines()[0]}") from None


def list_differences(old: Any, new: Any, path: str = "") -> list[str]:
    """List the differences of two dataclasses of the same type: `optimizer.lr: 0.001 -> 0.003`."""
    if dataclasses.is_dataclass(old) and type(old) is type(new):
        names = [field.name for field in dataclasses.fields(old)]
        return [
            line
            for name in names
            for line in list_differences(getattr(old, name), getattr(new, name), f"{path}{name}.")
        ]
    before, after = dict_or_empty(old), dict_or_empty(new)
    if before and before.keys() == after.keys():
        return [line for name in before for line in list_differences(before[name], after[name], f"{path}{name}.")]
    return [] if old == new else [f"{path.removesuffix('.')}: {old} -> {new}"]
