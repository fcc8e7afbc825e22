"""vitreous push."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from tyro.conf import Positional, arg

from vitreous.cli.console import Console


@dataclass(frozen=True, kw_only=True)
class Options:
    """Publish a run's bundle on the Hugging Face Hub, with a model card that has its figures.

    Example: vitreous push runs/pets hf:me/pets --license apache-2.0 --dry-run
    """

    run: Annotated[Positional[str], arg(metavar="RUN")]
    """A run folder that finished, or a bundle."""
    to: Annotated[Positional[str], arg(metavar="hf:ORG/NAME")]
    """The repository: hf:, your account or organisation, and a name."""
    private: bool = False
    """Make it visible to the account alone."""
    license: str | None = None
    """The licence that the card states, as the Hub writes it: apache-2.0, mit, cc-by-4.0, other (default: none)."""
    tags: tuple[str, ...] = ()
    """More tags of the card."""
    transformers: bool = False
    """Add the files that transformers reads, where it has such a model."""
    update: bool = False
    """Add a commit to a repository that is there."""
    dry_run: bool = False
    """Send nothing: print the card, and list the files."""
    out: str | None = None
    """With --dry-run: the folder to write what would be sent."""


def run(options: Options, console: Console) -> dict[str, Any]:
    """Push, and print where it is."""
    from vitreous.apps.hub.push import push
    from vitreous.cli.console import readable_bytes

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
        console.say(document["card"])
    console.table(["file", "size"], [[name, readable_bytes(size)] for name, size in document["files"].items()])
    if o.dry_run:
        console.say(f"nothing was sent{f'; it lies in {o.out}' if o.out else ''}; without --dry-run: {document['url']}")
    else:
        console.say(f"{document['url']}, commit {document['commit'][:12]}")
        console.say(f'next: vitreous predict {o.to} IMAGE ..., or vitreous.load("{o.to}")')
    return document
