"""Training runs on a GPU: resuming, precision, compilation, memory, metrics, export, and a process group of one
process."""

from __future__ import annotations

import functools
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import TINY_RUN, make_folder
from tests.gpu.support import (
    DEVICE,
    OBJECTIVE_NAMES,
    ON_GPU,
    check_bit_identical,
    check_close,
    check_tensors_close,
    copy_state,
    create_objective_session,
    create_supervised_session,
    record_steps,
    stop_after,
)
from vitreous.apps.export.export import export
from vitreous.data.augmentation.augment import Augment
from vitreous.errors import NonFiniteError
from vitreous.inference.predict import load
from vitreous.jobs.train import train
from vitreous.nn.cuda_graphs import CudaGraphRunner
from vitreous.objectives.supervised import SupervisedConfig
from vitreous.reports.evaluate import evaluate
from vitreous.system.native import load_native_library
from vitreous.training import loop, probe
from vitreous.training.checkpoint import find_damage
from vitreous.training.loop import run_training_loop
from vitreous.training.ranks import SINGLE_PROCESS
from vitreous.training.run import OptimizerConfig
from vitreous.training.session import Session
from vitreous.training.shards import Shards

pytestmark = pytest.mark.gpu
#: a run with a deterministic forward pass: dropout draws different numbers on a GPU
STEP_OPTIONS = {
    **TINY_RUN,
    "epochs": None,
    "steps": 2,
    "drop_path": 0.0,
    "mixup": 0.0,
    "workers": 0,
    "seed": 1,
    "device": DEVICE,
}
STEP_OPTIONS |= {"optimizer": "sgd", "lr": 0.05, "log_every": 2}
LOSS_LIMIT = {"fp32": 1e-4, "bf16": 2e-2}


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    return make_folder(tmp_path_factory.mktemp("gpu") / "photos", {"train": 12, "val": 4, "test": 4})


@pytest.fixture(scope="module")
def trained_run(photos):
    """A function that trains two steps on a device, once per precision, and returns the run folder."""

    @cache
    def train_on(device: str, precision: str) -> Path:
        out = Path(tempfile.mkdtemp(dir=photos.parent)) / f"{device.replace(':', '-')}-{precision}"
        train(str(photos), out=str(out), progress=False, **{**STEP_OPTIONS, "device": device, "precision": precision})
        return out

    return train_on


def read_losses(run: Path) -> dict[int, float]:
    """The loss of each step that metrics.jsonl contains."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}


def save_now(session: Session, state: Any) -> None:
    """Write a checkpoint of a session before training."""
    session.folder.path.mkdir(parents=True, exist_ok=True)
    session.save(state)
    session.checkpointer.publish_pending(True)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_trained_run_matches_cpu(trained_run, precision):
    """Losses, exported weights and the evaluation of a run by `train`."""
    on_device, on_cpu = trained_run(DEVICE, precision), trained_run("cpu", "fp32")
    losses, expected = read_losses(on_device), read_losses(on_cpu)
    assert list(losses) == list(expected) == [2]
    check_close("mean loss", list(losses.values()), list(expected.values()), LOSS_LIMIT[precision])
    ours, theirs = (load_file(run / "model" / "weights.safetensors") for run in (on_device, on_cpu))
    check_tensors_close("weights of the bundle", ours, theirs, {"fp32": 1e-5, "bf16": 1e-2}[precision])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_evaluation_of_a_run_matches_cpu(trained_run, photos, precision):
    """Logits on the test split by `evaluate`, with its batch sizes."""
    run = trained_run("cpu", "fp32")
    expected = evaluate(run, photos, device="cpu", precision="fp32")["test"]
    metrics = evaluate(run, photos, device=DEVICE, precision=precision)["test"]
    assert metrics["images"] == expected["images"] == 12
    assert metrics["nll"] == pytest.approx(expected["nll"], rel={"fp32": 1e-5, "bf16": 1e-2}[precision])


def test_export_of_a_gpu_run_matches_the_model(trained_run, photos, tmp_path):
    """The ONNX file of a GPU-trained model matches the model; `export` verifies it."""
    for library in ("onnx", "onnxscript", "onnxruntime"):
        if find_spec(library) is None:
            pytest.skip(f"{library} is not on the machine with a GPU")
    run = trained_run(DEVICE, "bf16")
    export(run, "onnx", tmp_path / "model.onnx")
    images = sorted((photos / "test").rglob("*.png"))
    expected = load(run, device="cpu", precision="fp32").predict(images)
    for ours, theirs in zip(load(tmp_path / "model.onnx", device="cpu").predict(images), expected, strict=True):
        reference = dict(zip(theirs.names, theirs.probabilities, strict=True))
        assert all(abs(p - reference[n]) < 1e-4 for n, p in zip(ours.names, ours.probabilities, strict=True))


@pytest.mark.parametrize(
    ("first_device", "second_device"), [(DEVICE, "cpu"), ("cpu", DEVICE)], ids=["to cpu", "to device"]
)
@pytest.mark.parametrize("name", ["supervised", "dino"])
def test_resume_cross_devices(name, first_device, second_device, tmp_path):
    """Three steps on one device and three on another match six on the CPU, in weights, moments and teacher."""
    options = {"epochs": 1.5, "ema": 0.9, "optimizer": OptimizerConfig(lr=1e-3, eps=1e-3)}
    session, uninterrupted = create_objective_session(name, tmp_path / "whole", **options)
    run_training_loop(uninterrupted, session.batches(uninterrupted))
    session, state = create_objective_session(name, tmp_path / "run", device=first_device, **options)
    run_training_loop(state, session.batches(state), stop_after(3))
    save_now(session, state)
    saved = copy_state(state)
    session, state = create_objective_session(name, tmp_path / "run", device=second_device, **options)
    session.restore(state)
    assert state.step == 3
    check_bit_identical(
        f"{name}: a state that was moved from {first_device} to {second_device}", copy_state(state), saved
    )
    run_training_loop(state, session.batches(state))
    assert state.step == 6
    check_tensors_close(
        f"{name} from {first_device} to {second_device}", copy_state(state), copy_state(uninterrupted), 1e-3
    )


#: runs that must be bit-identical to an uninterrupted run: with --reproducible, and on a CPU also without
BIT_IDENTICAL_RUNS: dict[str, dict[str, Any]] = {
    "reproducible": {"reproducible": True, "shards": 2},
    "reproducible, micro-batches": {"reproducible": True, "shards": 2, "micro_batch": 3, "accumulate": 2},
    "bf16": {"precision": "bf16", "ema": 0.9, "reproducible": ON_GPU, "shards": 1 + ON_GPU},
    "dropout": {
        "model": lambda model: replace_model(model, regularization={"dropout": 0.1, "drop_path": 0.2}),
        "reproducible": ON_GPU,
        "shards": 1 + ON_GPU,
    },
}


def replace_model(model: Any, **changes: Any) -> Any:
    """Return a model config with changed fields."""

    return model.with_options(**changes)


@pytest.mark.parametrize("name", BIT_IDENTICAL_RUNS)
def test_resumed_run_is_bit_identical(name, tmp_path):
    """Stopped after three of six steps, saved, and resumed by another session."""
    options = {
        "epochs": 1.5,
        "device": DEVICE,
        "optimizer": OptimizerConfig(),
        "images": draw_images(),
        **BIT_IDENTICAL_RUNS[name],
    }
    session, uninterrupted = create_supervised_session(tmp_path / "whole", **options)
    run_training_loop(uninterrupted, session.batches(uninterrupted))
    session, state = create_supervised_session(tmp_path / "run", **options)
    run_training_loop(state, session.batches(state), stop_after(uninterrupted.step // 2))
    save_now(session, state)
    session, state = create_supervised_session(tmp_path / "run", **options)
    session.restore(state)
    assert 0 < state.step < uninterrupted.step
    run_training_loop(state, session.batches(state))
    check_bit_identical(f"resumed run, {name}", copy_state(state), copy_state(uninterrupted))


def draw_images(count: int = 32, size: int = 64) -> torch.Tensor:
    """(count, size, size, 3) uint8 noise: 256 tokens per image, so that kernels sum over several blocks."""
    return torch.randint(0, 256, (count, size, size, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["supervised", "patch dropout", "rotary", "mae", "mean-colour", "diffusion"])
def test_reproducible_runs_are_bit_identical(name, precision, tmp_path):
    states = []
    for run_index in (1, 2):
        options: dict[str, Any] = {"reproducible": True, "shards": 2, "precision": precision, "epochs": 1.0}
        options |= {"device": DEVICE, "optimizer": OptimizerConfig()}
        folder = tmp_path / str(run_index)
        if name in ("supervised", "patch dropout", "rotary"):
            options["images"] = draw_images()
            if name == "patch dropout":
                options["objective"] = SupervisedConfig(patch_dropout=0.25)
            if name == "rotary":
                options["model"] = lambda model: replace_model(model, attention={"kind": "rotary"})
            session, state = create_supervised_session(folder, **options)
        else:
            session, state = create_objective_session(name, folder, **options)
        run_training_loop(state, session.batches(state))
        states.append(copy_state(state))
    check_bit_identical(f"two reproducible runs of {name}, {precision}", states[1], states[0])


def test_fp16_overflow_halves_the_scale_and_training_continues(tmp_path):
    """Gradients overflow at a scale of 2^40: these steps are skipped, later ones train."""
    session, state = create_supervised_session(tmp_path, device=DEVICE, precision="fp16", epochs=10.0)
    state.scale = 2.0**40
    initial, history = copy_state(state), []

    def note_step(state: Any) -> None:
        history.append((state.updates, state.scale))
        if state.updates == 0:
            check_bit_identical(
                f"weights after skipped step {state.step}",
                select_master_weights(copy_state(state)),
                select_master_weights(initial),
            )

    run_training_loop(state, session.batches(state), [(1, note_step)])
    scales = [math.log2(scale) for _, scale in history]
    assert history[0] == (0, 2.0**39), f"updates and scale of each step: {history}"
    skipped = len(history) - state.updates
    assert scales[-1] == 40 - skipped and 0 < state.updates < len(history) == 40, f"log2 of the scales: {scales}"
    assert math.isfinite(state.losses) and state.counted == state.updates
    trained = select_master_weights(copy_state(state))
    assert all(tensor.isfinite().all() for tensor in trained.values())
    assert any(not torch.equal(trained[name], tensor) for name, tensor in select_master_weights(initial).items())


def select_master_weights(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in state.items() if name.startswith("master/")}


def test_fp16_losses_match_cpu(tmp_path):
    expected, _ = record_steps(*create_supervised_session(tmp_path / "cpu", epochs=1.0))
    session, state = create_supervised_session(tmp_path / "fp16", epochs=1.0, precision="fp16", device=DEVICE)
    state.scale = 2.0**8  # at the default scale the first step may overflow and leave the weights unchanged
    losses, _ = record_steps(session, state)
    assert state.updates == 4, f"{state.updates} of 4 steps changed the weights; scale {state.scale}"
    check_close("losses in float16", losses, expected, 1e-2)


@pytest.fixture
def quick_compiler(monkeypatch):
    """On a CPU the compiler only traces, because code generation would take a minute."""
    torch._dynamo.reset()
    if not ON_GPU:
        load_native_library()  # Python 3.12's platform.machine() cannot be traced on its first call
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    yield
    torch._dynamo.reset()


#: options of a compiled run, and whether its losses must equal the eager ones
COMPILED_RUNS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "short last batch": ("supervised", {"epochs": 0.85}, True),
    "bf16, dropout": (
        "supervised",
        {
            "precision": "bf16",
            "model": lambda model: replace_model(model, regularization={"dropout": 0.1, "drop_path": 0.2}),
        },
        False,
    ),
    "several_sizes": ("supervised", {"objective": SupervisedConfig(progressive=0.5), "epochs": 2.0}, True),
    "mae": ("mae", {"epochs": 0.85}, True),
}


@pytest.mark.parametrize("name", COMPILED_RUNS)
def test_compile_matches_eager(name, tmp_path, quick_compiler):
    objective, options, same = COMPILED_RUNS[name]
    options = {"epochs": 1.0, "device": DEVICE, **options}
    if objective == "supervised":
        options["views"] = Augment(flip=0.5)
    session, state = create_objective_session(objective, tmp_path / "compiled", compile=True, **options)
    losses = collect_step_losses(session, state)
    session, state = create_objective_session(objective, tmp_path / "eager", **options)
    expected = collect_step_losses(session, state)
    assert len(losses) == len(expected) > 1 and all(map(math.isfinite, losses)), f"{losses}, eager {expected}"
    if same:
        check_close(f"losses of {name}, compiled {losses}, eager {expected}", losses, expected, 1e-3)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", [*OBJECTIVE_NAMES, "dropout"])
def test_cuda_graphs_match_launched_kernels(name, precision, tmp_path, monkeypatch):
    """The losses of ten steps match, the last seven replayed from a graph; dropout draws the same numbers in both."""
    recorded: list[bool] = []
    capture = CudaGraphRunner.capture

    def capture_and_note(self, *arguments: Any) -> bool:
        recorded.append(capture(self, *arguments))
        return recorded[-1]

    monkeypatch.setattr(CudaGraphRunner, "capture", capture_and_note)
    options: dict[str, Any] = {"epochs": 2.5, "device": DEVICE, "precision": precision}
    if name == "dropout":
        options["model"] = lambda model: replace_model(model, regularization={"dropout": 0.1, "drop_path": 0.2})
    losses = {}
    for graphs in ("0", "1"):
        monkeypatch.setenv("VITREOUS_CUDA_GRAPHS", graphs)
        session, state = create_objective_session(
            "supervised" if name == "dropout" else name, tmp_path / graphs, **options
        )
        losses[graphs] = collect_step_losses(session, state)
        if graphs == "0":
            assert not recorded
        elif ON_GPU and state.objective.capturable:
            assert recorded and all(recorded), f"{recorded}: not every shape of batch was recorded"
    limit = {"fp32": 1e-4, "bf16": 2e-2}[precision]
    check_close(f"losses of {name} with graphs {losses['1']}, without {losses['0']}", losses["1"], losses["0"], limit)


def collect_step_losses(session: Session, state: Any) -> list[float]:
    """The loss of each step, read after the step: a compiled forward pass calls no hooks."""
    losses: list[float] = []

    def note_loss(state: Any) -> None:
        state.read_metrics()
        losses.append(state.losses)
        state.losses = 0.0

    run_training_loop(state, session.batches(state), [(1, note_loss)])
    return losses


def test_auto_micro_batch_recovers_from_memory_errors(tmp_path, monkeypatch):
    """`--micro-batch auto` halves the batch until it fits into the memory limit; the run then trains within the
    limit."""
    images = draw_images(32, 96 if ON_GPU else 16)
    depth, width = (4, 128) if ON_GPU else (2, 32)
    options = {"images": images, "batch_size": 32, "epochs": 2.0, "device": DEVICE}
    options["model"] = lambda model: replace_model(model, depth=depth, width=width, mlp={"hidden": 4 * width})
    session, state = create_supervised_session(tmp_path / "first", **options)
    run, inputs, notes = session.run, session.inputs, []
    del state
    if ON_GPU:
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(DEVICE).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 300 * 2**20) / total)
    else:
        backward = Shards.backward

        def fail_above(self, batch, share):
            if len(batch["images"]) > 8:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return backward(self, batch, share)

        monkeypatch.setattr(Shards, "backward", fail_above)
    try:
        fitted = probe.find_micro_batch(run, inputs, session.folder, SINGLE_PROCESS, notes.append)
        size = fitted.micro_batch
        assert size is not None and 1 <= size <= 16, f"micro-batch {size}; notes: {notes}"
        assert notes and str(size) in notes[0], notes
        session, state = create_supervised_session(tmp_path / "second", **{**options, "micro_batch": size})
        run_training_loop(state, session.batches(state))
        assert state.step == 2 and math.isfinite(state.losses)
    finally:
        if ON_GPU:
            torch.cuda.set_per_process_memory_fraction(1.0)
            torch.cuda.empty_cache()


@pytest.fixture(params=[False, True], ids=["as the device reads", "read late"])
def deferred_metrics(request, monkeypatch):
    """The loop with this device's default, and with losses read one step later, as on a GPU."""
    if request.param:
        monkeypatch.setattr(loop, "defers_metrics", lambda run, device: True)


def test_metrics_have_the_loss_of_every_step(photos, tmp_path, deferred_metrics):
    """With --log-every 1, metrics.jsonl has a finite loss for each step that equals the CPU's."""
    options = {**STEP_OPTIONS, "steps": 5, "save_every": 2, "accumulate": 1, "log_every": 1}
    train(str(photos), out=str(tmp_path / "device"), progress=False, **options)
    train(str(photos), out=str(tmp_path / "cpu"), progress=False, **{**options, "device": "cpu"})
    losses, expected = read_losses(tmp_path / "device"), read_losses(tmp_path / "cpu")
    assert list(losses) == [1, 2, 3, 4, 5], losses
    assert all(loss is not None and math.isfinite(loss) for loss in losses.values()), losses
    if all(loss is not None for loss in expected.values()):
        check_close(f"losses {losses}, on the CPU {expected}", list(losses.values()), list(expected.values()), 1e-3)


@pytest.mark.parametrize("save_every", [1, 2])
def test_nan_loss_stops_the_run_and_saves_nothing_after_it(photos, tmp_path, monkeypatch, deferred_metrics, save_every):
    """The third of six steps has a NaN: the run raises NonFiniteError, and only complete checkpoints of earlier steps
    exist."""
    batches = Session.batches

    def poison_third(self, state):
        for step, (step_slice, batch) in enumerate(batches(self, state), 1):
            if step == 3:
                batch["images"][0] = math.nan
            yield step_slice, batch

    monkeypatch.setattr(Session, "batches", poison_third)
    options = {**STEP_OPTIONS, "steps": 4, "accumulate": 1, "save_every": save_every, "log_every": 1, "ema": 0.9}
    with pytest.raises(NonFiniteError, match="step 3: loss nan"):
        train(str(photos), out=str(tmp_path / "run"), progress=False, **options)
    saved = sorted(path for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert [path.name for path in saved][-1:] == ["step-00000002"], [path.name for path in saved]
    assert all(find_damage(path) is None for path in saved)
    for path in saved:
        for file in path.glob("*.safetensors"):
            tensors = load_file(file)
            bad = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
            assert not bad, f"{path.name}/{file.name}: not finite: {bad[:5]}"
    assert not (tmp_path / "run" / "model").exists()
    assert all(loss is None or math.isfinite(loss) for loss in read_losses(tmp_path / "run").values())


def test_skipped_steps_leave_weights_and_count(tmp_path):
    """`skip_steps` skips a step with a NaN on the device."""
    session, state = create_supervised_session(tmp_path, device=DEVICE, skip_steps=1, epochs=1.0, precision="bf16")

    def poison_second():
        for step, (step_slice, batch) in enumerate(session.batches(state), 1):
            if step == 2:
                batch["images"][0] = math.nan
            yield step_slice, batch

    run_training_loop(state, poison_second())
    assert (state.step, state.updates, state.skipped) == (4, 3, 1)
    assert all(tensor.isfinite().all() for tensor in copy_state(state).values())


#: trains consecutive runs, each in a group of one process; prints a traceback or None for each
TRAIN_SCRIPT = """
import json, os, sys, traceback
from vitreous.jobs.train import train
from vitreous.reports.pages import report
from vitreous.training import throughput
report.write_report = lambda *parts, **named: None
throughput.measure_peak_flops = lambda device, precision: 1e12
results = []
for port, options in json.loads(sys.argv[1]):
    os.environ["MASTER_PORT"] = str(port)
    try:
        train(**options)
        results.append(None)
    except Exception:
        results.append(traceback.format_exc())
print(json.dumps(results))
"""


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_ddp_and_fsdp_with_one_process_match_a_plain_run(photos, trained_run, tmp_path):
    """DDP and FSDP2 (in bfloat16) with one process over NCCL give the losses of a run without torch.distributed."""
    settings = [("ddp", "fp32"), ("fsdp", "bf16")]
    jobs = []
    for parallel, precision in settings:
        options = {
            **STEP_OPTIONS,
            "data": str(photos),
            "out": str(tmp_path / f"{parallel}-{precision}"),
            "progress": False,
        }
        options |= {"parallel": parallel, "precision": precision, "timeout": 60.0}
        if parallel == "ddp":  # DDP overlaps communication with the backward pass if a step has one micro-batch
            options |= {"accumulate": 1, "batch_size": 16}
        jobs.append((find_free_port(), options))
    launched = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    launched |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}  # the machine may have no other network
    result = subprocess.run(
        [sys.executable, "-c", TRAIN_SCRIPT, json.dumps(jobs)],
        capture_output=True, text=True, timeout=150, cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1", **launched},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    outcomes = json.loads(result.stdout.splitlines()[-1])
    problems = [f"{setting}: {outcome}" for setting, outcome in zip(settings, outcomes, strict=True) if outcome]
    for (parallel, precision), outcome in zip(settings, outcomes, strict=True):
        if outcome:
            continue
        run, alone = tmp_path / f"{parallel}-{precision}", trained_run(DEVICE, "fp32")
        losses, expected = read_losses(run), read_losses(alone)
        ours, theirs = (load_file(run_folder / "model" / "weights.safetensors") for run_folder in (run, alone))
        try:
            assert list(losses) == list(expected) == [2], (losses, expected)
            check_close(f"loss of {parallel}, {precision}", losses[2], expected[2], LOSS_LIMIT[precision])
            limit = {"fp32": 1e-4, "bf16": 1e-2}[precision]
            check_tensors_close(f"weights of {parallel}, {precision}", ours, theirs, limit)
        except AssertionError as error:
            problems.append(str(error))
    assert not problems, "\n".join(problems)
