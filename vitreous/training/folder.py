"""The run folder: what is where, who may write, and what a resumed run finds."""

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

#: what `create` writes before config.yaml, whole or half
UNSTARTED_RUN_FILES = re.compile(
    r"command\.txt|(environment|data|trials)\.json|\.(command\.txt|(environment|data|trials)\.json|config\.yaml)\.tmp"
)


class MetricsSink(Protocol):
    """Receives the lines of a run's metrics as they are written. Raises nothing, and does not wait."""

    def log_line(self, line: dict[str, Any]) -> None: ...
    def rewind(self, step: int, lines: list[dict[str, Any]]) -> None: ...


@dataclass(frozen=True)
class RunFolder:
    """One training run on disk. `sinks` receive its metrics beside metrics.jsonl."""

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
        """What looked wrong, a line each: step, name and text."""
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
        """Make the folder for a new run. Raises UsageError if something is there, ResourceError if it cannot be
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
        """Write down what a resumed run goes on with; what it went by before stays as config.N.yaml, and its command
        above the new one."""
        with self.locked():
            number = len(list(self.path.glob("config.*.yaml"))) + 1
            write_text_atomic(self.path / f"config.{number}.yaml", self.config.read_text("utf-8"))
            before = (self.path / "command.txt").read_text("utf-8")
            write_text_atomic(self.path / "command.txt", before + command + "\n")
            for name, document in documents.items():
                write_text_atomic(self.path / f"{name}.json", json.dumps(document, indent=2, ensure_ascii=False) + "\n")
            write_text_atomic(self.config, to_yaml(run))

    def refuse_existing(self) -> None:
        """Raise UsageError if something is there already, but for what `create` leaves when it is killed before the
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
        """The run that the folder was made for. Raises UsageError if there is none."""
        if not self.config.is_file():
            raise UsageError(f"{self.path} is no run folder: it has no config.yaml", "start a run without --resume")
        return from_yaml(Run, self.config.read_text("utf-8"))

    def launch(self) -> str:
        """The name of the job of `torchrun` that began the run; "" for none."""
        try:
            return json.loads((self.path / "environment.json").read_text("utf-8")).get("torchrun", "")
        except (OSError, ValueError):
            return ""

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep others from writing while this process does. Raises UsageError, naming the process that has the
        folder."""
        try:
            import fcntl
        except ImportError:  # no such locks on this system
            yield
            return
        with open(self.path / ".lock", "a+") as file:
            try:
                # ends with this process; flock would outlive it in its workers
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
        """Add to a ResourceError which checkpoint is kept, and how to continue from it."""
        try:
            yield
        except ResourceError as error:
            newest = next(self.store(0).places(), None)
            if newest is None or "--resume" in error.hint:
                raise
            hint = f"{error.hint}; then continue with --resume --out {self.path}".removeprefix("; then ")
            raise ResourceError(f"{error.message}; checkpoint {newest.name} is kept", hint) from None

    def append(self, line: dict[str, Any]) -> None:
        """Add one line to the metrics; sinks get it also where it cannot be written."""
        for sink in self.sinks:
            sink.log_line(line)
        append_line(self.metrics, line)

    def warn(self, step: int, name: str, text: str) -> None:
        """Add one line to the warnings."""
        append_line(self.warnings, {"step": step, "name": name, "text": text})

    def rewind(self, step: int, but: str | None = None) -> None:
        """Keep metrics and warnings up to a step, less metrics that hold `but`: what goes will be written again. A torn
        last line goes too."""
        for path, left_out in ((self.metrics, but), (self.warnings, None)):
            if path.exists():
                lines = [json.dumps(line) + "\n" for line in read_json_lines(path) if line["step"] <= step]
                write_text_atomic(path, "".join(line for line in lines if not (left_out and left_out in line)))
        for sink in self.sinks:
            sink.rewind(step, read_json_lines(self.metrics))


class MetricsFollower:
    """Reads what was added to a metrics.jsonl since the last look."""

    def __init__(self, path: Path) -> None:
        self.path, self.inode, self.place = path, 0, 0

    def read(self) -> tuple[bool, list[dict[str, Any]]]:
        """Whether the file was written anew since the last look (a run went back to a checkpoint), and the whole lines
        that are new: then all of them. A line that is not whole yet comes with a later look."""
        try:
            with open(self.path, "rb") as file:
                file.seek(0, 2)
                status, size = self.path.stat(), file.tell()
                anew = bool(self.inode) and (status.st_ino != self.inode or size < self.place)
                self.inode, self.place = status.st_ino, 0 if anew else self.place
                file.seek(self.place)
                text = file.read()
        except FileNotFoundError:
            return False, []
        whole = text[: text.rfind(b"\n") + 1]
        self.place += len(whole)
        parsed = (parse_json_line(line) for line in whole.decode("utf-8", "replace").splitlines())
        return anew, [line for line in parsed if line is not None]


def append_line(path: Path, line: dict[str, Any]) -> None:
    """Add a JSON object as a line of a file; a last line that was cut off stays a line of its own."""
    with open(path, "a", encoding="utf-8") as file:
        file.write("\n" * is_last_line_cut_off(path) + json.dumps(line) + "\n")


def is_last_line_cut_off(path: Path) -> bool:
    """Whether the last line of a file was not written to its end."""
    with open(path, "rb") as file:
        if not file.seek(0, os.SEEK_END):
            return False
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read the JSON objects of a file, one a line, less lines that were cut off; none where there is no file."""
    lines = path.read_text("utf-8").splitlines() if path.is_file() else []
    return [line for line in map(parse_json_line, lines) if line is not None]


def parse_json_line(line: str) -> dict[str, Any] | None:
    """Parse the JSON object of a line; None for a line that was cut off."""
    try:
        parsed = json.loads(line)
    except ValueError:
        return None
    return parsed if isinstance(parsed, dict) else None


def update_latest_link(path: Path) -> None:
    """Let `latest`, beside the run, lead to it."""
    link, temporary = path.parent / "latest", path.parent / f".latest-{os.getpid()}"
    if link.is_symlink() or not link.exists():
        try:
            temporary.symlink_to(path.name)
            os.replace(temporary, link)
        except OSError:  # a file system without links: only a convenience is lost
            temporary.unlink(missing_ok=True)


def format_evaluation_key(step: int, epoch: float, prefix: str) -> str:
    """Return the text by which `Folder.rewind` finds the line of an evaluation; metrics begin with `prefix`."""
    return f'"step": {step}, "epoch": {json.dumps(epoch)}, "{prefix}'


def read_last_value(path: Path, name: str) -> float | None:
    """Return the last value of a metric in a file of metrics; None where there is none, as after a run on a full
    disk."""
    values = [line[name] for line in read_json_lines(path) if name in line]
    return values[-1] if values else None
