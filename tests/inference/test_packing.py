"""The outputs of a detector packed into one array."""

import numpy as np
import pytest
import torch

from vitreous.inference.outputs import pack_outputs, unpack_outputs


@pytest.mark.parametrize("masks", [True, False])
def test_packed_outputs_round_trip(masks):
    rng = np.random.default_rng(0)
    boxes, scores = rng.random((2, 5, 4), np.float32) * 900, rng.random((2, 5), np.float32)
    outputs = (boxes, scores, rng.integers(0, 1203, (2, 5)), *([rng.random((2, 5, 28, 28), np.float32)] * masks))
    again = unpack_outputs(pack_outputs(tuple(map(torch.from_numpy, outputs))).numpy())
    assert len(again) == len(outputs) and again[2].dtype == np.int64
    for output, unpacked in zip(outputs, again, strict=True):
        assert np.array_equal(output, unpacked)
    assert len(unpack_outputs(pack_outputs(tuple(torch.from_numpy(x[:, :0]) for x in outputs)).numpy())[1][0]) == 0
    with pytest.raises(ValueError, match="8 columns are not box, score, label and a square mask"):
        unpack_outputs(np.zeros((1, 1, 8), np.float32))
