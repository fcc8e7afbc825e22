"""Convert frozen dataclasses to and from YAML and JSON, with type checks; all errors are reported together."""

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
#: any JSON value, as returned by `json.loads`
Json: TypeAlias = dict[str, Any] | list[Any] | str | float | bool | None


def is_mapping(value: object) -> TypeGuard[Mapping[str, Any]]:
    """Return whether a value is a mapping with string keys, such as a group of settings."""
    return isinstance(value, Mapping)


def is_list(value: object) -> TypeGuard[list[Any]]:
    """Return whether a value is a list."""
    return isinstance(value, list)


MAX_YAML_CHARACTERS = 1_000_000


class FilePath:
    """Marks a text field, by `Annotated[str, FilePath]`, as a path or a name of weights.

    Python callers may pass any `os.PathLike`, which is converted to text.
    """


OptionalPath: TypeAlias = Annotated[str | None, FilePath]


class OptionAliases:
    """Marks a field, by `Annotated[type, OptionAliases(name, ...)]`, with its names in other libraries.

    The error for an unknown keyword that is one of these names suggests the field.
    """

    def __init__(self, *names: str) -> None:
        self.names = names


class TaggedUnion:
    """A union of dataclasses of which a tag in the value selects one: the config class of a model, for example.

    `table` maps tags to classes, or to their names for `import_object`. `key` is the key of the tag in the value. If it
    is missing, the tag is `default` or, if that is empty, the first of the table. A field is marked by
    `Annotated[base, TaggedUnion(table)]`, a base class by its attribute `tagged`.
    """

    def __init__(self, table: Mapping[str, Any], key: str = "name", default: str = "") -> None:
        self.table, self.key, self.default = table, key, default

    def pick(self, value: Any) -> Any:
        """Return the class that the tag of `value` selects. Raises UsageError for a tag that is not in the table."""
        name = value.get(self.key) if isinstance(value, dict) else None
        if name is not None and (not isinstance(name, str) or name not in self.table):
            raise UsageError(
                f"unknown {self.key} {name!r}",
                suggest_nearest(str(name), self.table) or f"use one of {', '.join(self.table)}",
            )
        return self.get_class(name or self.default or next(iter(self.table)))

    def get_class(self, name: str) -> Any:
        """Return the class with the tag `name`, imported if necessary."""
        entry = self.table[name]
        return import_object(entry) if isinstance(entry, str) else entry

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        """Make pydantic accept any value, because `from_builtins` has already converted it to a class of the table."""
        from pydantic_core import core_schema

        return core_schema.any_schema()


def import_object(name: str) -> Any:
    """Import an object by its name, such as `package.module:Class`."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


def to_builtins(value: Any) -> Any:
    """Convert a dataclass, recursively, to dicts, lists, numbers and strings."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_builtins(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [to_builtins(item) for item in value]
    if isinstance(value, dict):
        return {key: to_builtins(item) for key, item in value.items()}
    return value


def list_field_names(dataclass_or_instance: Any) -> tuple[str, ...]:
    """Return the field names of a dataclass or an instance, in order. Raises TypeError for other classes."""
    return tuple(field.name for field in dataclasses.fields(dataclass_or_instance))


@cache
def get_annotated_hints(dataclass_type: Any) -> dict[str, Any]:
    """Return field name -> type of a dataclass, including `Annotated`; cached because resolving types is slow."""
    hints = typing.get_type_hints(dataclass_type, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(dataclass_type)}


@cache
def get_field_types(dataclass_type: Any) -> dict[str, Any]:
    """Return field name -> type of a dataclass, without `Annotated`."""
    hints = typing.get_type_hints(dataclass_type)
    return {field.name: hints[field.name] for field in dataclasses.fields(dataclass_type)}


def get_field_markers(dataclass_type: Any, marker_type: type[T]) -> dict[str, T]:
    """Return field name -> marker for the fields of a dataclass that are annotated with a marker of `marker_type`."""
    metadata_by_field = {
        name: getattr(hint, "__metadata__", ()) for name, hint in get_annotated_hints(dataclass_type).items()
    }
    return {
        name: marker
        for name, markers in metadata_by_field.items()
        for marker in markers
        if isinstance(marker, marker_type)
    }


@cache
def get_type_adapter(target_type: Any) -> TypeAdapter[Any]:
    """Return the pydantic validator of a type; cached because creating it is slow."""
    from pydantic import TypeAdapter

    return TypeAdapter(target_type)


def from_builtins(target_type: type[T] | Any, value: Any) -> T:
    """Convert dicts, lists, numbers and strings to a dataclass, the inverse of `to_builtins`.

    Of a union, the value selects the class (`resolve_config_class`). Raises UsageError that lists every unknown key, or
    every value of a wrong type, by its dotted path.
    """
    from pydantic import ValidationError

    target_type = resolve_config_class(target_type, value)
    unknown = find_unknown_keys(target_type, value)
    if unknown:
        path, hint = unknown[0]
        raise UsageError(
            f"unknown setting {', '.join(p for p, _ in unknown)}",
            hint or f"{path} is not a field of {target_type.__name__}",
        )
    if isinstance(value, dict) and dataclasses.is_dataclass(target_type):
        hints = get_annotated_hints(target_type)
        value = value | {
            key: from_builtins(hints[key], item) for key, item in value.items() if get_tagged_union(hints[key])
        }
    try:
        return get_type_adapter(target_type).validate_python(value)
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise UsageError("invalid settings:" + "".join(f"\n    {line}" for line in lines[:20])) from None


def resolve_config_class(target_type: Any, value: Any) -> Any:
    """Return the dataclass that a value selects from a union; other types are returned unchanged.

    From a `TaggedUnion`, the tag selects the class. From a plain union, it is the member with the value's `family`,
    otherwise the first member.
    """
    if table := get_tagged_union(target_type):
        return type(value) if dataclasses.is_dataclass(value) else table.pick(value)
    member_types = [member for member in typing.get_args(target_type) if dataclasses.is_dataclass(member)]
    if not member_types or typing.get_origin(target_type) is dict:
        return target_type
    if not isinstance(value, dict):
        return target_type
    return next(
        (member for member in member_types if getattr(member, "family", None) == value.get("family")), member_types[0]
    )


def get_tagged_union(hint: Any) -> TaggedUnion | None:
    """Return the `TaggedUnion` of an annotated type or a base class; None if it has none."""
    class_union = hint.__dict__.get("tagged") if isinstance(hint, type) else None
    return class_union or next(
        (marker for marker in getattr(hint, "__metadata__", ()) if isinstance(marker, TaggedUnion)), None
    )


def find_unknown_keys(target_type: Any, value: Any, path: str = "") -> list[tuple[str, str]]:
    """Return (dotted path, suggestion) for each key of `value` that is not a field of `target_type`.

    `path` is the prefix of the paths. The suggestion is the nearest field, or an empty string.
    """
    target_type = resolve_config_class(target_type, value)
    if typing.get_origin(target_type) is dict and isinstance(value, dict):
        value_type = typing.get_args(target_type)[1]
        return [pair for key, item in value.items() for pair in find_unknown_keys(value_type, item, f"{path}{key}.")]
    if not dataclasses.is_dataclass(target_type) or not isinstance(value, dict):
        return []
    hints = get_annotated_hints(target_type)
    unknown = []
    for key, item in value.items():
        if key in hints:
            unknown += find_unknown_keys(hints[key], item, f"{path}{key}.")
        else:
            unknown.append((f"{path}{key}", suggest_path(str(key), get_field_types(target_type), path)))
    return unknown


def apply_keyword_options(
    verb: str, options: dict[str, Any], *instances: Any, extra_names: Iterable[str] = ()
) -> tuple[Any, ...]:
    """Return copies of dataclass instances with the keyword options of a Python call applied as fields.

    An option sets the field of this name in the first instance that has it. Lists become tuples, a single value of a
    tuple field becomes a tuple of one, and paths become text. `extra_names` are further names that the error may
    suggest. Raises UsageError for an unknown option, which suggests the field that has it as an alias
    (`OptionAliases`) or the nearest name; and for a value of a wrong type.
    """
    field_sets = [{field.name for field in dataclasses.fields(value)} for value in instances]
    names = {*extra_names, *(name for field_set in field_sets for name in field_set)}
    unknown = [name for name in options if not any(name in field_set for field_set in field_sets)]
    if unknown:
        option_by_alias = {
            alias: name
            for value in instances
            for name, aliases in get_field_markers(type(value), OptionAliases).items()
            for alias in aliases.names
        }
        suggestion = option_by_alias.get(unknown[0]) or find_closest_match(unknown[0], sorted(names))
        hint = f"perhaps you meant {suggestion}" if suggestion else f"use one of {', '.join(sorted(names))}"
        raise UsageError(f"{verb} has no option {', '.join(unknown)}", hint)
    from pydantic import ValidationError

    changes: list[dict[str, Any]] = [{} for _ in instances]
    for name, option in options.items():
        position = next(index for index, field_set in enumerate(field_sets) if name in field_set)
        takes_many = isinstance(getattr(instances[position], name), tuple)
        types = get_field_types(type(instances[position]))
        option = (
            os.fspath(option)
            if isinstance(option, os.PathLike)
            else tuple(option)
            if isinstance(option, list)
            else option
        )
        option = (option,) if takes_many and not isinstance(option, tuple) else option
        try:
            changes[position][name] = get_type_adapter(types[name]).validate_python(option)
        except ValidationError as error:
            choices = [choice for choice in get_literal_values(types[name]) if isinstance(choice, str)]
            hint = suggest_nearest(option, choices) if isinstance(option, str) and choices else ""
            raise UsageError(f"{verb}: {name} cannot be {option!r} ({error.errors()[0]['msg']})", hint) from None
    return tuple(dataclasses.replace(value, **change) for value, change in zip(instances, changes, strict=True))


def get_literal_values(hint: Any) -> tuple[Any, ...]:
    """Return the values of a `Literal` type, or of the literals in a union; an empty tuple for other types."""
    if typing.get_origin(hint) is typing.Literal:
        return typing.get_args(hint)
    return tuple(
        value
        for member in typing.get_args(hint)
        if typing.get_origin(member) is typing.Literal
        for value in get_literal_values(member)
    )


def set_dotted_paths(value: T, settings: dict[str, list[str]], prefix: str = "") -> T:
    """Return a copy of a dataclass, or of a dict of dataclasses, with fields set by dotted path.

    `settings` maps a path, such as `optimizer.betas`, to words of the command line, which are converted to the type
    of the field; `none` stands for no value, or for an empty list. All fields of a dataclass are set at once, so
    that fields that depend on each other can be changed. `prefix` is prepended to paths in messages. Raises
    UsageError for an unknown path, which suggests the nearest path, and for invalid words.
    """
    import yaml
    from pydantic import TypeAdapter, ValidationError

    hints = dict(get_field_types(type(value))) if dataclasses.is_dataclass(value) else {}
    hints |= getattr(value, "SETTABLE", {}) or {name: type(item) for name, item in dict_or_empty(value).items()}
    changes: dict[str, Any] = {}
    nested_settings: dict[str, dict[str, list[str]]] = {}
    for path, words in settings.items():
        first_name, _, subpath = path.partition(".")
        name, full_path = first_name.replace("-", "_"), f"{prefix}{path}"
        if name not in hints:
            hint = suggest_path(name, hints, prefix) or f"use one of {', '.join(hints)}"
            raise UsageError(f"unknown setting {full_path}", hint)
        if subpath:
            nested_settings.setdefault(name, {})[subpath] = words
            continue
        if dataclasses.is_dataclass(hints[name]):
            paths = (f"{full_path}.{field.name}" for field in dataclasses.fields(hints[name]))
            raise UsageError(f"{full_path} is a group of settings", f"set one of {', '.join(paths)}")
        parsed = [yaml.safe_load(word) for word in words]
        takes_many = "tuple" in str(hints[name]) or len(parsed) != 1
        given = parsed if takes_many else parsed[0]
        if words == ["none"] and "none" not in get_literal_values(hints[name]):
            given = None if type(None) in typing.get_args(hints[name]) else []
        try:
            changes[name] = TypeAdapter(hints[name]).validate_python(given)
        except ValidationError as error:
            raise UsageError(f"{full_path} cannot be {' '.join(words)} ({error.errors()[0]['msg']})") from None
    for name, inner_settings in nested_settings.items():
        child = dict_or_empty(value)[name] if name in dict_or_empty(value) else getattr(value, name)
        changes[name] = set_dotted_paths(child, inner_settings, f"{prefix}{name}.")
    if isinstance(value, dict):
        changed: Any = {**value, **changes}
        return changed
    if not changes:
        return value
    with_options = getattr(value, "with_options", None)  # a method of dataclasses whose class depends on their fields
    return with_options(**changes) if with_options else dataclasses.replace(value, **changes)  # type: ignore[type-var]


def suggest_path(name: str, hints: Mapping[str, Any], prefix: str = "") -> str:
    """Return a hint for an unknown setting: the path of a field of this name in a group, or the nearest name in
    `hints`.

    `hints` maps field names to types. The hint is an empty string if no name is near.
    """
    groups = {key: hint for key, hint in hints.items() if isinstance(hint, type) and dataclasses.is_dataclass(hint)}
    for key, group in groups.items():
        if name in get_annotated_hints(group):
            return f"perhaps you meant {prefix}{key}.{name}"
    return suggest_nearest(name, hints)


def nest_paths(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert values by dotted path to nested dicts: `{"attention.window": 7}` -> `{"attention": {"window": 7}}`."""
    nested: dict[str, Any] = {}
    for path, value in values.items():
        *groups, name = path.split(".")
        group_values = nested
        for group in groups:
            group_values = group_values.setdefault(group, {})
        group_values[name] = value
    return nested


def list_paths(values: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten nested dicts to values by dotted path, the inverse of `nest_paths`."""
    paths: dict[str, Any] = {}
    for name, value in values.items():
        inner_paths = list_paths(value) if isinstance(value, Mapping) else {}
        paths |= {f"{name}.{path}": leaf for path, leaf in inner_paths.items()} or {name: value}
    return paths


def change_fields(value: T, changes: Mapping[str, Any], prefix: str = "") -> T:
    """Return a copy of a dataclass with the fields in `changes` replaced.

    For a field that is a dataclass, a dict replaces only the fields that it contains. `prefix` is prepended to field
    names in messages. Raises UsageError for an unknown field.
    """
    changed: dict[str, Any] = {}
    for name, change in changes.items():
        if name not in get_annotated_hints(type(value)):
            hint = suggest_path(name, get_field_types(type(value)), prefix)
            raise UsageError(
                f"unknown setting {prefix}{name}", hint or f"use one of {', '.join(get_annotated_hints(type(value)))}"
            )
        current = getattr(value, name)
        is_nested = isinstance(change, Mapping) and dataclasses.is_dataclass(current)
        changed[name] = change_fields(current, change, f"{prefix}{name}.") if is_nested else change
    return dataclasses.replace(value, **changed)  # type: ignore[type-var]


def dict_or_empty(value: Any) -> dict[str, Any]:
    """Return a value that is a dict; an empty dict for any other value."""
    return value if isinstance(value, dict) else {}


def to_yaml(value: Any) -> str:
    """Convert a dataclass to YAML; fields keep their order."""
    import yaml

    return yaml.safe_dump(to_builtins(value), sort_keys=False, allow_unicode=True)


def from_yaml(target_type: type[T], text: str) -> T:
    """Convert YAML to a dataclass. Raises UsageError as `read_yaml`, and for unknown keys and wrong types."""
    return from_builtins(target_type, read_yaml(text))


def read_yaml(text: str) -> Any:
    """Parse YAML to dicts, lists, numbers and strings. Raises UsageError for a file over 1 MB, aliases, and invalid
    YAML."""
    import yaml

    if len(text) > MAX_YAML_CHARACTERS:
        raise UsageError(f"{len(text):,} characters of YAML exceed {MAX_YAML_CHARACTERS:,}", "use a config file")
    try:
        # fast check: the exact one, scanning for tokens, takes as long as parsing
        may_have_aliases = "&" in text or "*" in text
        if may_have_aliases and any(
            isinstance(token, (yaml.AliasToken, yaml.AnchorToken)) for token in yaml.scan(text)
        ):
            raise UsageError("the config has YAML anchors or aliases", "write the values out")
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text)  # the loader of libyaml takes a tenth of the time
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        raise UsageError(f"not valid YAML: {str(error).splitlines()[0]}") from None


def list_differences(old: Any, new: Any, path: str = "") -> list[str]:
    """Return one line per field that differs between two dataclasses of the same type: `optimizer.lr: 0.001 ->
    0.003`."""
    if dataclasses.is_dataclass(old) and type(old) is type(new):
        names = [field.name for field in dataclasses.fields(old)]
        return [
            line
            for name in names
            for line in list_differences(getattr(old, name), getattr(new, name), f"{path}{name}.")
        ]
    old_items, new_items = dict_or_empty(old), dict_or_empty(new)
    if old_items and old_items.keys() == new_items.keys():
        return [
            line for name in old_items for line in list_differences(old_items[name], new_items[name], f"{path}{name}.")
        ]
    return [] if old == new else [f"{path.removesuffix('.')}: {old} -> {new}"]
