"""Checkpoints with truncated, corrupted, swapped or missing files."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tests.reliability.rig import ADAMW_PLAN, MUON_PLAN, Bench, RunPlan
from tests.reliability.stops import expect_stopped, run_after_step, send_signal
from tests.reliability.tally import Tally, expect
from vitreous.training.checkpoint import MANIFEST_NAME, CheckpointStore

FROZEN_PLAN = replace(ADAMW_PLAN, name="last block", options={**ADAMW_PLAN.options, "last_blocks": 1})
DamageFunction = Callable[[Path], object]  # takes the folder of a checkpoint


def truncate_file(name: str, size: Callable[[int], int]) -> DamageFunction:
    """Truncate a file to `size` of its bytes."""
    return lambda checkpoint: os.truncate(checkpoint / name, size((checkpoint / name).stat().st_size))


def flip_bit(name: str, share: float, bit: int) -> DamageFunction:
    """Flip one bit at a relative position of a file."""

    def damage_file(checkpoint: Path) -> None:
        content = bytearray((checkpoint / name).read_bytes())
        content[int(share * len(content))] ^= 1 << bit
        (checkpoint / name).write_bytes(content)

    return damage_file


def swap_files(name: str, other: str) -> DamageFunction:
    """Swap the names of two files."""

    def damage_file(checkpoint: Path) -> None:
        (checkpoint / name).rename(checkpoint / "third")
        (checkpoint / other).rename(checkpoint / name)
        (checkpoint / "third").rename(checkpoint / other)

    return damage_file


def list_damages(
    checkpoint: Path, older: Path, chance: random.Random, flips: int
) -> Iterator[tuple[str, DamageFunction]]:
    """Every type of damage to every file of a checkpoint; files of the `older` checkpoint have the same sizes."""
    names = sorted(path.name for path in checkpoint.iterdir())
    cuts: dict[str, Callable[[int], int]] = {
        "to 0": lambda size: 0,
        "to 1": lambda size: 1,
        "to half": lambda size: size // 2,
        "by 1": lambda size: size - 1,
        "by 4096, or to a third": lambda size: max(size // 3, size - 4096),
        "longer by 1": lambda size: size + 1,
    }
    for index, name in enumerate(names):
        for cut_name, size in cuts.items():
            yield f"{name} truncated {cut_name}", truncate_file(name, size)
        for share in [chance.random() for _ in range(flips)]:
            bit = chance.randrange(8)
            yield f"{name}, bit {bit} at {share:.6f}", flip_bit(name, share, bit)
        yield f"{name} deleted", lambda checkpoint_folder, name=name: (checkpoint_folder / name).unlink()
        yield f"{name} empty", lambda checkpoint_folder, name=name: (checkpoint_folder / name).write_bytes(b"")
        if (older / name).read_bytes() != (
            checkpoint / name
        ).read_bytes():  # frozen weights are equal in all checkpoints
            yield (
                f"{name} of the older",
                lambda checkpoint_folder, name=name: shutil.copy(older / name, checkpoint_folder / name),
            )
        for other in names[index + 1 :]:
            yield f"{name} and {other} swapped", swap_files(name, other)
    for text in ("{}", "[]", "null", "junk", '{"model.safetensors": {}}'):
        yield (
            f"manifest {text}",
            lambda checkpoint_folder, text=text: (checkpoint_folder / MANIFEST_NAME).write_text(text),
        )


def run_half_way(bench: Bench, plan: RunPlan) -> Path:
    """A run stopped half way, with two checkpoints."""
    out, sent = bench.new_run_folder(), bench.home / "sent"
    expect_stopped(bench.start(plan, out, run_after_step(20, lambda: send_signal(sent))), out, sent)
    return out


def check_damaged_checkpoints(
    bench: Bench,
    tally: Tally,
    flips: int = 30,
    resumes: int = 18,
    plans: Sequence[RunPlan] = (ADAMW_PLAN, MUON_PLAN, FROZEN_PLAN),
) -> None:
    """Every damage to the newest checkpoint is detected with one warning, and the previous checkpoint is used;
    `resumes` of the runs are completed."""
    chance, cases = random.Random(bench.seed + 3), []
    for plan in plans:
        out = run_half_way(bench, plan)
        newest, older = list(CheckpointStore(out / "checkpoints").list_paths())
        store, keep = CheckpointStore(out / "checkpoints"), bench.home / "whole"
        damages = list(list_damages(newest, older, chance, flips))
        cases += [(plan, out, damage, damage_file) for damage, damage_file in damages]
        for damage, damage_file in damages:
            shutil.copytree(newest, keep)
            with tally.trial(f"{plan.name}: {damage}"):
                damage_file(newest)
                warnings: list[str] = []
                used = store.newest(warnings.append)
                expect(used == older, f"{used} was used")
                expect(len(warnings) == 1 and newest.name in warnings[0], f"warnings: {warnings}")
            shutil.rmtree(newest)
            keep.rename(newest)
    equal = 0
    for plan, out, damage, damage_file in chance.sample(cases, resumes):
        copied = bench.new_run_folder()
        shutil.copytree(out, copied)
        with tally.trial(f"{plan.name}: {damage}, resumed", 0):
            damage_file(next(CheckpointStore(copied / "checkpoints").list_paths()))
            log = bench.finish(plan, copied)
            expect("is not used" in log, f"no warning: {log}")
            bench.check_outcome(plan, copied)
            equal += 1
    if equal < resumes:
        tally.tried += 1
    tally.facts["resumed with the same outcome"] = f"{equal} of {resumes}"


def check_no_valid_checkpoint(bench: Bench, tally: Tally, count: int = 5) -> None:
    """If both checkpoints are damaged, the run reports it, exits with 4 and does not restart from scratch."""
    chance = random.Random(bench.seed + 4)
    plan, out = ADAMW_PLAN, run_half_way(bench, ADAMW_PLAN)
    for index in range(count):
        copied = bench.new_run_folder()
        shutil.copytree(out, copied)
        with tally.trial(f"seed {bench.seed}, {index}"):
            checkpoints = list(CheckpointStore(copied / "checkpoints").list_paths())
            for checkpoint in checkpoints:
                name = chance.choice(sorted(path.name for path in checkpoint.iterdir()))
                flip_bit(name, chance.random(), chance.randrange(8))(checkpoint)
            metrics = (copied / "metrics.jsonl").read_bytes()
            child = bench.start(plan, copied)
            expect((code := child.wait()) == 4, f"exit {code}: {child.text}")
            expect("none of the 2 checkpoints" in child.text and "Traceback" not in child.text, child.text)
            expect(
                list(CheckpointStore(copied / "checkpoints").list_paths()) == checkpoints,
                "checkpoints were made or removed",
            )
            expect((copied / "metrics.jsonl").read_bytes() == metrics, "metrics were written")
