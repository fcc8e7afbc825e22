"""Download weights into a cache: published ones by name, `hf:org/name`, `timm:name`, `https://...#sha256=...`.

Downloads are only stored here; `open_weights` checks them before use.
"""

from __future__ import annotations

import json
import os
import re
import urllib.parse
from pathlib import Path

from vitreous.config import import_object
from vitreous.errors import UsageError, VitreousError, WeightsError, escape_unprintable, install_hint
from vitreous.models.names import config_from_name
from vitreous.progress import NullListener, ProgressDisplay, ProgressListener, is_main_process
from vitreous.system.disk import compute_sha256, get_cache_folder, write_text_atomic
from vitreous.weights.download import download_file, has_digest, require_https
from vitreous.weights.published import (
    PublishedWeights,
    find_published_name,
    find_published_weights,
    nearest_published_name,
)

WEIGHTS_SUFFIXES = (".safetensors", ".npz", ".pt", ".pth", ".bin")
HUB_SOURCE = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?(?::(?P<file>[\w./ -]+))?")
#: weights files of a repository, safer formats first, and the files that describe them
SAFETENSORS_FILE, SHARD_INDEX_FILE, PICKLE_FILE = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
)
HUB_CONFIG_FILES = ("config.json", "preprocessor_config.json")
#: files of open_clip's repositories, and tokenizers of models with a text encoder
OPEN_CLIP_FILES = ("open_clip_model.safetensors", "open_clip_config.json")
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "merges.txt")
#: files of a bundle, as named in `weights.bundle` and `weights.objective_parts`
BUNDLE_FILES, OBJECTIVE_FILE = ("model.json", "weights.safetensors"), "objective.safetensors"
MAX_INDEX_BYTES = 8 << 20  # bytes


def fetch_weights(source: str, listener: ProgressListener | None = None) -> Path:
    """Return the local path of weights, which are downloaded if necessary: a folder for a Hub repository, else a file.

    A name of `weights.published` selects its address. `hf:org/name[@revision][:file]` and `timm:name.tag` are
    downloaded from the Hugging Face Hub through its cache, `https://...#sha256=HEX` once into the cache of this
    package. Anything else is returned as a path. Without a listener, progress is shown on stderr. Raises UsageError for
    a malformed source, WeightsError for a download that fails or has another digest.
    """
    if published := find_published_weights(source):
        return fetch_published_weights(published, listener)
    scheme, _, location = source.partition(":")
    if scheme == "timm":
        repository = location if "/" in location else find_timm_repository(location)
        return fetch_from_hub(source, repository, listener)
    if scheme == "hf" and location and Path(location).exists():
        return Path(location)
    if scheme == "hf":
        return fetch_from_hub(source, location, listener)
    if scheme in ("http", "https") and location.startswith("//"):
        return fetch_from_url(source, listener)
    return Path(source)


def find_timm_repository(name: str) -> str:
    """Return the Hub repository of a timm model's weights, `timm/NAME.TAG`. A name without tag, such as
    `convnext_tiny`, selects timm's default weights, if timm is installed, possibly as `org/name:file`."""
    if "." in name:
        return f"timm/{name}"
    try:
        record = import_object("vitreous.models.library_weights:read_timm_defaults")(name)
    except VitreousError:
        record = {}
    repository, file = record.get("hf_hub_id"), record.get("hf_hub_filename")
    if not repository:
        return f"timm/{name}"
    return f"{repository}:{file}" if file else repository


def missing_source_error(source: str) -> WeightsError:
    """Build the error for a source that is neither a local path nor a known name; a model name gets a specific
    message."""
    forms = "a name of `vitreous models --weights`, timm:NAME.TAG or hf:ORG/NAME (both need the extra hub)"
    try:
        name = config_from_name(source).name()
    except VitreousError:
        nearest = nearest_published_name(source)
        hint = f"use a run folder, a bundle, a file, {forms}"
        return WeightsError(
            f"no weights at {escape_unprintable(source)}",
            f"did you mean {nearest}? Otherwise {hint}" if nearest else hint,
        )
    suggestion = (
        f"{published_name}, or another {forms.removeprefix('a ')}"
        if (published_name := find_published_name(name))
        else forms
    )
    return WeightsError(
        f"no weights at {escape_unprintable(source)}: it is the name of a model, not of weights",
        f"use {suggestion}, or a file",
    )


def fetch_published_weights(published: PublishedWeights, listener: ProgressListener | None) -> Path:
    """Return the local file of published weights, downloaded unless the cache has it, or the folder of their Hub
    repository. Raises WeightsError for a failed download or another digest."""
    if published.source.startswith("hf:"):
        return fetch_from_hub(published.source, published.source.removeprefix("hf:"), listener)
    target, record = get_cache_paths(published)
    if is_download_complete(target, record):
        return target
    location = resolve_mirror(published.source)
    if isinstance(location, Path):
        return verify_mirror_file(location, published.digest)
    listener = listener or default_listener()
    require_network(published.name)
    listener.note(f"{published.name} is {published.model} from {location}, licence {published.licence}")
    if not published.digest:
        listener.note(f"no digest of {published.name} is published: only its size is verified")
    download_into_cache(location, target, published.digest, listener)
    try:
        write_text_atomic(
            record, json.dumps({"address": location, "bytes": target.stat().st_size, "sha256": compute_sha256(target)})
        )
    except OSError as error:
        raise unwritable_cache_error(target.parent, error) from None
    return target


def get_cache_paths(published: PublishedWeights) -> tuple[Path, Path]:
    """Return the cache path of published weights, and the path of the record of their download."""
    target = get_cache_folder("weights") / published.name / Path(urllib.parse.urlsplit(published.source).path).name
    return target, target.with_name(target.name + ".json")


def is_download_complete(target: Path, record: Path) -> bool:
    """Return whether a downloaded file exists and has the SHA-256 in its record."""
    try:
        return target.is_file() and compute_sha256(target) == json.loads(record.read_text("utf-8"))["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return False


def resolve_mirror(address: str) -> str | Path:
    """Return the URL to download from: `address`, or HOST/PATH below VITREOUS_MIRROR. If that is a folder, return the
    file. Raises WeightsError for a mirror folder without the file."""
    mirror = os.environ.get("VITREOUS_MIRROR", "").rstrip("/")
    if not mirror:
        return address
    host_path = address.partition("://")[2]
    if "://" in mirror:
        return f"{mirror}/{host_path}"
    if not (path := Path(mirror) / host_path).is_file():
        raise WeightsError(f"VITREOUS_MIRROR has no {path}", f"download {address} there, or unset VITREOUS_MIRROR")
    return path


def verify_mirror_file(path: Path, digest: str) -> Path:
    """Return the file of a mirror folder. Raises WeightsError if it has another digest."""
    if digest and not has_digest(path, digest):
        raise WeightsError(f"{path} does not have the digest {digest}", "download the file again")
    return path


def default_listener() -> ProgressListener:
    """Return the listener that shows downloads on stderr; under `torchrun`, only one process shows them."""
    return ProgressDisplay() if is_main_process() else NullListener()


def fetch_from_hub(source: str, name: str, listener: ProgressListener | None) -> Path:
    """Download the weights and config files of a Hub repository to the Hub's cache, and return their folder; for
    `org/name:file`, return the path of the file. Raises UsageError for an invalid name, or if the extra `hub` is not
    installed; WeightsError for a failed download."""
    match = HUB_SOURCE.fullmatch(name)
    if not match or ".." in name:
        raise UsageError(
            f"{source} is not a repository name",
            "write hf:org/name, hf:org/name@revision or hf:org/name:file, or timm:name.tag",
        )
    try:
        import huggingface_hub  # noqa: F401
    except ImportError:
        raise UsageError(f"{source} needs the Hub client, which is not installed", install_hint("hub")) from None
    repository = HubRepository(source, match["repo"], match["revision"], listener)
    if match["file"]:
        path = repository.get_file(match["file"])
        if path is None:
            raise repository.offline_error or WeightsError(
                f"{source}: the repository has no file {match['file']}", f"see {repository.get_page_url()}"
            )
        if match["file"] == OPEN_CLIP_FILES[0]:
            repository.get_file(OPEN_CLIP_FILES[1])
    elif repository.get_file(BUNDLE_FILES[0]) and repository.get_file(BUNDLE_FILES[1]):
        for file in (OBJECTIVE_FILE, TOKENIZER_FILES[0]):
            repository.get_file(file)
        return repository.folder
    elif (
        not repository.get_file(SAFETENSORS_FILE)
        and not repository.download_shards()
        and not repository.get_file(PICKLE_FILE)
        and not (repository.get_file(OPEN_CLIP_FILES[0]) and repository.get_file(OPEN_CLIP_FILES[1]))
    ):
        hint = f"see {repository.get_page_url()}, and select a file: hf:{match['repo']}:FILE"
        raise repository.offline_error or WeightsError(
            f"{source}: the repository has neither {SAFETENSORS_FILE} nor {PICKLE_FILE}", hint
        )
    else:
        path = repository.folder
    for file in HUB_CONFIG_FILES:
        repository.get_file(file)
    if repository.has_text_encoder():
        for file in TOKENIZER_FILES:
            repository.get_file(file)
    return path


class HubRepository:
    """A repository of the Hugging Face Hub at one commit: that of the first downloaded file. If the Hub cannot be
    reached, only cached files are available; `offline_error` is the error for missing ones."""

    def __init__(self, source: str, name: str, revision: str | None, listener: ProgressListener | None) -> None:
        self.source, self.name, self.revision, self.listener = source, name, revision, listener
        self.folder = Path()
        self.offline_error: WeightsError | None = None

    def get_file(self, file: str) -> Path | None:
        """Return a file of the repository in the Hub's cache, or None if the repository lacks it. Raises WeightsError
        for other errors."""
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

        if self.folder == Path() and self.offline_error is None:
            self.reach(file)
        try:
            path = Path(
                hf_hub_download(
                    self.name, file, revision=self.revision, local_files_only=self.offline_error is not None
                )
            )
        except LocalEntryNotFoundError as error:
            self.offline_error = self.offline_error or self.missing(error)
            return None
        except EntryNotFoundError:
            return None
        except Exception as error:  # including errors of the client's HTTP library
            raise self.missing(error) from None
        if self.folder == Path():
            self.folder = path.parents[file.count("/")]
            self.revision = self.folder.name
            if self.listener:
                self.listener.note(f"{self.source} is {self.name} at {self.revision[:12]}, in {self.folder}")
        return path

    def has_text_encoder(self) -> bool:
        """Return whether the downloaded configs describe a model with a text encoder."""
        if (self.folder / OPEN_CLIP_FILES[1]).is_file():
            return True
        try:
            return '"text_config"' in (self.folder / HUB_CONFIG_FILES[0]).read_text("utf-8")
        except (OSError, ValueError):
            return False

    def reach(self, file: str) -> None:
        """Request metadata of one file, and set `offline_error` if the server cannot be reached. A download would retry
        for half a minute before it uses the cache."""
        from huggingface_hub import get_hf_file_metadata, hf_hub_url

        if get_offline_variable():
            self.offline_error = self.missing(ConnectionError("offline"))
            return
        try:
            get_hf_file_metadata(hf_hub_url(self.name, file, revision=self.revision))
        except Exception as error:  # any response means that the server is reachable; `get_file` repeats the request
            if getattr(error, "response", None) is None and not isinstance(error, ValueError):
                self.offline_error = self.missing(error)

    def download_shards(self) -> bool:
        """Download the files that the safetensors index lists; return whether the repository has an index. Raises
        WeightsError for an invalid index."""
        index = self.get_file(SHARD_INDEX_FILE)
        if not index:
            return False
        try:
            if index.stat().st_size > MAX_INDEX_BYTES:
                raise ValueError(f"over {MAX_INDEX_BYTES:,} bytes")
            files = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
            if not files or not all(re.fullmatch(r"[\w-][\w.-]*\.safetensors", file) for file in files):
                raise ValueError("it lists files other than .safetensors in its folder")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise WeightsError(
                f"{self.source}: {SHARD_INDEX_FILE} is not a weights index ({error})",
                "select a file of the repository instead",
            ) from None
        for file in files:
            if not self.get_file(file):
                raise WeightsError(
                    f"{self.source}: {SHARD_INDEX_FILE} lists {file}, which does not exist",
                    f"see {self.get_page_url()}",
                )
        return True

    def get_page_url(self) -> str:
        """Return the URL of the repository's web page."""
        from huggingface_hub import constants

        return f"{constants.ENDPOINT}/{self.name}"

    def missing(self, error: Exception) -> WeightsError:
        """Build the error for a file that could not be downloaded, with a hint for its cause."""
        from huggingface_hub import errors

        source, token = (
            self.source,
            "set HF_TOKEN to a token of an account that has access (`hf auth login` stores one)",
        )
        status = getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(error, errors.GatedRepoError):
            return WeightsError(
                f"{source}: access must be requested", f"accept its terms at {self.get_page_url()}, then {token}"
            )
        if isinstance(error, errors.RevisionNotFoundError):
            return WeightsError(
                f"{source}: the repository has no revision {self.revision}", f"see {self.get_page_url()}"
            )
        if isinstance(error, errors.RepositoryNotFoundError):
            return WeightsError(
                f"{source}: there is no such repository, or it is private",
                f"check the name at {self.get_page_url()}, or {token}",
            )
        if status in (401, 403):
            return WeightsError(f"{source}: access is denied ({status})", token)
        if isinstance(error, errors.HFValidationError):
            return WeightsError(f"{source} is not a repository name", "write hf:org/name")
        if variable := get_offline_variable():
            return WeightsError(
                f"{source} is not in the cache, and {variable} disables downloads", f"unset {variable} once"
            )
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
        if status is None:
            hint = "check the network (HF_ENDPOINT sets another server), or use a local file"
            return WeightsError(
                f"{source} is not in the cache, and {self.get_page_url()} cannot be reached ({reason})", hint
            )
        return WeightsError(f"{source} could not be downloaded ({reason})", "try again")


def get_offline_variable() -> str:
    """Return the environment variable that disables downloads, HF_HUB_OFFLINE or VITREOUS_OFFLINE; "" if none does."""
    true_values = ("1", "true", "yes", "on")
    return next(
        (
            variable
            for variable in ("HF_HUB_OFFLINE", "VITREOUS_OFFLINE")
            if os.environ.get(variable, "").lower() in true_values
        ),
        "",
    )


def require_network(source: str) -> None:
    """Raise WeightsError if an environment variable disables downloads."""
    if variable := get_offline_variable():
        message = f"{source} is not in the cache, and {variable} disables downloads"
        raise WeightsError(message, f"unset {variable} once, or copy the cache from another machine")


def fetch_from_url(source: str, listener: ProgressListener | None) -> Path:
    """Return the local file of a source `URL#sha256=HEX`, downloaded unless the cache has it. Raises UsageError for a
    URL without a SHA-256, WeightsError for a failed download or another digest."""
    address, _, fragment = source.partition("#")
    algorithm, _, digest = fragment.partition("=")
    digest = digest.strip().lower()
    if algorithm != "sha256" or not re.fullmatch(r"[0-9a-f]{64}", digest):
        hint = "add #sha256= and the publisher's 64 digits, or download it and run `sha256sum FILE`"
        raise UsageError(f"{address} is not pinned: its content may change", hint)
    require_https(address)
    suffix = Path(urllib.parse.urlsplit(address).path).suffix
    target = get_cache_folder("weights") / (digest + (suffix if suffix in WEIGHTS_SUFFIXES else ""))
    if target.is_file() and compute_sha256(target) == digest:
        return target
    location = resolve_mirror(address)
    if isinstance(location, Path):
        return verify_mirror_file(location, f"sha256:{digest}")
    require_network(address)
    download_into_cache(location, target, f"sha256:{digest}", listener or default_listener())
    return target


def download_into_cache(address: str, target: Path, digest: str, listener: ProgressListener) -> None:
    """Download a file into the cache. Raises WeightsError if the download fails or the cache is not writable."""
    try:
        download_file(address, target, digest, listener)
    except OSError as error:
        raise unwritable_cache_error(target.parent, error) from None
    finally:
        if isinstance(listener, ProgressDisplay):
            listener.close()


def unwritable_cache_error(folder: Path, error: OSError) -> WeightsError:
    """Build the error for a cache folder that is not writable."""
    reason = error.strerror or error
    return WeightsError(f"cannot write to the cache {folder} ({reason})", "set XDG_CACHE_HOME to a writable folder")
