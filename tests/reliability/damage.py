"""Checkpoints with bytes cut off, flipped, swapped or gone."""

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
DamageFunction = Callable[[Path], object]  # of a checkpoint's folder


def truncate_file(name: str, size: Callable[[int], int]) -> DamageFunction:
    """A file cut to `size` of its bytes."""
    return lambda place: os.truncate(place / name, size((place / name).stat().st_size))


def flip_bit(name: str, share: float, bit: int) -> DamageFunction:
    """One bit of a file, at a share of its length."""

    def harm(place: Path) -> None:
        content = bytearray((place / name).read_bytes())
        content[int(share * len(content))] ^= 1 << bit
        (place / name).write_bytes(content)

    return harm


def swap_files(name: str, other: str) -> DamageFunction:
    """Two files that have changed names."""

    def harm(place: Path) -> None:
        (place / name).rename(place / "third")
        (place / other).rename(place / name)
        (place / "third").rename(place / other)

    return harm


def list_damages(place: Path, before: Path, chance: random.Random, flips: int) -> Iterator[tuple[str, DamageFunction]]:
    """Every kind of damage to every file of a checkpoint; `before` is the older one, whose files have the same
    sizes."""
    names = sorted(path.name for path in place.iterdir())
    cuts: dict[str, Callable[[int], int]] = {
        "to 0": lambda size: 0,
        "to 1": lambda size: 1,
        "to half": lambda size: size // 2,
        "by 1": lambda size: size - 1,
        "by 4096, or to a third": lambda size: max(size // 3, size - 4096),
        "longer by 1": lambda size: size + 1,
    }
    for number, name in enumerate(names):
        for what, size in cuts.items():
            yield f"{name} truncated {what}", truncate_file(name, size)
        for share in [chance.random() for _ in range(flips)]:
            bit = chance.randrange(8)
            yield f"{name}, bit {bit} at {share:.6f}", flip_bit(name, share, bit)
        yield f"{name} deleted", lambda there, name=name: (there / name).unlink()
        yield f"{name} empty", lambda there, name=name: (there / name).write_bytes(b"")
        if (before / name).read_bytes() != (place / name).read_bytes():  # what is frozen is the same in all
            yield f"{name} of the older", lambda there, name=name: shutil.copy(before / name, there / name)
        for other in names[number + 1 :]:
            yield f"{name} and {other} swapped", swap_files(name, other)
    for text in ("{}", "[]", "null", "junk", '{"model.safetensors": {}}'):
        yield f"manifest {text}", lambda there, text=text: (there / MANIFEST_NAME).write_text(text)


def half_way(bench: Bench, plan: RunPlan) -> Path:
    """A run stopped half way, with two checkpoints."""
    out, sent = bench.out(), bench.home / "sent"
    expect_stopped(bench.start(plan, out, run_after_step(20, lambda: send_signal(sent))), out, sent)
    return out


def check_damaged_checkpoints(
    bench: Bench,
    tally: Tally,
    flips: int = 30,
    resumes: int = 18,
    plans: Sequence[RunPlan] = (ADAMW_PLAN, MUON_PLAN, FROZEN_PLAN),
) -> None:
    """Every damage to the newest checkpoint is found, with one warning, and the one before is used; `resumes` of them
    go on to the end."""
    chance, cases = random.Random(bench.seed + 3), []
    for plan in plans:
        out = half_way(bench, plan)
        newest, older = list(CheckpointStore(out / "checkpoints").list_paths())
        store, keep = CheckpointStore(out / "checkpoints"), bench.home / "whole"
        found = list(list_damages(newest, older, chance, flips))
        cases += [(plan, out, what, harm) for what, harm in found]
        for what, harm in found:
            shutil.copytree(newest, keep)
            with tally.trial(f"{plan.name}: {what}"):
                harm(newest)
                warnings: list[str] = []
                used = store.newest(warnings.append)
                expect(used == older, f"{used} was used")
                expect(len(warnings) == 1 and newest.name in warnings[0], f"warnings: {warnings}")
            shutil.rmtree(newest)
            keep.rename(newest)
    equal = 0
    for plan, out, what, harm in chance.sample(cases, resumes):
        copied = bench.out()
        shutil.copytree(out, copied)
        with tally.trial(f"{plan.name}: {what}, resumed", 0):
            harm(next(CheckpointStore(copied / "checkpoints").list_paths()))
            said = bench.finish(plan, copied)
            expect("is not used" in said, f"no warning: {said}")
            bench.same(plan, copied)
            equal += 1
    if equal < resumes:
        tally.tried += 1
    tally.facts["resumed with the same outcome"] = f"{equal} of {resumes}"


def check_no_valid_checkpoint(bench: Bench, tally: Tally, count: int = 5) -> None:
    """With both checkpoints damaged a run says so, exits 4, and does not start afresh."""
    chance = random.Random(bench.seed + 4)
    plan, out = ADAMW_PLAN, half_way(bench, ADAMW_PLAN)
    for number in range(count):
        copied = bench.out()
        shutil.copytree(out, copied)
        with tally.trial(f"seed {bench.seed}, {number}"):
            places = list(CheckpointStore(copied / "checkpoints").list_paths())
            for place in places:
                name = chance.choice(sorted(path.name for path in place.iterdir()))
                flip_bit(name, chance.random(), chance.randrange(8))(place)
            before = (copied / "metrics.jsonl").read_bytes()
            child = bench.start(plan, copied)
            expect((code := child.wait()) == 4, f"exit {code}: {child.text}")
            expect("none of the 2 checkpoints" in child.text and "Traceback" not in child.text, child.text)
            expect(
                list(CheckpointStore(copied / "checkpoints").list_paths()) == places, "checkpoints were made or removed"
            )
            expect((copied / "metrics.jsonl").read_bytes() == before, "metrics were written")
