"""The verb `push`: publish a bundle and its model card on the Hugging Face Hub. `vitreous.load("hf:org/name")` loads
it."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from vitreous.apps.hub.model_card import LICENCE_PATTERN, render_model_card, strip_provenance_paths
from vitreous.errors import ResourceError, UsageError, VitreousError, WeightsError, check_path_argument, install_hint
from vitreous.system.disk import sync_and_rename, write_text_atomic
from vitreous.tasks.documents import PushDocument
from vitreous.weights.adopt import locate_bundle
from vitreous.weights.bundle import DESCRIPTION_FILE, WEIGHTS_FILE, Bundle, load_bundle
from vitreous.weights.convert import convert
from vitreous.weights.fetch import get_offline_variable
from vitreous.weights.model_paths import find_newest_run
from vitreous.weights.objective_parts import OBJECTIVE_FILE
from vitreous.weights.published import find_published_weights

REPOSITORY_PATTERN = re.compile(r"hf:(?P<name>[\w.-]{1,96}/[\w.-]{1,96})")
CARD_FILE = "README.md"


def push(
    run: str | os.PathLike[str],
    to: str,
    private: bool = False,
    licence: str | None = None,
    tags: Iterable[str] = (),
    transformers: bool = False,
    update: bool = False,
    dry_run: bool = False,
    out: str | os.PathLike[str] | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> PushDocument:
    """Publish a bundle, or the bundle of a finished run, as the repository `to` (`hf:org/name`); return a document.

    An existing repository is refused; with `update`, it gets another commit. `transformers` adds files for the library
    transformers. `dry_run` uploads nothing; with `out`, it writes the files to a new folder. Local paths are removed
    from the files.

    Raises UsageError for an invalid name, run or option, WeightsError for a damaged bundle, ResourceError if the Hub
    refuses the upload or cannot be reached.
    """
    repository = parse_repository(to)
    if licence is not None and not LICENCE_PATTERN.fullmatch(licence):
        raise UsageError(f"unknown licence {licence}", "use the Hub's identifier: apache-2.0, mit, cc-by-4.0, other")
    if out is not None and not dry_run:
        raise UsageError("--out needs --dry-run", "add --dry-run, or remove --out")
    if out is not None and os.path.lexists(out):
        raise UsageError(f"{out} already exists and is not overwritten", "use another --out")
    require_hub_client(to)
    folder = find_bundle_folder(run)
    bundle = load_bundle(folder)
    summary = load_run_summary(folder)
    warn_about_licence(bundle, licence, note)
    account = "" if dry_run else get_write_token()
    parent = Path(out).absolute().parent if out is not None else None
    if parent:
        parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".push-", dir=parent) as scratch:
        staging_folder = Path(scratch) / "files"
        try:
            extra_files_note = stage_files(folder, staging_folder, transformers, note)
            card = render_model_card(
                repository, bundle, summary=summary, licence=licence, tags=list(tags), extra_files_note=extra_files_note
            )
            write_text_atomic(staging_folder / CARD_FILE, card)
            sizes = {path.name: path.stat().st_size for path in sorted(staging_folder.iterdir())}
            if out is not None:
                sync_and_rename(staging_folder, Path(out))
        except OSError as error:
            problem = f"cannot collect the files ({error.strerror or error})"
            raise ResourceError(problem, "free some space, or set TMPDIR to another folder") from None
        commit = "" if dry_run else upload_repository(repository, staging_folder, private, update, account)
    return {
        "repository": repository,
        "url": make_repository_url(repository),
        "commit": commit,
        "files": sizes,
        "bytes": sum(sizes.values()),
        "private": private,
        "dry_run": dry_run,
        "out": os.fspath(out) if out is not None else None,
        "card": card,
    }


def parse_repository(address: str) -> str:
    """Return the repository name in `hf:org/name`. Raises UsageError for other forms."""
    match = REPOSITORY_PATTERN.fullmatch(address)
    if not match or ".." in address or "--" in address or re.search(r"(^|/)[.-]|[.-]($|/)", match["name"]):
        raise UsageError(
            f"{address} is not a repository name", "use hf:ORG/NAME, with your account or organisation as ORG"
        )
    return match["name"]


def require_hub_client(address: str) -> None:
    """Raise UsageError if the extra `hub` is not installed."""
    try:
        import huggingface_hub  # noqa: F401
    except ImportError:
        raise UsageError(f"{address} needs the Hub client, which is not installed", install_hint("hub")) from None


def find_bundle_folder(run: str | os.PathLike[str]) -> Path:
    """Return the folder of the bundle in a run, or `run` if it is a bundle. Raises UsageError for a run without a
    bundle, and for weights in other formats."""
    check_path_argument(run, "push(run)")
    path = Path(run)
    if not path.exists():
        newest = find_newest_run()
        hint = f"the newest run in this folder is {newest}" if newest else "train one with `vitreous train`"
        raise UsageError(f"no run at {path}", hint)
    if folder := locate_bundle(path):
        return folder
    if (path / "config.yaml").is_file():
        raise UsageError(f"the run in {path} did not finish", f"continue it: vitreous train --resume --out {path}")
    raise UsageError(f"{path} is not a bundle", f"convert it: vitreous convert {path} BUNDLE, then push BUNDLE")


def load_run_summary(folder: Path) -> dict[str, Any]:
    """Load the summary of the run that contains a bundle; {} if it is missing or damaged."""
    try:
        summary = json.loads((folder.parent / "summary.json").read_text("utf-8"))
        return summary if isinstance(summary, dict) and folder.name == "model" else {}
    except (OSError, ValueError):
        return {}


def warn_about_licence(bundle: Bundle, licence: str | None, note: Callable[[str], None]) -> None:
    """Print a note if the initial weights of the model have a licence, and if no licence is set."""
    init = str(bundle.provenance.get("init") or "")
    if published := find_published_weights(init):
        note(f"the model was initialised from {init} (licence {published.licence}): its terms may apply to your model")
    if licence is None:
        note("without a licence, others may not use the model; set one with --license, such as apache-2.0")


def stage_files(folder: Path, staging_folder: Path, transformers: bool, note: Callable[[str], None]) -> str:
    """Copy the files to upload into `staging_folder`. With `transformers`, also export files for that library.

    Returns a sentence for the model card about these additional files, or "". Raises OSError if a file cannot be
    written, UsageError for a model that transformers does not support.
    """
    staging_folder.mkdir()
    for name in (WEIGHTS_FILE, OBJECTIVE_FILE):
        if (folder / name).is_file():
            shutil.copyfile(folder / name, staging_folder / name)
    description = json.loads((folder / DESCRIPTION_FILE).read_text("utf-8"))
    description["provenance"] = strip_provenance_paths(description.get("provenance", {}))
    write_text_atomic(staging_folder / DESCRIPTION_FILE, json.dumps(description, indent=2, ensure_ascii=False) + "\n")
    if not transformers:
        return ""
    export_folder = staging_folder.parent / "transformers"
    document = convert(folder, export_folder, "huggingface", note=note)
    for path in sorted(export_folder.iterdir()):
        path.rename(staging_folder / path.name)
    load_options = document["assumed_settings"]
    return "transformers can load this repository" + (f", with {', '.join(load_options)}." if load_options else ".")


def get_write_token() -> str:
    """Return the Hub token. Raises UsageError if the network is disabled or there is no token."""
    from huggingface_hub import get_token

    if variable := get_offline_variable():
        raise UsageError(f"{variable} disables the network", f"unset {variable}, or use --dry-run")
    if not (token := get_token()):
        hint = "create a write token at https://huggingface.co/settings/tokens, then `hf auth login` or set HF_TOKEN"
        raise UsageError("no Hub token found", hint)
    return token


def make_repository_url(repository: str) -> str:
    """Return the URL of the repository."""
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/{repository}"


def upload_repository(repository: str, staging_folder: Path, private: bool, update: bool, token: str) -> str:
    """Create the repository and upload the files as one commit; return the commit's hash. Raises ResourceError if the
    Hub refuses the upload, UsageError if the repository exists and `update` is not set."""
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    try:
        api.create_repo(repository, private=private, exist_ok=update)
    except Exception as error:  # including exceptions of the client's HTTP library
        raise translate_hub_error(repository, error, "nothing was uploaded") from None
    try:
        message = "Update the model" if update else "Publish the model"
        return api.upload_folder(repo_id=repository, folder_path=staging_folder, commit_message=message).oid
    except Exception as error:
        state = "no commit was made; repeat the command with --update"
        raise translate_hub_error(repository, error, state) from None


def translate_hub_error(repository: str, error: Exception, state: str) -> VitreousError:
    """Translate an exception of the Hub's client during an upload to an error of vitreous. `state` is added to the
    message: how far the upload got."""
    url = make_repository_url(repository)
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status == 409 and state == "nothing was uploaded":
        return UsageError(f"{url} already exists", "add a commit with --update, or use another name")
    reasons = {
        401: ("rejected the token", "check HF_TOKEN or run `hf auth login`; the token may have expired"),
        403: ("refused write access", "use a token with write access, of an account that is a member of ORG"),
        404: ("does not exist, or the account has no access", "check ORG in hf:ORG/NAME"),
        409: ("was changed during the upload", "check the repository, and push again"),
        413: ("refused a file of that size", "check the Hub's limits"),
        429: ("refused too many requests", "retry later"),
    }
    if status in reasons:
        problem, hint = reasons[status]
        return ResourceError(f"{url} {problem} ({status}): {state}", hint)
    if isinstance(error, WeightsError | ResourceError | UsageError):
        return error
    if status is not None:
        return ResourceError(f"{url} returned status {status}: {state}", "retry later")
    reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
    return ResourceError(
        f"cannot connect to {url} ({reason}): {state}", "check the network, and HF_ENDPOINT if it is set"
    )
