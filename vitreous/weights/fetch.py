"""Weights from elsewhere, brought into a cache on this machine: `hf:org/name`, `timm:name`, `https://...#sha256=...`.

What arrives is only stored here; `open_weights` judges it before any of it is used.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import re
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import IO, Any

from vitreous.disk import atomic, cache, sha256
from vitreous.errors import UsageError, VitreousError, WeightsError, printable
from vitreous.models.names import configure, name_of
from vitreous.progress import Listener

MAX_BYTES = 32 << 30  # of one file
TIMEOUT = 30  # seconds without a byte
CHUNK = 1 << 20
LOCAL = ("127.0.0.1", "::1", "localhost")  # where plain http is allowed: nobody is in between
SUFFIXES = (".safetensors", ".npz", ".pt", ".pth", ".bin")
HUB = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?(?::(?P<file>[\w./ -]+))?")
#: the files of a repository that hold its weights, the safer first, and those that say what they are
WHOLE, INDEX, PICKLE = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
DESCRIPTIONS = ("config.json", "preprocessor_config.json")
#: where weights of a model are published, for who names the model alone
PUBLISHED = {
    "ViT-Ti/16": "timm:vit_tiny_patch16_224.augreg_in21k",
    "ViT-S/16": "timm:vit_small_patch16_224.augreg_in21k",
    "ViT-S/32": "timm:vit_small_patch32_224.augreg_in21k",
    "ViT-B/16": "hf:google/vit-base-patch16-224-in21k",
    "ViT-B/32": "hf:google/vit-base-patch32-224-in21k",
    "ViT-L/16": "hf:google/vit-large-patch16-224-in21k",
    "ViT-L/32": "hf:google/vit-large-patch32-224-in21k",
    "ViT-H/14": "hf:google/vit-huge-patch14-224-in21k",
}
MAX_INDEX = 8 << 20  # bytes


def fetch(source: str, listener: Listener | None = None) -> Path:
    """Download weights if need be; returns their local path: a folder for a repository of the Hub, else a file.

    `hf:org/name[@revision][:file]` and `timm:name.tag` come from the Hugging Face Hub through its own cache,
    `https://...#sha256=HEX` once from there and then from the cache of this package; anything else is a path already.
    Raises UsageError for a malformed source, WeightsError for a download that fails or has another hash.
    """
    kind, _, rest = source.partition(":")
    if kind == "timm":
        return from_hub(source, rest if "/" in rest else f"timm/{rest}", listener)
    if kind == "hf":
        return from_hub(source, rest, listener)
    if kind in ("http", "https") and rest.startswith("//"):
        return from_web(source, listener)
    return Path(source)


def published_weights(model: str) -> str:
    """The source of published weights of a model, by its name here; "" where none is known."""
    return PUBLISHED.get(model, "")


def nothing_at(source: str) -> WeightsError:
    """The error for a source that is neither a local path nor of a known form; says so of a model's name."""
    forms = "timm:NAME.TAG or hf:ORG/NAME (needs vitreous[hub])"
    try:
        name = name_of(configure(source))
    except VitreousError:
        return WeightsError(f"no weights at {printable(source)}", f"name a run folder, a bundle, a file, {forms}")
    where = f"{known}, or another {forms}" if (known := published_weights(name)) else forms
    return WeightsError(
        f"no weights at {printable(source)}: it is a model's name, and says nothing of its weights",
        f"name {where}, or a file",
    )


def from_hub(source: str, name: str, listener: Listener | None) -> Path:
    """The snapshot folder of a repository with its weights and descriptions, or the one file that was named. Raises
    UsageError for a name that is none, or without the extra."""
    match = HUB.fullmatch(name)
    if not match or ".." in name:
        raise UsageError(
            f"{source} names no repository",
            "write hf:org/name, hf:org/name@revision or hf:org/name:file, or timm:name.tag",
        )
    try:
        import huggingface_hub  # noqa: F401
    except ImportError:
        raise UsageError(
            f"{source} needs the Hub's client, which is not installed", "pip install vitreous[hub]"
        ) from None
    repository = Repository(source, match["repo"], match["revision"], listener)
    if match["file"]:
        path = repository.get(match["file"])
        if path is None:
            raise repository.lost or WeightsError(
                f"{source}: the repository has no file {match['file']}", f"see {repository.page()}"
            )
    elif not repository.get(WHOLE) and not repository.shards() and not repository.get(PICKLE):
        hint = f"see {repository.page()}, and name its file: hf:{match['repo']}:FILE"
        raise repository.lost or WeightsError(f"{source}: the repository has neither {WHOLE} nor {PICKLE}", hint)
    else:
        path = repository.folder
    for file in DESCRIPTIONS:
        repository.get(file)
    return path


class Repository:
    """One repository of the Hub, at one revision: the commit of the first file that arrives, for all that follow.

    Without a network it is what the cache has of it; `lost` is the error to raise where that is not enough.
    """

    def __init__(self, source: str, name: str, revision: str | None, listener: Listener | None) -> None:
        self.source, self.name, self.revision, self.listener = source, name, revision, listener
        self.folder = Path()
        self.lost: WeightsError | None = None

    def get(self, file: str) -> Path | None:
        """A file of the repository in the Hub's cache, or None where it has none of that name."""
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

        if self.folder == Path() and self.lost is None:
            self.reach(file)
        try:
            path = Path(
                hf_hub_download(self.name, file, revision=self.revision, local_files_only=self.lost is not None)
            )
        except LocalEntryNotFoundError as error:
            self.lost = self.lost or self.missing(error)
            return None
        except EntryNotFoundError:
            return None
        except Exception as error:  # those of whichever HTTP library the client is built on, too
            raise self.missing(error) from None
        if self.folder == Path():
            self.folder = path.parents[file.count("/")]
            self.revision = self.folder.name
            if self.listener:
                self.listener.note(f"{self.source} is {self.name} at {self.revision[:12]}, in {self.folder}")
        return path

    def reach(self, file: str) -> None:
        """Ask the server once. A download would try for half a minute before it looked into the cache."""
        from huggingface_hub import get_hf_file_metadata, hf_hub_url

        try:
            get_hf_file_metadata(hf_hub_url(self.name, file, revision=self.revision))
        except Exception as error:  # an answer is an answer, whatever it says; `get` asks again
            if getattr(error, "response", None) is None and not isinstance(error, ValueError):
                self.lost = self.missing(error)

    def shards(self) -> bool:
        """Download the files that an index lists; returns whether there is one. Raises WeightsError for a bad index."""
        index = self.get(INDEX)
        if not index:
            return False
        try:
            if index.stat().st_size > MAX_INDEX:
                raise ValueError(f"over {MAX_INDEX:,} bytes")
            files = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
            if not files or not all(re.fullmatch(r"[\w-][\w.-]*\.safetensors", file) for file in files):
                raise ValueError("it lists other files than .safetensors beside it")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise WeightsError(
                f"{self.source}: {INDEX} is no index of weights ({error})", "name a file of the repository instead"
            ) from None
        for file in files:
            if not self.get(file):
                raise WeightsError(f"{self.source}: {INDEX} lists {file}, which is not there", f"see {self.page()}")
        return True

    def page(self) -> str:
        """Where people see the repository."""
        from huggingface_hub import constants

        return f"{constants.ENDPOINT}/{self.name}"

    def missing(self, error: Exception) -> WeightsError:
        """The error for a file that the client could not download."""
        from huggingface_hub import errors

        where, token = self.source, "set HF_TOKEN to a token of an account that has access (`hf auth login` stores one)"
        status = getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(error, errors.GatedRepoError):
            return WeightsError(
                f"{where}: access has to be asked for", f"accept its terms at {self.page()}, then {token}"
            )
        if isinstance(error, errors.RevisionNotFoundError):
            return WeightsError(f"{where}: the repository has no revision {self.revision}", f"see {self.page()}")
        if isinstance(error, errors.RepositoryNotFoundError):
            return WeightsError(
                f"{where}: there is no such repository, or it is private",
                f"check the name at {self.page()}, or {token}",
            )
        if status in (401, 403):
            return WeightsError(f"{where}: access is refused ({status})", token)
        if isinstance(error, errors.HFValidationError):
            return WeightsError(f"{where} names no repository", "write hf:org/name")
        if offline():
            return WeightsError(
                f"{where} is not in the cache, and HF_HUB_OFFLINE forbids to download it", "unset HF_HUB_OFFLINE once"
            )
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
        if status is None:
            hint = "check the network (HF_ENDPOINT names another server), or name a local file"
            return WeightsError(f"{where} is not in the cache, and {self.page()} cannot be reached ({reason})", hint)
        return WeightsError(f"{where} could not be downloaded ({reason})", "try again")


def offline() -> bool:
    """Whether the Hub's client was told to stay off the network."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def from_web(source: str, listener: Listener | None) -> Path:
    """Return a file by its address and SHA-256: from the cache if it is there and whole, else downloaded into it.

    Raises UsageError for an address without a digest, WeightsError for what cannot be downloaded or has another one."""
    address, _, pin = source.partition("#")
    kind, _, wanted = pin.partition("=")
    wanted = wanted.strip().lower()
    if kind != "sha256" or not re.fullmatch(r"[0-9a-f]{64}", wanted):
        hint = "add #sha256= and the 64 digits its publisher gives, or download it and run `sha256sum FILE`"
        raise UsageError(f"{address} is not pinned: what it serves may change", hint)
    refuse_address(address)
    suffix = Path(urllib.parse.urlsplit(address).path).suffix
    target = cache("weights") / (wanted + (suffix if suffix in SUFFIXES else ""))
    if target.is_file() and sha256(target) == wanted:
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic(target, shared=True) as file:
            actual = download(address, file, listener)
            if actual != wanted:
                hint = "use the hash its publisher gives today only if you trust the change"
                raise WeightsError(f"{address} has the SHA-256 {actual}, not {wanted}", hint)
    except OSError as error:
        raise WeightsError(
            f"nothing can be stored in {target.parent} ({error.strerror})", "set XDG_CACHE_HOME to a writable folder"
        ) from None
    return target


def refuse_address(address: str) -> None:
    """Raise WeightsError unless an address is https, or of this machine."""
    parts = urllib.parse.urlsplit(address)
    if not parts.hostname or (parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in LOCAL)):
        raise WeightsError(f"{address} is not https", "name an https:// address")


class Redirects(urllib.request.HTTPRedirectHandler):
    """Follows a redirect only to where a download may begin."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        """The next request. Raises WeightsError for another scheme than https."""
        refuse_address(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def download(address: str, file: IO[bytes], listener: Listener | None) -> str:
    """Write what an address serves into a file; returns its SHA-256 in hex. Raises WeightsError."""
    request = urllib.request.Request(address, headers={"User-Agent": "vitreous", "Accept-Encoding": "identity"})
    match, done = hashlib.sha256(), 0
    try:
        with urllib.request.build_opener(Redirects).open(request, timeout=TIMEOUT) as answer:
            total = int(answer.headers.get("Content-Length") or 0)
            while True:
                if max(done, total) > MAX_BYTES:
                    raise WeightsError(
                        f"{address} serves {max(done, total):,} bytes, more than {MAX_BYTES:,}", "download it yourself"
                    )
                chunk = answer.read(CHUNK)
                if not chunk:
                    break
                file.write(chunk)
                match.update(chunk)
                done += len(chunk)
                if listener:
                    listener.progress("download", done, max(total, done), f"{done / 1e6:.0f} MB")
    except urllib.error.HTTPError as error:
        raise WeightsError(f"{address} answers {error.code} ({error.reason})", "check the address") from None
    except (OSError, http.client.HTTPException, ValueError) as error:  # URLError and time-outs are OSErrors
        reason = getattr(error, "reason", None) or error
        raise WeightsError(
            f"{address} could not be downloaded ({reason or type(error).__name__})", "check the network, and try again"
        ) from None
    if total and done != total:
        raise WeightsError(f"{address} ended after {done:,} of {total:,} bytes", "try again")
    return match.hexdigest()
