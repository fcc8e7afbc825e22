"""Every kind of model trains, stops, resumes bit-identically, and reloads from its bundle."""

from __future__ import annotations

import signal

import pytest
import torch

from tests.training.test_loop import make_session
from vitreous.errors import Interrupted, UsageError
from vitreous.models.config import (
    BiTConfig,
    ConvStemConfig,
    RegularizationConfig,
    StemConfig,
    SwinAttentionConfig,
    SwinConfig,
    transformer_config,
)
from vitreous.training import throughput
from vitreous.training.folder import RunFolder
from vitreous.training.session import Session
from vitreous.weights.bundle import load_bundle

SMALL_MODEL = {
    "image": (16, 16),
    "patch": (8, 8),
    "classes": 3,
    "width": 32,
    "depth": 2,
    "heads": 2,
    "mlp": {"hidden": 64},
}
POSITION_VARIANTS = [
    {"positions": {"kind": position, "at": at}}
    for position in ("learned", "axes")
    for at in ("input", "each", "shared")
]
#: arXiv:2010.11929, Table 8: every kind of position at every position that supports it
TABLE_8 = {f"{row['positions']['kind']} at {row['positions']['at']}": row for row in POSITION_VARIANTS} | {
    "none": {"positions": {"kind": "none"}},
    "relative": {"positions": {"kind": "none"}, "attention": {"kind": "relative"}},
}
OTHER_VARIANTS = {
    "fixed": {"positions": {"kind": "sincos"}},
    "rotary": {"positions": {"kind": "none"}, "attention": {"kind": "rotary"}},
    "axial": {"axial": True, "class_token": False, "pool": "mean"},
    "windows": {"attention": {"kind": "decomposed", "window": 1}, "class_token": False, "pool": "mean", "neck": 8},
    "hybrid": {"stem": StemConfig((1, 1), 8)},
    "convolutions": {"stem": ConvStemConfig(widths=(4, 8), blocks=(0, 1))},
    "distilled": {"pool": "distilled", "positions": {"slots": 2}},
    "gated": {"mlp": {"kind": "swiglu"}, "norm": {"layer_scale": 1e-2}},
}
MODELS = {
    name: transformer_config(**SMALL_MODEL).with_options(**changes)
    for name, changes in (TABLE_8 | OTHER_VARIANTS).items()
} | {
    "BiT": BiTConfig(image=(16, 16), classes=3, blocks=(1, 1), width=8),
    "AxialResNet": BiTConfig(image=(16, 16), classes=3, blocks=(1, 1), width=16, axial=True),
    "Swin V2": SwinConfig(
        version=2,
        image=(16, 16),
        patch_size=(4, 4),
        classes=3,
        width=16,
        blocks=(1, 1),
        heads=(1, 2),
        attention=SwinAttentionConfig(window=2),
    ),
    "Swin": SwinConfig(
        image=(16, 16),
        patch_size=(2, 2),
        classes=3,
        width=16,
        blocks=(2, 2),
        heads=(1, 2),
        attention=SwinAttentionConfig(window=3),
        regularization=RegularizationConfig(drop_path=0.2),
    ),
}


def build_session(folder, model, **changes):
    folder.mkdir(parents=True, exist_ok=True)
    session, _ = make_session(folder, model=model, epochs=1.0, save_every=100, evaluate_every=100, **changes)
    return Session(session.run, session.inputs, RunFolder(folder))


@pytest.mark.parametrize("name", MODELS)
def test_training_resumes_bit_identically(name, tmp_path):
    dropped = 0.5 if name in TABLE_8 or name in ("rotary", "convolutions") else 0.0
    uninterrupted = build_session(tmp_path / "whole", MODELS[name], patch_dropout=dropped)
    summary = uninterrupted.train()
    assert summary["steps"] == 6
    stopped = build_session(tmp_path / "stopped", MODELS[name], patch_dropout=dropped)
    log = stopped.log

    def stop_at_step_3(state):
        log(state)
        if state.step == 3:
            stopped.signals.received = signal.SIGTERM

    stopped.log = stop_at_step_3
    with pytest.raises(Interrupted):
        stopped.train()
    build_session(tmp_path / "stopped", MODELS[name], patch_dropout=dropped).train()
    weights = [(tmp_path / side / "model" / "weights.safetensors").read_bytes() for side in ("whole", "stopped")]
    assert weights[0] == weights[1]
    bundle = load_bundle(tmp_path / "whole" / "model")
    assert bundle.model.config == MODELS[name]
    with torch.inference_mode():
        assert torch.isfinite(bundle.model(torch.randn(2, 3, 16, 16))).all()


@pytest.mark.parametrize("name", ["axial", "windows", "BiT", "Swin"])
def test_models_with_whole_grids_reject_patch_dropout(name, tmp_path):
    with pytest.raises(UsageError, match="patch dropout"):
        build_session(tmp_path, MODELS[name], patch_dropout=0.5)


@pytest.mark.parametrize("name", ["learned at each", "relative", "rotary", "BiT", "hybrid", "Swin", "Swin V2"])
def test_models_train_in_bfloat16(name, tmp_path, monkeypatch):
    # measuring takes half a minute where bfloat16 is emulated
    monkeypatch.setattr(throughput, "measure_peak_flops", lambda device, precision: 1e12)
    summary = build_session(tmp_path, MODELS[name], precision="bf16").train()
    assert 0 < summary["train"]["loss"] < 2


def test_sharded_gradients_match_the_whole_batch(tmp_path):
    """Relative attention with dropped patches: indices are split together with their batch."""
    model = MODELS["relative"].with_options(regularization={"drop_path": 0.0})
    ends = []
    for shards in (1, 2):
        summary = build_session(tmp_path / str(shards), model, patch_dropout=0.5, shards=shards)
        summary.train()
        ends.append(load_bundle(tmp_path / str(shards) / "model").model.encoder.blocks[0].attention.part.table)
    assert torch.allclose(ends[0], ends[1], atol=1e-5)
