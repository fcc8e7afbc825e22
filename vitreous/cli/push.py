"""The verb `vitreous push`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from tyro.conf import Positional, arg

from vitreous.cli.console import Console


@dataclass(frozen=True, kw_only=True)
class Options:
    """Publish a bundle on the Hugging Face Hub, with a model card that lists its metrics.

    Example: vitreous push runs/pets hf:me/pets --license apache-2.0 --dry-run
    """

    run: Annotated[Positional[str], arg(metavar="RUN")]
    """A finished run folder, or a bundle."""
    to: Annotated[Positional[str], arg(metavar="hf:ORG/NAME")]
    """Repository: hf:, your user or organisation, and a name."""
    private: bool = False
    """Create a private repository."""
    license: str | None = None
    """Licence for the model card, as a Hub identifier: apache-2.0, mit, cc-by-4.0, other (default: none)."""
    tags: tuple[str, ...] = ()
    """Additional tags for the model card."""
    transformers: bool = False
    """Add the files that transformers needs, if it supports the architecture."""
    update: bool = False
    """Add a commit to an existing repository."""
    dry_run: bool = False
    """Print the model card and the list of files; upload nothing."""
    out: str | None = None
    """With --dry-run: write the files to this folder."""


def run(options: Options, console: Console) -> dict[str, Any]:
    """Publish a bundle, and print its files and its URL; with --dry-run, print the model card."""
    from vitreous.apps.hub.push import push
    from vitreous.cli.console import format_byte_count

    o = options
    pushed = push(
        o.run,
        o.to,
        private=o.private,
        licence=o.license,
        tags=o.tags,
        transformers=o.transformers,
        update=o.update,
        dry_run=o.dry_run,
        out=o.out,
        note=console.note,
    )
    document: dict[str, Any] = {**pushed}
    if o.dry_run:
        console.print_line(document["card"])
    console.table(["file", "size"], [[name, format_byte_count(size)] for name, size in document["files"].items()])
    if o.dry_run:
        console.print_line(
            f"nothing uploaded{f'; the files are in {o.out}' if o.out else ''}; without --dry-run: {document['url']}"
        )
    else:
        console.print_line(f"{document['url']}, commit {document['commit'][:12]}")
        console.print_line(f'next: vitreous predict {o.to} IMAGE …, or vitreous.load("{o.to}")')
    return document
