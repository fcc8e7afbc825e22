"""VideoMAE's decoder in pre-training files, official and of transformers: the same loss, and round trips."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.weights.peers import randomise
from tests.weights.test_video import VIDEOMAE, build_transformers_model, to_official_names
from vitreous.config import to_builtins
from vitreous.data.modalities.base import IMAGENET_MOMENTS
from vitreous.data.modalities.clips import ClipPreprocess
from vitreous.errors import UsageError, WeightsError
from vitreous.models.config import replace_known_fields
from vitreous.objectives.base import TrainingProgress
from vitreous.reports.figures.reconstruction import load_restoring_objective
from vitreous.tasks.features import FeatureExtraction
from vitreous.weights.adopt import open_objective_state
from vitreous.weights.bundle import Bundle
from vitreous.weights.convert import convert
from vitreous.weights.objective_parts import ObjectiveState
from vitreous.weights.pretraining_files import get_pretraining_format

transformers = pytest.importorskip("transformers")

DECODER_SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 96}
PRETRAINING_OPTIONS = (
    VIDEOMAE | {f"decoder_{name}": size for name, size in DECODER_SIZES.items()} | {"use_mean_pooling": False}
)


def check_same_loss(model, objective):
    """Assert the same loss and predictions for the same mask."""
    clips = torch.randn(3, 3, 4, 16, 24)
    batch = objective.prepare(
        {"images": clips, "positions": torch.arange(3), "samples": torch.arange(3)}, TrainingProgress()
    )
    assert batch["visible"].shape == (3, 2) and batch["masked"].shape == (3, 10)
    hidden = objective.make_hidden_mask(batch["masked"])
    with torch.no_grad():
        expected, loss = model(clips.transpose(1, 2), bool_masked_pos=hidden), objective(batch)["loss"]
        predicted = objective.predict(clips, batch["visible"], batch["masked"])
    assert loss.item() == pytest.approx(expected.loss.item(), rel=1e-5)
    # the reference stores patch pixels channels-last
    pixels = torch.arange(3 * 128).view(3, 2, 8, 8).permute(1, 2, 3, 0).flatten()
    assert torch.allclose(predicted[..., pixels], expected.logits, atol=1e-4)


def save_official_file(model, path):
    """Save transformers' model in the official layout; return the tensors."""
    model_state = model.state_dict()
    layers = "decoder.decoder_layers."
    encoder = {name: tensor for name, tensor in model_state.items() if name.startswith("videomae.")}
    decoder = {name.replace(layers, "encoder.layer."): t for name, t in model_state.items() if name.startswith(layers)}
    other_tensors = {name: tensor for name, tensor in model_state.items() if not name.startswith(("videomae.", layers))}
    state = to_official_names(encoder, "encoder.") | to_official_names(decoder, "decoder.") | other_tensors
    torch.save({"model": state}, path)
    return state


@pytest.fixture(scope="module")
def videomae_files(tmp_path_factory):
    """Return a folder with a random transformers VideoMAE, and the same weights as an official file."""
    videomae_files = tmp_path_factory.mktemp("videomae")
    model = randomise(build_transformers_model("VideoMAEForPreTraining", PRETRAINING_OPTIONS))
    model.save_pretrained(videomae_files / "hf")
    save_official_file(model, videomae_files / "checkpoint.pth")
    return videomae_files, model


def test_the_loss_matches_transformers(videomae_files):
    objective = load_restoring_objective(videomae_files[0] / "hf")
    assert (objective.config.tubes, objective.config.decoder_heads, objective.config.mask) == (True, 2, 0.9)
    check_same_loss(videomae_files[1], objective)


def test_official_files_have_the_same_decoder(videomae_files):
    official_state, transformers_state = (
        open_objective_state(videomae_files[0] / "checkpoint.pth"),
        open_objective_state(videomae_files[0] / "hf"),
    )
    assert official_state.state.keys() == transformers_state.state.keys() and len(official_state.state) == 6 + 2 * 13
    assert all(torch.equal(tensor, transformers_state.state[name]) for name, tensor in official_state.state.items())
    # the official file does not contain the number of decoder heads, which is inferred from the encoder
    assert {**official_state.config, "decoder_heads": 2} == transformers_state.config


def test_written_files_are_read_by_transformers_and_vitreous(videomae_files, tmp_path):
    objective = load_restoring_objective(videomae_files[0] / "hf")
    randomise(objective, 7)
    state = {name: tensor for name, tensor in objective.state_dict().items() if name.startswith("decoder.")}
    objective_state = ObjectiveState(to_builtins(objective.config), state)
    preprocess = ClipPreprocess((4, 16, 24), 3, *IMAGENET_MOMENTS)
    Bundle(objective.model, FeatureExtraction(), preprocess, objective_state=objective_state).save(tmp_path / "bundle")
    convert(tmp_path / "bundle", tmp_path / "hf", "huggingface-videomae")
    model, info = transformers.VideoMAEForPreTraining.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    check_same_loss(model.eval(), objective)
    document = convert(tmp_path / "bundle", tmp_path / "checkpoint", "videomae-pretraining")
    written, expected = (
        torch.load(document["out"], weights_only=True)["model"],
        save_official_file(model, tmp_path / "x.pth"),
    )
    assert written.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in written.items())


@pytest.mark.parametrize(("to", "changes", "problem"), [
    ("mae", {}, "is for encoders of images.*use videomae-pretraining or huggingface-videomae or bundle"),
    ("videomae-pretraining", {"normalise_channels": False}, "pixels normalised per channel"),
    ("huggingface-videomae", {"norm.final": "none"}, "needs normalised tokens"),
])  # fmt: skip
def test_unsupported_decoder_options_are_rejected(videomae_files, to, changes, problem):
    objective_state, config = (
        open_objective_state(videomae_files[0] / "hf"),
        load_restoring_objective(videomae_files[0] / "hf").model.config,
    )
    config = replace_known_fields(config, {path: value for path, value in changes.items() if path == "norm.final"})
    objective_state = replace(objective_state, config=objective_state.config | changes)
    with pytest.raises(UsageError, match=f"(?s){problem}"):
        get_pretraining_format(to, config, objective_state, "it")


def test_decoders_of_unnormalised_pixels_are_rejected(videomae_files, tmp_path):
    build_transformers_model("VideoMAEForPreTraining", PRETRAINING_OPTIONS | {"norm_pix_loss": False}).save_pretrained(
        tmp_path / "hf"
    )
    with pytest.raises(WeightsError, match=r"pixels in 0 \.\. 1"):
        open_objective_state(tmp_path / "hf")
