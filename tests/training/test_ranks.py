"""Runs with several processes: bit-identical if reproducible, weights equal to 1e-5 if not, and no process hangs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from tests.conftest import TINY_RUN
from tests.data.films import write_moves
from tests.reliability.rig import TIMING_KEYS
from vitreous.training.ranks import Ranks
from vitreous.training.slices import rank_slices, run_slices
from vitreous.weights.adopt import open_weights
from vitreous.weights.bundle import load_bundle
from vitreous.weights.sharded import load_checkpoint_tensors

#: deterministic except for the initial weights: results of different process counts differ only by rounding
DETERMINISTIC_OPTIONS = {
    **TINY_RUN,
    "drop_path": 0.0,
    "mixup": 0.0,
    "optimizer": "sgd",
    "lr": 0.05,
    "accumulate": 1,
    "epochs": 2.5,
    "save_every": 10,
}


@pytest.fixture(scope="module")
def carry_out(tmp_path_factory):
    """A function that runs jobs (`tests.training.process_jobs`) and returns their exit codes and stderr."""
    words, pipe = [sys.executable, "-m", "tests.training.process_jobs"], subprocess.PIPE
    folder = tmp_path_factory.mktemp("world")
    with (
        open(folder / "stderr", "w") as stderr,
        subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=stderr, text=True) as process,
    ):

        def run_jobs(*jobs):
            assert process.stdin and process.stdout
            errors = folder / f"stderr {len(list(folder.iterdir()))}"
            print(json.dumps({"jobs": jobs, "errors": str(errors)}), file=process.stdin, flush=True)
            line = process.stdout.readline()
            errors_text = (errors if errors.exists() else folder / "stderr").read_text("utf-8", errors="replace")
            assert line, errors_text[-3000:]
            return json.loads(line), errors_text

        yield run_jobs
        process.stdin.close()


def make_job(folder, out, world, **further):
    options = {"data": str(folder), "out": str(out), "workers": 0, **further.pop("options", {})}
    return {"world": world, "options": options, **further}


def read_outcome(out):
    """Weights, average, optimiser state and metrics, without timings."""
    newest = max((out / "checkpoints").glob("step-*"))
    tensors = {p.name: p.read_bytes() for p in newest.glob("*.safetensors")}
    metrics = [
        {k: v for k, v in json.loads(line).items() if k not in TIMING_KEYS} for line in (out / "metrics.jsonl").open()
    ]
    return newest.name, tensors, (out / "model" / "weights.safetensors").read_bytes(), metrics


def test_reproducible_runs_are_bit_identical_for_1_2_and_4_processes(photo_folder, tmp_path, carry_out):
    run = {**TINY_RUN, "epochs": 5.0, "reproducible": True, "save_every": 2}
    more = {"resume": True}
    codes, errors = carry_out(
        make_job(photo_folder, tmp_path / "one", 1, options=run),
        make_job(photo_folder, tmp_path / "two", 2, options=run),
        make_job(photo_folder, tmp_path / "many", 1, options=run, stop=2),
        make_job(photo_folder, tmp_path / "many", 2, options=more, stop=5),
        make_job(photo_folder, tmp_path / "many", 1, options=more, stop=7),
        make_job(photo_folder, tmp_path / "many", 4, options=more),
    )
    assert codes == [[0], [0, 0], [143], [143, 143], [143], [0] * 4], errors
    expected = read_outcome(tmp_path / "one")
    assert expected[0] == "step-00000012" and len(expected[1]) == 3
    for name in ("two", "many"):
        outcome = read_outcome(tmp_path / name)
        assert outcome[:3] == expected[:3]
        assert [line for line in outcome[3] if "train/loss" in line] == [
            line for line in expected[3] if "train/loss" in line
        ]


def test_two_processes_match_one_on_clips(tmp_path, carry_out):
    clips = write_moves(tmp_path / "clips", 4, (".gif", ".mp4"))
    run = {
        **DETERMINISTIC_OPTIONS,
        "model": "ViViT-32x2/8x2",
        "frames": 4,
        "batch_size": 4,
        "steps": 3,
        "save_every": 3,
        "epochs": None,
    }
    same = {**run, "reproducible": True}
    codes, errors = carry_out(
        make_job(clips, tmp_path / "one", 1, options=run),
        make_job(clips, tmp_path / "two", 2, options={**run, "workers": 1}),
        make_job(clips, tmp_path / "one bits", 1, options=same),
        make_job(clips, tmp_path / "two bits", 2, options=same),
    )
    assert codes == [[0], [0, 0]] * 2, errors
    single, double = (
        load_checkpoint_tensors(next((tmp_path / name / "checkpoints").glob("step-*3")), "model")
        for name in ("one", "two")
    )
    assert single.keys() == double.keys()
    assert all(torch.allclose(single[name].float(), double[name].float(), atol=1e-5) for name in single)
    expected, outcome = read_outcome(tmp_path / "one bits"), read_outcome(tmp_path / "two bits")
    assert expected[:3] == outcome[:3] and expected[0] == "step-00000003"


def test_ddp_and_fsdp_match_one_process_and_share_checkpoints(photo_folder, tmp_path, carry_out):
    fsdp = {**DETERMINISTIC_OPTIONS, "parallel": "fsdp"}
    codes, errors = carry_out(
        make_job(photo_folder, tmp_path / "one", 1, options=DETERMINISTIC_OPTIONS),
        make_job(photo_folder, tmp_path / "joined", 1, options=DETERMINISTIC_OPTIONS, joined=True),
        make_job(photo_folder, tmp_path / "ddp", 2, options=DETERMINISTIC_OPTIONS),
        make_job(
            photo_folder,
            tmp_path / "ddp in parts",
            3,
            options={**DETERMINISTIC_OPTIONS, "batch_size": 4, "accumulate": 2, "micro_batch": "1"},
        ),
        make_job(photo_folder, tmp_path / "fsdp", 2, options=fsdp),
        make_job(photo_folder, tmp_path / "fsdp in parts", 2, options={**fsdp, "batch_size": 4, "accumulate": 2}),
        make_job(photo_folder, tmp_path / "changed", 2, options=fsdp, stop=7),
        make_job(photo_folder, tmp_path / "changed", 3, options={"resume": True}),
        make_job(photo_folder, tmp_path / "at last alone", 2, options=fsdp, stop=7),
        make_job(
            photo_folder, tmp_path / "at last alone", 1, options={"resume": True, "override": True, "parallel": "ddp"}
        ),
        make_job(
            photo_folder, tmp_path / "adam", 1, options={**DETERMINISTIC_OPTIONS, "optimizer": "adamw", "lr": 1e-3}
        ),
        make_job(photo_folder, tmp_path / "adam in shares", 2, options={**fsdp, "optimizer": "adamw", "lr": 1e-3}),
    )
    assert [code for job_codes in codes for code in job_codes if code] == [143] * 4, errors
    expected_weights = load_checkpoint_tensors(tmp_path / "one" / "checkpoints" / "step-00000012", "model")
    assert torch.equal(
        load_checkpoint_tensors(tmp_path / "joined" / "checkpoints" / "step-00000012", "model")["model.head.weight"],
        expected_weights["model.head.weight"],
    )
    for name in ("ddp", "ddp in parts", "fsdp", "fsdp in parts", "changed", "at last alone"):
        checkpoint = tmp_path / name / "checkpoints" / "step-00000012"
        for tensors_file in ("model", "ema", "optimizer"):
            expected, tensors = (
                load_checkpoint_tensors(tmp_path / "one" / "checkpoints" / "step-00000012", tensors_file),
                load_checkpoint_tensors(checkpoint, tensors_file),
            )
            assert set(tensors) == set(expected)
            for key, tensor in tensors.items():
                assert torch.allclose(tensor.reshape(expected[key].shape), expected[key], atol=1e-5), (
                    name,
                    tensors_file,
                    key,
                )
        weights = open_weights(checkpoint)
        assert weights.classes == ("ant", "bee", "cat")
        bundle, images = load_bundle(tmp_path / name / "model"), torch.rand(2, 3, 16, 16)
        with torch.inference_mode():
            assert torch.allclose(weights.build_bundle().model(images), bundle.model(images), atol=1e-6)
    curves = [
        [json.loads(line).get("train/loss") for line in (tmp_path / name / "metrics.jsonl").open()]
        for name in ("adam", "adam in shares")
    ]
    assert [loss for loss in curves[1] if loss] == pytest.approx([loss for loss in curves[0] if loss], abs=1e-5)
    shards = sorted(p.name for p in (tmp_path / "fsdp" / "checkpoints" / "step-00000012").iterdir())
    assert (
        len([name for name in shards if name.startswith("shard-")]) == 2
        and "state.json" in shards
        and "manifest.json" in shards
    )


def test_a_killed_process_ends_the_run_and_the_run_resumes(photo_folder, tmp_path, carry_out):
    run = {**TINY_RUN, "epochs": 5.0, "reproducible": True, "save_every": 2}
    codes, errors = carry_out(
        make_job(photo_folder, tmp_path / "one", 1, options=run),
        make_job(photo_folder, tmp_path / "two", 2, options=run, kill=[1, 5], timeout=20),
        make_job(photo_folder, tmp_path / "two", 2, options={"resume": True}),
    )
    assert codes[1][1] == -9 and codes[1][0] == 6, (codes, errors)  # it ends by itself, not by the time limit
    assert "another process of the run has ended" in errors and "resume=True" in errors, errors
    assert codes[2] == [0, 0]
    assert read_outcome(tmp_path / "two")[:3] == read_outcome(tmp_path / "one")[:3]


def test_non_finite_values_stop_all_processes_at_the_same_step(photo_folder, tmp_path, carry_out):
    codes, errors = carry_out(
        make_job(photo_folder, tmp_path / "run", 2, options=DETERMINISTIC_OPTIONS, poison=[1, 4]),
        make_job(
            photo_folder, tmp_path / "skipping", 2, options={**DETERMINISTIC_OPTIONS, "skip_steps": 1}, poison=[1, 4]
        ),
    )
    assert codes == [[5, 5], [0, 0]], errors
    assert errors.count("step 5: loss nan") == 2
    lines = [json.loads(line) for line in (tmp_path / "skipping" / "metrics.jsonl").open()]
    skipped = {line["step"]: line["skipped"] for line in lines if "skipped" in line}
    assert skipped[4] == 0 and skipped[5] == skipped[12] == 1


def test_three_processes_evaluate_every_image_once(tmp_path, carry_out):
    from tests.conftest import make_folder

    folder = make_folder(tmp_path / "photos", {"train": 12, "val": 67})
    codes, errors = carry_out(
        make_job(folder, tmp_path / "one", 1, options=DETERMINISTIC_OPTIONS),
        make_job(folder, tmp_path / "three", 3, options=DETERMINISTIC_OPTIONS),
    )
    assert codes == [[0], [0] * 3], errors
    metrics = [json.loads((tmp_path / name / "summary.json").read_text())["val"] for name in ("one", "three")]
    assert metrics[0]["images"] == metrics[1]["images"] == 201
    assert metrics[1]["top1"] == pytest.approx(metrics[0]["top1"], abs=1 / 201)


def test_unsupported_process_counts_are_rejected(photo_folder, tmp_path, carry_out):
    codes, errors = carry_out(
        make_job(photo_folder, tmp_path / "three", 3, options={**TINY_RUN, "reproducible": True}),
        make_job(photo_folder, tmp_path / "fsdp", 1, options={**TINY_RUN, "parallel": "fsdp"}),
        make_job(photo_folder, tmp_path / "muon", 2, options={**TINY_RUN, "parallel": "fsdp", "optimizer": "muon"}),
    )
    assert codes == [[2] * 3, [2], [2, 2]]
    assert "the 4 shards of a reproducible run are not divisible by 3 processes" in errors and "use 1, 2, 4" in errors


@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_rank_slices_cover_each_step_once(tmp_path, reproducible, world):
    from tests.training.test_loop import make_session

    session, _ = make_session(
        tmp_path, batch_size=7, accumulate=3, epochs=2.1, reproducible=reproducible, shards=4 if reproducible else 1
    )
    run, positions = session.run, []
    for start in range(0, run.total, run.step_size):
        slices = [rank_slice for rank in range(world) for rank_slice in rank_slices(run, Ranks(rank, world), start)]
        assert sum(rank_slice.share for rank_slice in slices) == pytest.approx(1)
        positions += [
            position
            for rank_slice in slices
            if rank_slice.share
            for position in range(rank_slice.start, rank_slice.stop)
        ]
    assert sorted(positions) == list(range(run.total))
    assert (
        sum(rank_slice.stop - rank_slice.start for step in run_slices(run, Ranks(0, 1), 0) for rank_slice in step)
        == run.total
    )
