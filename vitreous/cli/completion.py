"""The verb `vitreous completion`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, Union, get_origin, get_type_hints

from tyro.conf import Positional, arg, subcommand

from vitreous.cli.console import Console


@dataclass(frozen=True)
class Options:
    """Print the completion script of a shell, for verbs, options and their values.

    Example: vitreous completion bash > ~/.local/share/bash-completion/completions/vitreous
    """

    shell: Annotated[Positional[Literal["bash", "zsh"]], arg(metavar="SHELL")]
    """bash or zsh."""


def run(options: Options, console: Console) -> dict[str, Any]:
    """Print the completion script and nothing else."""
    script = generate_completion_script(options.shell)
    if console.document_to is None:
        console.print_line(script.rstrip("\n"))
    return {"shell": options.shell, "script": script}


def generate_completion_script(shell: str) -> str:
    """Generate the completion script for a shell (bash or zsh), from the options of all verbs."""
    import io
    from contextlib import redirect_stdout, suppress
    from importlib import import_module

    import tyro

    from vitreous.cli.main import VERBS

    families: dict[str, list[Any]] = {}
    for verb, (module, text) in VERBS.items():
        options_type = import_module(module).Options
        hide_empty_defaults(options_type)
        family, _, name = verb.rpartition(" ")
        families.setdefault(family, []).append(
            Annotated[options_type, subcommand(name, description=text, prefix_name=False)]
        )
    commands = families.pop("")
    commands += [Annotated[Union[tuple(inner)], subcommand(name)] for name, inner in families.items()]  # noqa: UP007
    verbs: Any = Union[tuple(commands)]  # noqa: UP007
    script = io.StringIO()
    with redirect_stdout(script), suppress(SystemExit):
        tyro.cli(verbs, prog="vitreous", args=["--tyro-print-completion", shell])
    return script.getvalue()


@cache
def hide_empty_defaults(options_type: type[Any]) -> None:
    """Make the descriptions of tyro omit defaults that are None, False or empty.

    Replaces the annotations of the class; the cache ensures that this happens once.
    """
    empty_texts = ("None", "False", "", "''")
    default_hint = arg(help_behavior_hint=lambda default: "" if default in empty_texts else f"(default: {default})")
    annotations = get_type_hints(options_type, include_extras=True)
    options_type.__annotations__ = {
        name: annotation if get_origin(annotation) is ClassVar else Annotated[annotation, default_hint]
        for name, annotation in annotations.items()
    }
