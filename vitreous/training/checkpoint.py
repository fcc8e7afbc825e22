"""Atomic checkpoints, which exist either completely or not at all.

    FOLDER/step-00000310/   files as the caller writes them, and manifest.json with the size and SHA-256 of each file

To save, all files are written to a temporary folder (`.tmp-…`) and flushed to disk, the manifest is written, and the
folder is renamed. Older checkpoints are removed only after the rename. The newest checkpoint is the one with the
highest step whose files match the manifest; file times are not used. This module does not depend on tensors.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vitreous.errors import ResourceError, WeightsError
from vitreous.system.disk import compute_sha256, sync_and_rename

MANIFEST_NAME = "manifest.json"
FileWriter = Callable[[Path], None]


@dataclass(frozen=True)
class CheckpointStore:
    """The checkpoints of one run. The newest `keep` checkpoints are kept, at least two."""

    folder: Path
    keep: int = 2

    def save(self, step: int, writers: dict[str, FileWriter], size: int, pinned: int | None = None) -> Path:
        """Write one file per writer as checkpoint `step`, then remove old checkpoints.

        `size` is the approximate size of all files in bytes. The checkpoint of step `pinned` is never removed. Raises
        ResourceError if the checkpoint cannot be written; older checkpoints are then kept.
        """
        temporary = self.begin(step, size)
        with self.handle_write_errors(step, temporary):
            for name, write in writers.items():
                write(temporary / name)
        return self.publish(step, temporary, pinned)

    def begin(self, step: int, size: int) -> Path:
        """Create a temporary folder for the files of checkpoint `step`, which `publish` renames. `size` is the
        approximate size of the files in bytes. Raises ResourceError if the disk is too full or not writable."""
        temporary = self.folder / f".tmp-{step}-{uuid.uuid4().hex}"
        with self.handle_write_errors(step, temporary):
            self.folder.mkdir(exist_ok=True)  # without its parents: a removed run folder is not created again
            temporary.mkdir()
            free = shutil.disk_usage(self.folder).free
            if free < 1.2 * size:
                raise OSError(f"{size / 1e6:.0f} MB and a reserve of 20 % required, but only {free / 1e6:.0f} MB free")
        return temporary

    def publish(self, step: int, temporary: Path, pinned: int | None = None) -> Path:
        """Write the manifest, rename a temporary folder of `begin` to checkpoint `step`, and remove old checkpoints
        except that of step `pinned`. Raises ResourceError if the folder cannot be written."""
        with self.handle_write_errors(step, temporary):
            names = sorted(path.name for path in temporary.iterdir())
            manifest = {
                name: {"bytes": (temporary / name).stat().st_size, "sha256": compute_sha256(temporary / name)}
                for name in names
            }
            (temporary / MANIFEST_NAME).write_text(json.dumps(manifest, indent=1))
            folder = self.get_path(step)
            if folder.exists():  # an invalid leftover, from which the run was not resumed
                self.discard(folder)
            sync_and_rename(temporary, folder)
        self.prune(pinned)
        return folder

    @contextmanager
    def handle_write_errors(self, step: int, temporary: Path) -> Iterator[None]:
        """Convert write errors of the block to a ResourceError, and remove the temporary folder."""
        try:
            yield
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise ResourceError(
                f"checkpoint of step {step} not saved in {self.folder}: {error}", "free disk space or check permissions"
            ) from None

    def newest(self, warn: Callable[[str], None] = lambda text: None) -> Path | None:
        """Return the newest valid checkpoint, or None if there are no checkpoints.

        Damaged checkpoints are skipped, and `warn` receives the reason. Raises WeightsError if all checkpoints are
        damaged.
        """
        self.remove_temporary_folders()
        checkpoints = list(self.list_paths())
        for checkpoint in checkpoints:
            damage = find_damage(checkpoint)
            if damage is None:
                return checkpoint
            warn(f"checkpoint {checkpoint.name} is not used: {damage}")
        if checkpoints:
            raise WeightsError(
                f"none of the {len(checkpoints)} checkpoints in {self.folder} is valid",
                "start a new run with another --out",
            )
        return None

    def get_path(self, step: int) -> Path:
        """Return the path of the checkpoint of a step."""
        return self.folder / f"step-{step:08d}"

    def list_paths(self) -> Iterator[Path]:
        """Iterate over the paths of all published checkpoints, newest first."""
        folders = [p for p in self.folder.glob("step-*") if p.name[5:].isdecimal()] if self.folder.is_dir() else []
        return iter(sorted(folders, key=lambda p: int(p.name[5:]), reverse=True))

    def prune(self, pinned: int | None = None) -> None:
        """Remove all checkpoints that are older than the newest `keep` valid ones, except the checkpoint of step
        `pinned`."""
        valid = 0
        for checkpoint in list(self.list_paths()):
            if valid >= max(self.keep, 2):
                if pinned is None or checkpoint != self.get_path(pinned):
                    self.discard(checkpoint)
            else:
                valid += find_damage_by_size(checkpoint) is None

    def discard(self, folder: Path) -> None:
        """Remove a checkpoint: rename it to a hidden folder, then delete its files."""
        hidden = folder.with_name(f".tmp-{uuid.uuid4().hex}")
        os.rename(folder, hidden)
        shutil.rmtree(hidden, ignore_errors=True)

    def remove_temporary_folders(self) -> None:
        """Remove temporary folders of interrupted saves and removals."""
        for temporary_folder in self.folder.glob(".tmp-*"):
            shutil.rmtree(temporary_folder, ignore_errors=True)


def find_damage(folder: Path) -> str | None:
    """Compare the files of a checkpoint with its manifest, including their SHA-256. Returns the problem, or None if the
    checkpoint is valid."""
    damage = find_damage_by_size(folder)
    if damage is None:
        for name, entry in json.loads((folder / MANIFEST_NAME).read_text()).items():
            if compute_sha256(folder / name) != entry["sha256"]:
                return f"{name} was altered (SHA-256 differs)"
    return damage


def find_damage_by_size(folder: Path) -> str | None:
    """Compare only presence and size of a checkpoint's files with its manifest, which takes no time. Returns the
    problem, or None."""
    try:
        manifest = json.loads((folder / MANIFEST_NAME).read_text())
        entries = {name: (entry["bytes"], entry["sha256"]) for name, entry in manifest.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return f"{MANIFEST_NAME} cannot be read ({type(error).__name__})"
    if not entries:
        return f"{MANIFEST_NAME} is empty"
    for name, (size, _) in entries.items():
        file = folder / name
        if Path(name).name != name or file.is_symlink() or not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes, not {size}"
    return None
