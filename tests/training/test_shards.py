from __future__ import annotations

import pytest
import torch

from tests.training.test_flat import make_batch, make_objective
from vitreous.errors import UsageError
from vitreous.models.config import MlpConfig, ViTConfig
from vitreous.training.flat import FlatParameters
from vitreous.training.shards import Shards, choose_shard_count


def compute_gradient(count, rows, dtype=torch.float32):
    """Loss and gradient of a batch, computed in `count` shards."""
    objective = make_objective()
    flat = FlatParameters(objective, dtype, torch.device("cpu"), shards=count)
    flat.zero_grad()
    batch = {name: value.to(dtype) if name == "images" else value for name, value in make_batch(rows).items()}
    loss = Shards(objective, flat).backward(batch, 0.5)
    flat.collect()
    return loss, flat.master_grad.clone()


@pytest.mark.processor
@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("count, rows", [(2, 8), (3, 7), (4, 2)])
def test_sharded_gradients_match_the_whole_batch(count, rows, dtype, limit):
    """Including uneven shards, and fewer images than shards."""
    loss, grad = compute_gradient(1, rows)
    sharded_loss, ours = compute_gradient(count, rows, dtype)
    assert sharded_loss == pytest.approx(loss, rel=limit)
    assert (ours - grad).norm() < limit * grad.norm()


def test_sharded_gradients_are_deterministic():
    assert torch.equal(compute_gradient(2, 8)[1], compute_gradient(2, 8)[1])


def test_shards_use_updated_weights():
    objective = make_objective()
    flat = FlatParameters(objective, torch.bfloat16, torch.device("cpu"), shards=2)
    shards = Shards(objective, flat)
    flat.master.mul_(0.5)
    flat.sync(1)
    for forward in shards.forwards:
        assert all(torch.equal(p, flat.views(flat.working_copy)[name]) for name, p in forward.named_parameters())


def test_gpus_and_small_batches_use_one_shard():
    assert choose_shard_count("cuda:0", 512) == 1
    assert choose_shard_count("cpu", 8) == 1
    assert choose_shard_count("cpu", 10_000) == min(8, torch.get_num_threads())


def test_shards_reject_dropout(tmp_path):
    from dataclasses import replace

    from tests.training.test_loop import make_session

    session, _ = make_session(tmp_path)
    with pytest.raises(UsageError, match="dropout"):
        replace(session.run, shards=2, model=session.run.model.with_options(regularization={"drop_path": 0.1}))


def test_a_sharded_run_matches_an_unsharded_run(tmp_path):
    from tests.training.test_loop import make_session
    from vitreous.training.loop import run_training_loop

    ends, small = (
        [],
        ViTConfig(image=(16, 16), patch=(8, 8), classes=3, width=32, depth=2, heads=2, mlp=MlpConfig(hidden=64)),
    )
    for shards in (1, 2):
        session, state = make_session(tmp_path / str(shards), shards=shards, model=small)
        run_training_loop(state, session.batches(state))
        ends.append(state.flat.master.clone())
    assert (ends[0] - ends[1]).norm() < 1e-3 * ends[0].norm()
