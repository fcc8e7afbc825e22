"""Fine-tuning: trainable and frozen parameters, and adapters that are merged into the weights."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from torch import nn

from vitreous.data.modalities.images import ImagePreprocess
from vitreous.data.options import DataOptions
from vitreous.errors import UsageError
from vitreous.jobs.train import train
from vitreous.models.config import BiTConfig, StemConfig, SwinAttentionConfig, SwinConfig, transformer_config
from vitreous.models.zoo import build_model
from vitreous.objectives.supervised import SupervisedObjective
from vitreous.training.flat import FlatParameters
from vitreous.training.loop import TrainingState, run_training_loop
from vitreous.training.optimizer import FlatOptimizer
from vitreous.training.run import FineTuneConfig, OptimizerConfig, Run
from vitreous.training.slices import StepSlice
from vitreous.training.tune import check_fine_tuning, merge_lora_adapters, prepare_fine_tuning

SMALL_MODEL = {
    "image": (16, 16),
    "patch": (8, 8),
    "classes": 3,
    "width": 32,
    "depth": 3,
    "heads": 2,
    "mlp": {"hidden": 64},
}
STAGE_PREFIX = "body.stages.{}.units.{}."
#: model -> its config, the names of its blocks, and the modules between the blocks and the head
MODELS = {
    "plain": (transformer_config(**SMALL_MODEL), ["encoder.blocks.{}."], ["encoder.norm."]),
    "representation": (
        transformer_config(**SMALL_MODEL, head={"representation": 16}),
        ["encoder.blocks.{}."],
        ["encoder.norm."],
    ),
    "attention": (
        transformer_config(**SMALL_MODEL, pool="attention", norm={"final": "pooled"}),
        ["encoder.blocks.{}."],
        ["pooling.", "pooled_norm."],
    ),
    "hybrid": (
        transformer_config(**SMALL_MODEL, stem=StemConfig((1, 1), 8)),
        ["encoder.blocks.{}."],
        ["encoder.norm."],
    ),
    "each": (transformer_config(**SMALL_MODEL, positions={"at": "each"}), ["encoder.blocks.{}."], ["encoder.norm."]),
    "shared": (
        transformer_config(**SMALL_MODEL, positions={"at": "shared"}),
        ["encoder.blocks.{}."],
        ["encoder.norm."],
    ),
    "windows": (
        transformer_config(
            class_token=False, pool="mean", neck=8, attention={"kind": "decomposed", "window": 1}, **SMALL_MODEL
        ),
        ["encoder.blocks.{}."],
        ["encoder.norm.", "neck."],
    ),
    "distilled": (
        transformer_config(**SMALL_MODEL, pool="distilled", positions={"slots": 2}),
        ["encoder.blocks.{}."],
        ["encoder.norm."],
    ),
    "BiT": (BiTConfig(image=(16, 16), classes=3, blocks=(1, 2), width=8), [], ["body.norm."]),
    "Swin": (
        SwinConfig(
            image=(16, 16),
            patch_size=(4, 4),
            classes=3,
            width=16,
            blocks=(1, 2),
            heads=(1, 2),
            attention=SwinAttentionConfig(window=2),
        ),
        [],
        ["norm."],
    ),
}
BLOCK_PREFIXES = {
    "BiT": ["body.stages.0.units.0.", "body.stages.1.units.0.", "body.stages.1.units.1."],
    "Swin": ["stages.0.blocks.0.", "stages.1.blocks.0.", "stages.1.blocks.1."],
}


def build_random_model(config, seed=0):
    """A model with a nonzero head, so that gradients and outputs are nonzero."""
    torch.manual_seed(seed)
    model = build_model(config)
    for parameter in model.head.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model


def make_images(count=4):
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def list_trainable_names(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def make_run(config, tune, **changes):
    data = DataOptions("synthetic", ("a", "b", "c"), 32, "")
    return Run(
        data,
        config,
        ImagePreprocess((16, 16)),
        tune=tune,
        batch_size=8,
        epochs=1.5,
        optimizer=OptimizerConfig(lr=1e-2),
        **changes,
    )


def make_training_state(config, tune, **changes):
    """The state of a run at step 0, as a session builds it."""
    run = make_run(config, tune, **changes)
    model = build_random_model(config)
    prepare_fine_tuning(model, tune)
    objective = SupervisedObjective(model)
    dtype = torch.bfloat16 if run.precision == "bf16" else torch.float32
    flat = FlatParameters(objective, dtype, torch.device("cpu"), run.ema, shards=run.shards)
    return TrainingState(run=run, objective=objective, flat=flat, optimizers=FlatOptimizer(run.optimizer, flat))


def make_batches(state):
    """Six steps of noise with a tint to be learned."""
    generator = torch.Generator().manual_seed(0)
    for start in range(0, 48, 8):
        labels = torch.arange(start, start + 8) % 3
        pixels = torch.randn(8, 3, 16, 16, generator=generator)
        pixels[torch.arange(8), labels] += 2
        batch = {
            "images": pixels.to(state.flat.working_copy.dtype),
            "labels": labels,
            "samples": torch.arange(start, start + 8),
        }
        yield StepSlice(start, start + 8, 1.0), batch


def train_and_collect_losses(state):
    """The losses of every step."""
    losses = []
    run_training_loop(state, make_batches(state), [(1, lambda s: (losses.append(s.losses), setattr(s, "losses", 0.0)))])
    return losses


@pytest.mark.parametrize("last", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", MODELS)
def test_the_head_and_the_last_blocks_are_trainable(kind, last):
    config, stack, tail_modules = MODELS[kind]
    model = build_random_model(config)
    names = [text.format(i) for i in range(3) for text in stack] or BLOCK_PREFIXES[kind]
    prefixes = ["head.", "representation.", *(tail_modules if last else []), *names[len(names) - last :]]
    if kind == "Swin" and last > 1:  # patch merging trains with the block after it
        prefixes.append("stages.1.merge.")
    message = prepare_fine_tuning(model, FineTuneConfig(last_blocks=last))
    assert list_trainable_names(model) == {
        name for name, _ in model.named_parameters() if name.startswith(tuple(prefixes))
    }
    count = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    total = sum(parameter.numel() for parameter in model.parameters())
    assert message == f"training {count:,} of {total:,} parameters: the head" + (
        f" and the last {last} of 3 blocks" if last else ""
    )


@pytest.mark.parametrize("kind", MODELS)
def test_frozen_first_blocks_keep_no_autograd_graph(kind):
    model = build_random_model(MODELS[kind][0])
    prepare_fine_tuning(model, FineTuneConfig(last_blocks=1))
    requires_gradient = []
    for block in model.blocks():
        block.register_forward_hook(lambda block, inputs, output: requires_gradient.append(output.requires_grad))
    model.train()(make_images()).sum().backward()
    assert requires_gradient == [False, False, True]
    assert all((parameter.grad is not None) == parameter.requires_grad for parameter in model.parameters())


def test_dropout_is_disabled_only_in_frozen_blocks():
    model = build_random_model(
        transformer_config(**SMALL_MODEL, class_token=True, regularization={"dropout": 0.5, "drop_path": 0.5})
    )
    prepare_fine_tuning(model, FineTuneConfig(last_blocks=1))
    model = copy.deepcopy(model)  # copied as for shards and twins
    outputs = []
    model.encoder.blocks[1].register_forward_hook(lambda block, inputs, output: outputs.append(output))
    noisy = [model.train()(make_images()), model(make_images()), model.eval()(make_images())]
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])
    assert not torch.equal(noisy[0], noisy[1])


def frozen_state(objective) -> dict:
    """Frozen parameters and buffers, by name."""
    trainable = {name for name, parameter in objective.named_parameters() if parameter.requires_grad}
    return {name: tensor for name, tensor in objective.state_dict().items() if name not in trainable}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "tune",
    [FineTuneConfig(last_blocks=0), FineTuneConfig(last_blocks=1), FineTuneConfig(lora_rank=2)],
    ids=["head", "block", "lora"],
)
def test_frozen_tensors_are_unchanged_and_the_rest_learns(tune, precision):
    state = make_training_state(MODELS["plain"][0], tune, precision=precision, ema=0.9, shards=2)
    flat = state.flat
    frozen_before = {name: tensor.clone() for name, tensor in flat.untrained_state().items()}
    working = {name: tensor.clone() for name, tensor in frozen_state(state.objective).items()}
    masters = flat.master.clone()
    losses = train_and_collect_losses(state)
    assert min(losses[1:]) < losses[0]
    assert frozen_before.keys() == working.keys() == set(state.objective.state_dict()) - flat.parameters.keys()
    assert {tensor.dtype for tensor in frozen_before.values()} == {torch.float32}
    assert all(torch.equal(tensor, frozen_before[name]) for name, tensor in flat.untrained_state().items())
    assert all(torch.equal(tensor, working[name]) for name, tensor in frozen_state(state.objective).items())
    initial = build_random_model(MODELS["plain"][0]).state_dict()
    assert all(
        torch.equal(tensor, initial[name.removeprefix("model.").replace("base_layer.", "")])
        for name, tensor in frozen_before.items()
    )
    for name, view in flat.views(masters).items():
        assert not torch.equal(view, flat.views(flat.master)[name]), name


def test_all_parameters_are_trainable_by_default():
    model = build_random_model(MODELS["plain"][0])
    assert prepare_fine_tuning(model, FineTuneConfig()) == "" and not frozen_state(model)
    assert merge_lora_adapters(model) is model


@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind != "BiT"])
@torch.no_grad()
def test_new_adapters_keep_outputs_and_trained_adapters_are_merged(kind):
    config = MODELS[kind][0]
    plain, adapted = build_random_model(config).eval(), build_random_model(config).eval()
    plain.requires_grad_(False)  # PyTorch also selects kernels by requires_grad
    count = sum(parameter.numel() for parameter in adapted.parameters())
    message = prepare_fine_tuning(adapted, FineTuneConfig(lora_rank=4, lora_targets=("qkv", "fc2")))
    layers = [name for name, module in plain.named_modules() if name.endswith(("qkv", "fc2"))]
    assert message.endswith(f"the head and adapters of rank 4 at {len(layers)} layers (qkv, fc2)")
    assert {name.partition(".lora")[0] for name in list_trainable_names(adapted) if ".lora" in name} == set(layers)
    assert {name.partition(".")[0] for name in list_trainable_names(adapted) if ".lora" not in name} <= {
        "head",
        "representation",
    }
    assert torch.equal(adapted.features(make_images()), plain.features(make_images()))
    logits = plain(make_images())
    # `forward` computes keys separately if there are no adapters
    assert torch.allclose(adapted(make_images()), logits, atol=1e-5)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.normal_(std=0.05)
    merged = merge_lora_adapters(adapted)
    assert merged is not adapted and sum(parameter.numel() for parameter in merged.parameters()) == count
    assert not torch.allclose(adapted(make_images()), logits, atol=1e-3)
    assert torch.allclose(merged(make_images()), adapted(make_images()), atol=1e-5)
    plain.load_state_dict(merged.state_dict())
    assert torch.equal(plain(make_images()), merged(make_images()))


def test_adapters_match_peft():
    import peft

    config = MODELS["plain"][0]
    ours, theirs = build_random_model(config), build_random_model(config)
    tune = FineTuneConfig(lora_rank=3, lora_alpha=6.0, lora_dropout=0.1)
    torch.manual_seed(5)
    prepare_fine_tuning(ours, tune)
    torch.manual_seed(5)
    wrapped = peft.get_peft_model(
        theirs, peft.LoraConfig(r=3, lora_alpha=6, lora_dropout=0.1, target_modules=["qkv"], modules_to_save=["head"])
    )
    adapters = {name: parameter for name, parameter in ours.named_parameters() if "lora" in name}
    peft_parameters = dict(theirs.named_parameters())
    assert adapters and all(torch.equal(parameter, peft_parameters[name]) for name, parameter in adapters.items())
    for name, parameter in adapters.items():
        with torch.no_grad():
            torch.manual_seed(7)
            parameter.add_(torch.randn_like(parameter) * 0.1)
            peft_parameters[name].copy_(parameter)
    for module in (ours, wrapped):
        torch.manual_seed(9)
        module.train()(make_images()).square().sum().backward()
    assert all(torch.equal(parameter.grad, peft_parameters[name].grad) for name, parameter in adapters.items())
    assert torch.allclose(
        merge_lora_adapters(ours).eval()(make_images()), wrapped.merge_and_unload().eval()(make_images()), atol=1e-6
    )


def test_trained_adapters_merge_into_the_original_architecture():
    state = make_training_state(MODELS["plain"][0], FineTuneConfig(lora_rank=2), ema=0.9)
    train_and_collect_losses(state)
    twin = state.flat.eval_module
    again = build_model(MODELS["plain"][0]).eval()
    again.load_state_dict(merge_lora_adapters(twin).state_dict())
    assert torch.allclose(again(make_images()), twin(make_images()), atol=1e-5)
    assert not torch.equal(again(make_images()), build_random_model(MODELS["plain"][0]).eval()(make_images()))
    for name, view in state.flat.views(state.flat.average).items():  # the twin still computes with the average
        assert torch.equal(dict(state.flat.eval_module.named_parameters())[name.removeprefix("model.")], view)


@pytest.mark.parametrize(
    "kind,tune,expected",
    [
        ("plain", FineTuneConfig(last_blocks=4), "last_blocks is 4, but the model has 3 blocks"),
        ("BiT", FineTuneConfig(last_blocks=4), "last_blocks is 4, but the model has 3 blocks"),
        ("plain", FineTuneConfig(last_blocks=-1), "use 0 (only the head) to 3"),
        ("plain", FineTuneConfig(last_blocks=1, lora_rank=2), "use one of them"),
        ("plain", FineTuneConfig(lora_rank=-1), "lora_rank must be at least 0"),
        ("plain", FineTuneConfig(lora_rank=2, lora_dropout=1.0), "lora_dropout at least 0 and below 1, not"),
        (
            "plain",
            FineTuneConfig(lora_rank=2, lora_targets=("qkv", "query")),
            "query matches no layer\n  use linear layers of the model: fc1, fc2, out, projection, qkv",
        ),
        ("plain", FineTuneConfig(lora_rank=2, lora_targets=("head",)), "head matches no layer"),
        ("plain", FineTuneConfig(lora_rank=2, lora_targets=("norm",)), "norm matches layers that are not linear"),
        ("BiT", FineTuneConfig(lora_rank=2), "use linear layers of the model: none before its head"),
    ],
)
def test_unsupported_fine_tuning_is_rejected(kind, tune, expected):
    model = build_random_model(MODELS[kind][0])
    with pytest.raises(UsageError) as error:
        prepare_fine_tuning(model, tune)
    assert expected in str(error.value)
    assert all(parameter.requires_grad for parameter in model.parameters()), "a rejected model must be unchanged"


def test_lora_without_peft_prints_the_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UsageError, match="peft, which is not installed\n  pip install 'vitreous\\[lora\\]'"):
        check_fine_tuning(MODELS["plain"][0], FineTuneConfig(lora_rank=2))
    check_fine_tuning(MODELS["plain"][0], FineTuneConfig(last_blocks=1))


def test_rejected_fine_tuning_leaves_no_run_folder(tmp_path):
    with pytest.raises(UsageError, match="the model has 4 blocks"):
        train("digits", model="ViT-64x4/2", last_blocks=9, epochs=1, out=str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
