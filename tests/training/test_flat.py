import copy

import pytest
import torch
from torch import nn

from vitreous.models.config import SwinAttentionConfig, SwinConfig
from vitreous.models.zoo import build_model, create_untrained_model
from vitreous.objectives.supervised import SupervisedObjective
from vitreous.training.flat import FlatParameters
from vitreous.training.optimizer import FlatOptimizer
from vitreous.training.run import OptimizerConfig


def make_batch(count=4):
    generator = torch.Generator().manual_seed(0)
    return {"images": torch.randn(count, 3, 16, 16, generator=generator), "labels": torch.arange(count) % 3}


def make_objective():
    torch.manual_seed(0)
    model = create_untrained_model("ViT-mu/8", 16, 3, registers=1)
    nn.init.normal_(model.head.weight, std=0.1)
    return SupervisedObjective(model)


def train_flat(ours, flat, optimizers, steps=5, limit=1.0):
    for step in range(steps):
        flat.zero_grad()
        ours({k: v.to(flat.working_copy.dtype) if k == "images" else v for k, v in make_batch().items()})[
            "loss"
        ].backward()
        flat.collect()
        flat.clip(limit)
        optimizers.step(1.0)
        flat.sync(step + 1)


def train_reference(options, reference, steps=5, limit=1.0):
    """Train the same model with a standard PyTorch optimizer, parameter by parameter."""
    matrices = [p for n, p in reference.named_parameters() if p.ndim == 2 and n.endswith("weight")]
    not_decayed = [p for n, p in reference.named_parameters() if not (p.ndim == 2 and n.endswith("weight"))]
    groups = [{"params": matrices, "weight_decay": options.weight_decay}, {"params": not_decayed, "weight_decay": 0.0}]
    if options.name == "adamw":
        optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=options.betas, eps=options.eps)
    else:
        optimizer = torch.optim.SGD([p for g in groups for p in g["params"]], lr=options.lr, momentum=options.momentum)
    for _ in range(steps):
        optimizer.zero_grad()
        reference(make_batch())["loss"].backward()
        nn.utils.clip_grad_norm_(reference.parameters(), limit)
        if options.name == "sgd":
            with torch.no_grad():
                for p in matrices:
                    p.mul_(1 - options.lr * options.weight_decay)
        optimizer.step()


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_flat_training_matches_pytorch_optimizers(name):
    options = OptimizerConfig(name, lr=1e-2, weight_decay=0.1)
    ours = make_objective()
    reference = copy.deepcopy(ours)
    flat = FlatParameters(ours, torch.float32, torch.device("cpu"))
    train_flat(ours, flat, FlatOptimizer(options, flat))
    train_reference(options, reference)
    for (key, a), b in zip(ours.named_parameters(), reference.parameters(), strict=True):
        if name == "adamw" and key.endswith("qkv.bias"):
            continue  # the gradient of a key bias is zero up to rounding, which Adam amplifies
        assert torch.allclose(a, b, atol=2e-6), key


def test_only_matrices_decay():
    flat = FlatParameters(make_objective(), torch.float32, torch.device("cpu"))
    names = {group.kind: group_names for group, group_names in flat.names.items()}
    assert names["matrix"] == [
        n for n in flat.parameters if ".blocks." in n and n.endswith("weight") and "norm" not in n
    ]
    assert names["decay"] == ["model.projection.weight", "model.head.weight"]
    assert {"model.prefix", "model.slots", "model.position.table", "model.encoder.norm.weight"} <= set(names["plain"])


@pytest.mark.parametrize("version", [1, 2])
def test_swin_positions_do_not_decay(version):
    """Parameters excluded by `no_weight_decay_keywords` of Microsoft's code: position tables and networks, and cosine
    scale factors."""
    swin = build_model(
        SwinConfig(
            version=version,
            image=(16, 16),
            patch_size=(4, 4),
            classes=3,
            width=16,
            blocks=(1, 1),
            heads=(1, 2),
            attention=SwinAttentionConfig(window=2),
        )
    )
    flat = FlatParameters(SupervisedObjective(swin), torch.float32, torch.device("cpu"))
    group_kinds = {name: group.kind for group, names in flat.names.items() for name in names}
    positions = {name for name in group_kinds if ".position." in name or "logit_scale" in name}
    assert len(positions) == (2 if version == 1 else 8)
    assert {group_kinds[name] for name in positions} == {"plain"}
    assert (
        group_kinds["model.stages.1.merge.reduction.weight"]
        == group_kinds["model.stages.0.blocks.0.mlp.part.fc1.weight"]
    )
    assert {group_kinds["model.projection.weight"], group_kinds["model.head.weight"]} == {"decay"}


def test_the_working_copy_follows_the_masters_and_the_twin_the_average():
    ours = make_objective()
    flat = FlatParameters(ours, torch.bfloat16, torch.device("cpu"), ema=0.5)
    train_flat(ours, flat, FlatOptimizer(OptimizerConfig(lr=1e-2), flat), steps=3)
    master, average = flat.views(flat.master), flat.views(flat.average)
    twin = dict(flat.eval_module.named_parameters())
    for name, parameter in ours.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, master[name].bfloat16())
        shipped = twin[name.removeprefix("model.")]
        assert torch.equal(shipped, average[name]) and not shipped.requires_grad
    assert not torch.equal(flat.average, flat.master)


def test_polyak_average_warms_up():
    ours = make_objective()
    flat = FlatParameters(ours, torch.float32, torch.device("cpu"), ema=0.5)
    expected = flat.master.clone()
    for step in range(1, 20):
        flat.master.add_(1.0)
        flat.sync(step)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * flat.master
    assert torch.allclose(flat.average, expected, atol=1e-5)


def test_micro_batch_gradients_are_summed_in_float32():
    ours = make_objective()
    flat = FlatParameters(ours, torch.bfloat16, torch.device("cpu"))
    flat.zero_grad()
    for _ in range(3):
        flat.grad.fill_(1.0)
        flat.grad[0] = 2**-9
        flat.collect()
    assert flat.master_grad[0] == 3 * 2**-9 and flat.master_grad[1] == 3
    assert not flat.grad.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_cleared_or_accumulated(dtype):
    """An interrupted backward pass does not affect the next step."""
    flat = FlatParameters(make_objective(), dtype, torch.device("cpu"), shards=2)
    for collected in (True, False, True):
        flat.zero_grad()
        assert all(not grad.any() for grad in flat.grads) and not flat.master_grad.any()
        flat.gradient_sum = flat.grad if dtype == torch.float32 else None
        for index, grad in enumerate(flat.grads):
            flat.views(grad)["model.head.weight"] += 1 + index  # as autograd adds, through a view
        if collected:
            flat.collect()
            assert flat.master_grad.max() == 3 and not any(
                grad.any() for grad in flat.grads if grad is not flat.gradient_sum
            )
    flat.zero_grad()
    unused_grads = [grad for grad in flat.grads if grad is not flat.gradient_sum]
    versions = [grad._version for grad in unused_grads]
    flat.zero_grad()
    assert unused_grads and versions == [grad._version for grad in unused_grads]  # no tensor was written


def test_clipping_uses_the_global_norm():
    flat = FlatParameters(make_objective(), torch.float32, torch.device("cpu"))
    flat.master_grad.normal_()
    unclipped = flat.master_grad.clone()
    assert flat.clip(None) == pytest.approx(unclipped.norm().item())
    assert torch.equal(flat.master_grad, unclipped)
    flat.clip(0.5)
    assert flat.master_grad.norm().item() == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
def test_optimizer_state_is_restored_by_name(name):
    options = OptimizerConfig(name, lr=1e-2, weight_decay=0.1)
    ours, theirs = make_objective(), make_objective()
    flat, again = (FlatParameters(o, torch.float32, torch.device("cpu")) for o in (ours, theirs))
    saved, restored = FlatOptimizer(options, flat), FlatOptimizer(options, again)
    train_flat(ours, flat, saved, steps=3)
    again.master.copy_(flat.master)
    restored.load(saved.get_state())
    train_flat(ours, flat, saved, steps=2)
    train_flat(theirs, again, restored, steps=2)
    assert torch.equal(flat.master, again.master)
    key = "momentum_buffer" if name != "adamw" else "exp_avg"
    assert f"{key}/model.encoder.blocks.0.mlp.part.fc1.weight" in saved.get_state()
