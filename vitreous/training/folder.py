"""The folder of a run: its files, its lock, and the checks before a run is created or resumed."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from vitreous.config import from_yaml, to_yaml
from vitreous.data.tokenizer import TOKENIZER_FILE, Tokenizer
from vitreous.errors import ResourceError, UsageError
from vitreous.system.disk import write_text_atomic
from vitreous.training.checkpoint import CheckpointStore
from vitreous.training.run import Run

#: files that `RunFolder.create` writes before config.yaml, complete or partial
UNSTARTED_RUN_FILES = re.compile(
    r"command\.txt|(environment|data|trials|tokenizer)\.json|\.(command\.txt|(environment|data|trials|tokenizer)\.json|config\.yaml)\.tmp"
)


class MetricsSink(Protocol):
    """Interface of receivers of a run's metrics, one dict per line of metrics.jsonl. Implementations do not raise or
    block."""

    def log_line(self, line: dict[str, Any]) -> None:
        """Receive a new line of metrics."""
        ...

    def resume_from(self, step: int, lines: list[dict[str, Any]]) -> None:
        """Replace all lines after `step`: `lines` are those from which a run continues."""
        ...


@dataclass(frozen=True)
class RunFolder:
    """The folder of one training run. `sinks` receive every line of metrics in addition to metrics.jsonl."""

    path: Path
    sinks: tuple[MetricsSink, ...] = field(default=(), compare=False)

    @property
    def config(self) -> Path:
        """Path of the config of the run."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """Path of the metrics, one JSON object per line."""
        return self.path / "metrics.jsonl"

    @property
    def warnings(self) -> Path:
        """Path of the warnings, one per line: step, name and text."""
        return self.path / "warnings.jsonl"

    @property
    def summary(self) -> Path:
        """Path of the summary, which exists when the run is complete."""
        return self.path / "summary.json"

    @property
    def bundle(self) -> Path:
        """Path of the folder of the trained model."""
        return self.path / "model"

    def store(self, keep: int) -> CheckpointStore:
        """Return the store of the run's checkpoints, which keeps the newest `keep`."""
        return CheckpointStore(self.path / "checkpoints", keep)

    def create(self, run: Run, command: str, documents: dict[str, Any], tokenizer: Tokenizer | None = None) -> None:
        """Create the folder of a new run with command.txt, config.yaml, each of the `documents` as NAME.json, and the
        tokenizer of a run with a text encoder.

        Raises UsageError if the folder already contains files, ResourceError if it cannot be written.
        """
        self.refuse_existing()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_text_atomic(self.path / "command.txt", command + "\n")
            for name, document in documents.items():
                write_text_atomic(self.path / f"{name}.json", json.dumps(document, indent=2, ensure_ascii=False) + "\n")
            if tokenizer is not None:
                tokenizer.write(self.path / TOKENIZER_FILE)
            write_text_atomic(self.config, to_yaml(run))
            update_latest_link(self.path)
        except OSError as error:
            raise ResourceError(
                f"cannot write the run folder {self.path}: {error.strerror}", "choose another --out"
            ) from None

    def record_resumption(self, run: Run, command: str, documents: dict[str, Any]) -> None:
        """Write the config, command and `documents` of a resumed run. The previous config is kept as config.N.yaml; the
        new command is appended to command.txt."""
        with self.locked():
            index = len(list(self.path.glob("config.*.yaml"))) + 1
            write_text_atomic(self.path / f"config.{index}.yaml", self.config.read_text("utf-8"))
            previous = (self.path / "command.txt").read_text("utf-8")
            write_text_atomic(self.path / "command.txt", previous + command + "\n")
            for name, document in documents.items():
                write_text_atomic(self.path / f"{name}.json", json.dumps(document, indent=2, ensure_ascii=False) + "\n")
            write_text_atomic(self.config, to_yaml(run))

    def refuse_existing(self) -> None:
        """Raise UsageError if the folder contains files. Files of a `create` that was killed before it wrote the config
        are ignored."""
        if not self.path.exists():
            return
        names = [path.name for path in self.path.iterdir()] if self.path.is_dir() else ["no folder"]
        is_unstarted = any("command.txt" in name for name in names) and all(
            UNSTARTED_RUN_FILES.fullmatch(name) for name in names
        )
        if names and not is_unstarted:
            raise UsageError(f"{self.path} already exists", "use --resume to continue the run, or another --out")

    def run(self) -> Run:
        """Read the run from config.yaml. Raises UsageError if the file does not exist."""
        if not self.config.is_file():
            raise UsageError(f"{self.path} is not a run folder: it has no config.yaml", "start a run without --resume")
        return from_yaml(Run, self.config.read_text("utf-8"))

    def launch(self) -> str:
        """Return the identifier of the `torchrun` job that started the run (`ranks.get_launch_name`); "" without
        torchrun."""
        try:
            return json.loads((self.path / "environment.json").read_text("utf-8")).get("torchrun", "")
        except (OSError, ValueError):
            return ""

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder for writing during the block. Raises UsageError, with the ID of the process that holds the
        lock, if it is locked."""
        try:
            import fcntl
        except ImportError:  # the system, such as Windows, has no fcntl locks
            yield
            return
        with open(self.path / ".lock", "a+") as file:
            try:
                # lockf ends with this process; flock would stay locked while its worker processes live
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.seek(0)
                raise UsageError(
                    f"{self.path} is in use by process {file.read().strip()}",
                    "wait until it ends, or use another --out",
                ) from None
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield

    @contextmanager
    def explain_resume(self) -> Iterator[None]:
        """Add to a ResourceError raised in the block the checkpoint that is kept, and the command that continues from
        it."""
        try:
            yield
        except ResourceError as error:
            newest = next(self.store(0).list_paths(), None)
            if newest is None or "--resume" in error.hint:
                raise
            hint = f"{error.hint}; then continue with --resume --out {self.path}".removeprefix("; then ")
            raise ResourceError(f"{error.message}; checkpoint {newest.name} is kept", hint) from None

    def append(self, line: dict[str, Any]) -> None:
        """Add one line to metrics.jsonl. Sinks receive the line even if the file cannot be written."""
        for sink in self.sinks:
            sink.log_line(line)
        append_line(self.metrics, line)

    def warn(self, step: int, name: str, text: str) -> None:
        """Add one warning to warnings.jsonl."""
        append_line(self.warnings, {"step": step, "name": name, "text": text})

    def rewind(self, step: int, exclude: str | None = None) -> None:
        """Remove metrics and warnings after `step`, which a resumed run writes again.

        Lines of metrics that contain the text `exclude` and an incomplete last line are removed too. Sinks receive the
        remaining lines.
        """
        for path, excluded in ((self.metrics, exclude), (self.warnings, None)):
            if path.exists():
                lines = [json.dumps(line) + "\n" for line in read_json_lines(path) if line["step"] <= step]
                write_text_atomic(path, "".join(line for line in lines if not (excluded and excluded in line)))
        for sink in self.sinks:
            sink.resume_from(step, read_json_lines(self.metrics))


class MetricsFollower:
    """Follows a growing metrics.jsonl: each call of `read` returns the lines added since the previous call."""

    def __init__(self, path: Path) -> None:
        self.path, self.inode, self.offset = path, 0, 0

    def read(self) -> tuple[bool, list[dict[str, Any]]]:
        """Return whether the file was rewritten since the last call, and the new complete lines.

        A run that resumes from a checkpoint rewrites the file; all its lines are then new. An incomplete last line is
        returned by a later call, when it is complete.
        """
        try:
            with open(self.path, "rb") as file:
                file.seek(0, 2)
                status, size = self.path.stat(), file.tell()
                was_replaced = bool(self.inode) and (status.st_ino != self.inode or size < self.offset)
                self.inode, self.offset = status.st_ino, 0 if was_replaced else self.offset
                file.seek(self.offset)
                text = file.read()
        except FileNotFoundError:
            return False, []
        complete_lines = text[: text.rfind(b"\n") + 1]
        self.offset += len(complete_lines)
        parsed = (parse_json_line(line) for line in complete_lines.decode("utf-8", "replace").splitlines())
        return was_replaced, [line for line in parsed if line is not None]


def append_line(path: Path, line: dict[str, Any]) -> None:
    """Append a JSON object as one line to a file. If the last line is incomplete, a line break is written first."""
    with open(path, "a", encoding="utf-8") as file:
        file.write("\n" * is_last_line_cut_off(path) + json.dumps(line) + "\n")


def is_last_line_cut_off(path: Path) -> bool:
    """Return whether the last line of a file lacks its line break."""
    with open(path, "rb") as file:
        if not file.seek(0, os.SEEK_END):
            return False
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read the JSON objects of a file with one object per line. Incomplete lines are skipped; a missing file has no
    lines."""
    lines = path.read_text("utf-8").splitlines() if path.is_file() else []
    return [line for line in map(parse_json_line, lines) if line is not None]


def parse_json_line(line: str) -> dict[str, Any] | None:
    """Parse a line as a JSON object; None if the line is incomplete or not an object."""
    try:
        parsed = json.loads(line)
    except ValueError:
        return None
    return parsed if isinstance(parsed, dict) else None


def update_latest_link(path: Path) -> None:
    """Make the symbolic link `latest`, next to the run folder `path`, point to this folder."""
    link, temporary = path.parent / "latest", path.parent / f".latest-{os.getpid()}"
    if link.is_symlink() or not link.exists():
        try:
            temporary.symlink_to(path.name)
            os.replace(temporary, link)
        except OSError:  # the file system does not support links; they are only a convenience
            temporary.unlink(missing_ok=True)


def format_evaluation_key(step: int, epoch: float, prefix: str) -> str:
    """Return the text by which `RunFolder.rewind` finds the metrics line of an evaluation: its step, epoch and metric
    `prefix`."""
    return f'"step": {step}, "epoch": {json.dumps(epoch)}, "{prefix}'


def read_last_value(path: Path, name: str) -> float | None:
    """Return the last value of a metric in a metrics.jsonl; None if the file has no such value, for example after a run
    on a full disk."""
    values = [line[name] for line in read_json_lines(path) if name in line]
    return values[-1] if values else None
