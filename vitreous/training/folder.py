"""The run folder: its files, its lock, and the state that a resumed run finds."""

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
from vitreous.errors import ResourceError, UsageError
from vitreous.system.disk import write_text_atomic
from vitreous.training.checkpoint import CheckpointStore
from vitreous.training.run import Run

#: files that `create` writes before config.yaml, complete or partial
UNSTARTED_RUN_FILES = re.compile(
    r"command\.txt|(environment|data|trials)\.json|\.(command\.txt|(environment|data|trials)\.json|config\.yaml)\.tmp"
)


class MetricsSink(Protocol):
    """Interface of receivers of a run's metrics lines. Implementations do not raise or block."""

    def log_line(self, line: dict[str, Any]) -> None: ...
    def rewind(self, step: int, lines: list[dict[str, Any]]) -> None: ...


@dataclass(frozen=True)
class RunFolder:
    """One training run on disk. `sinks` receive its metrics in addition to metrics.jsonl."""

    path: Path
    sinks: tuple[MetricsSink, ...] = field(default=(), compare=False)

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def warnings(self) -> Path:
        """Path of the warnings, one per line: step, name and text."""
        return self.path / "warnings.jsonl"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def bundle(self) -> Path:
        return self.path / "model"

    def store(self, keep: int) -> CheckpointStore:
        """The checkpoints of the run."""
        return CheckpointStore(self.path / "checkpoints", keep)

    def create(self, run: Run, command: str, documents: dict[str, Any]) -> None:
        """Create the folder of a new run. Raises UsageError if it already exists, ResourceError if it cannot be
        written."""
        self.refuse_existing()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_text_atomic(self.path / "command.txt", command + "\n")
            for name, document in documents.items():
                write_text_atomic(self.path / f"{name}.json", json.dumps(document, indent=2, ensure_ascii=False) + "\n")
            write_text_atomic(self.config, to_yaml(run))
            update_latest_link(self.path)
        except OSError as error:
            raise ResourceError(
                f"cannot write the run folder {self.path}: {error.strerror}", "choose another --out"
            ) from None

    def record_resumption(self, run: Run, command: str, documents: dict[str, Any]) -> None:
        """Write the config of a resumed run. The previous one is kept as config.N.yaml, and the previous command above
        the new one."""
        with self.locked():
            index = len(list(self.path.glob("config.*.yaml"))) + 1
            write_text_atomic(self.path / f"config.{index}.yaml", self.config.read_text("utf-8"))
            previous = (self.path / "command.txt").read_text("utf-8")
            write_text_atomic(self.path / "command.txt", previous + command + "\n")
            for name, document in documents.items():
                write_text_atomic(self.path / f"{name}.json", json.dumps(document, indent=2, ensure_ascii=False) + "\n")
            write_text_atomic(self.config, to_yaml(run))

    def refuse_existing(self) -> None:
        """Raise UsageError if the folder contains files, except those of a `create` that was killed before it wrote the
        config."""
        if not self.path.exists():
            return
        names = [path.name for path in self.path.iterdir()] if self.path.is_dir() else ["no folder"]
        cut_off = any("command.txt" in name for name in names) and all(
            UNSTARTED_RUN_FILES.fullmatch(name) for name in names
        )
        if names and not cut_off:
            raise UsageError(f"{self.path} already exists", "use --resume to continue it, or another --out")

    def run(self) -> Run:
        """The run of the folder. Raises UsageError if there is none."""
        if not self.config.is_file():
            raise UsageError(f"{self.path} is not a run folder: it has no config.yaml", "start a run without --resume")
        return from_yaml(Run, self.config.read_text("utf-8"))

    def launch(self) -> str:
        """Name of the `torchrun` job that started the run; "" without torchrun."""
        try:
            return json.loads((self.path / "environment.json").read_text("utf-8")).get("torchrun", "")
        except (OSError, ValueError):
            return ""

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder for writing. Raises UsageError, with the number of the process that holds the lock."""
        try:
            import fcntl
        except ImportError:  # no such locks on this system
            yield
            return
        with open(self.path / ".lock", "a+") as file:
            try:
                # released with this process; flock would outlive it in its workers
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.seek(0)
                raise UsageError(
                    f"{self.path} is in use by process {file.read().strip()}", "wait for it, or use another --out"
                ) from None
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield

    @contextmanager
    def explain_resume(self) -> Iterator[None]:
        """Extend a ResourceError by the checkpoint that is kept, and the command that continues from it."""
        try:
            yield
        except ResourceError as error:
            newest = next(self.store(0).list_paths(), None)
            if newest is None or "--resume" in error.hint:
                raise
            hint = f"{error.hint}; then continue with --resume --out {self.path}".removeprefix("; then ")
            raise ResourceError(f"{error.message}; checkpoint {newest.name} is kept", hint) from None

    def append(self, line: dict[str, Any]) -> None:
        """Add one line to the metrics; sinks receive it even if it cannot be written."""
        for sink in self.sinks:
            sink.log_line(line)
        append_line(self.metrics, line)

    def warn(self, step: int, name: str, text: str) -> None:
        """Add one line to the warnings."""
        append_line(self.warnings, {"step": step, "name": name, "text": text})

    def rewind(self, step: int, exclude: str | None = None) -> None:
        """Keep metrics and warnings up to a step, except metrics that contain `exclude`, because the rest will be
        written again. An incomplete last line is removed."""
        for path, excluded in ((self.metrics, exclude), (self.warnings, None)):
            if path.exists():
                lines = [json.dumps(line) + "\n" for line in read_json_lines(path) if line["step"] <= step]
                write_text_atomic(path, "".join(line for line in lines if not (excluded and excluded in line)))
        for sink in self.sinks:
            sink.rewind(step, read_json_lines(self.metrics))


class MetricsFollower:
    """Follows a metrics.jsonl and returns new lines."""

    def __init__(self, path: Path) -> None:
        self.path, self.inode, self.offset = path, 0, 0

    def read(self) -> tuple[bool, list[dict[str, Any]]]:
        """Return whether the file was rewritten since the last call (by a run resumed from a checkpoint), and the new
        complete lines.

        After a rewrite all lines are new. Incomplete lines are returned by a later call.
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
    """Append a JSON object as a line to a file; an incomplete last line stays a separate line."""
    with open(path, "a", encoding="utf-8") as file:
        file.write("\n" * is_last_line_cut_off(path) + json.dumps(line) + "\n")


def is_last_line_cut_off(path: Path) -> bool:
    """Return whether the last line of a file is incomplete."""
    with open(path, "rb") as file:
        if not file.seek(0, os.SEEK_END):
            return False
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read the JSON objects of a file, one per line, without incomplete lines; none if there is no file."""
    lines = path.read_text("utf-8").splitlines() if path.is_file() else []
    return [line for line in map(parse_json_line, lines) if line is not None]


def parse_json_line(line: str) -> dict[str, Any] | None:
    """Parse the JSON object of a line; None for an incomplete line."""
    try:
        parsed = json.loads(line)
    except ValueError:
        return None
    return parsed if isinstance(parsed, dict) else None


def update_latest_link(path: Path) -> None:
    """Point the link `latest`, in the same folder as the run, to it."""
    link, temporary = path.parent / "latest", path.parent / f".latest-{os.getpid()}"
    if link.is_symlink() or not link.exists():
        try:
            temporary.symlink_to(path.name)
            os.replace(temporary, link)
        except OSError:  # the file system does not support links; they are only a convenience
            temporary.unlink(missing_ok=True)


def format_evaluation_key(step: int, epoch: float, prefix: str) -> str:
    """Return the text that identifies the line of an evaluation for `RunFolder.rewind`; metrics begin with `prefix`."""
    return f'"step": {step}, "epoch": {json.dumps(epoch)}, "{prefix}'


def read_last_value(path: Path, name: str) -> float | None:
    """Return the last value of a metric in a file of metrics; None if there is none, for example after a run on a full
    disk."""
    values = [line[name] for line in read_json_lines(path) if name in line]
    return values[-1] if values else None
