import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from tests import contracts
from vitreous.nn.resnet import (
    NUMERICS,
    AxialAttention,
    LineAttention,
    PostActivationBottleneck,
    PreActivationBottleneck,
    ResNet,
    ResNetRoot,
    ResNetStem,
    StandardizedConv,
    group_norm,
    pad_same,
    same_padding,
    standardize_weight,
)

#: units per stage: parameters, tokens per axis at 224, width (arXiv:2010.11929 and vision_transformer's configs)
STEM_SHAPES = {
    (): (9_536, 56, 64),
    (2, 2, 2, 2): (13_946_176, 7, 2048),
    (3, 4, 9): (11_894_848, 14, 1024),
    (3, 4, 6, 3): (23_508_032, 7, 2048),
}


def perturb_parameters(module, seed=0):
    """Randomise norms' scales and biases and give filters nonzero means, so that porting errors change outputs."""
    torch.manual_seed(seed)
    for parameter in module.parameters():
        parameter.data += torch.randn_like(parameter) * (0.1 if parameter.ndim > 1 else 0.5)
    return module.eval()


def rename_keys(state, *pairs):
    """Convert foreign parameter names to ours by text replacement."""
    names = {}
    for name in state:
        ours = name
        for theirs, our_name in (*pairs, ("downsample.", "shortcut.")):
            ours = ours.replace(theirs, our_name)
        names[ours] = state[name]
    return names


def compute_max_relative_error(ours, theirs):
    assert ours.shape == theirs.shape
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


@pytest.mark.parametrize(
    "numerics,half",
    [
        ("google", [0.21821694, 0.65465081, 1.09108469, 1.52751857]),
        ("bit", [0.21821789, 0.65465367, 1.09108945, 1.52752523]),
    ],
)
def test_weight_standardization_of_a_known_filter(numerics, half):
    weight = torch.arange(1.0, 9.0, dtype=torch.float64).view(1, 2, 2, 2)
    expected = torch.tensor([-x for x in reversed(half)] + half, dtype=torch.float64)
    assert torch.allclose(standardize_weight(weight, numerics).flatten(), expected, atol=1e-8, rtol=0)


@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize(
    "stride,same,size", [(1, False, (5, 4)), (2, False, (6, 5)), (1, True, (5, 4)), (2, True, (6, 5))]
)
def test_standardized_convolution_matches_the_loop(numerics, stride, same, size):
    conv = StandardizedConv(2, 3, 3, stride, numerics=numerics, same=same).double()
    images = torch.randn(1, 2, *size, dtype=torch.float64)
    eps, eps_position, *_ = NUMERICS[numerics]
    starts = [same_padding(n, 3, stride)[0] if same else 1 for n in size]
    expected = torch.zeros(1, 3, *(math.ceil(n / stride) for n in size), dtype=torch.float64)
    for o, weight in enumerate(conv.weight.detach()):
        values = weight.flatten().tolist()
        mean = sum(values) / len(values)
        variance = sum((v - mean) ** 2 for v in values) / len(values)
        deviation = math.sqrt(variance) + eps if eps_position == "deviation" else math.sqrt(variance + eps)
        for y in range(expected.shape[2]):
            for x in range(expected.shape[3]):
                for i, a, b in ((i, a, b) for i in range(2) for a in range(3) for b in range(3)):
                    row, column = y * stride - starts[0] + a, x * stride - starts[1] + b
                    if 0 <= row < size[0] and 0 <= column < size[1]:
                        expected[0, o, y, x] += images[0, i, row, column] * (weight[i, a, b] - mean) / deviation
    assert torch.allclose(conv(images), expected, atol=1e-12)


#: size, kernel, stride: pixels before and after
EXPECTED_PADDING = {
    (224, 7, 2): (2, 3),
    (225, 7, 2): (3, 3),
    (112, 3, 2): (0, 1),
    (5, 3, 2): (1, 1),
    (6, 3, 1): (1, 1),
    (56, 1, 2): (0, 0),
    (1, 7, 2): (3, 3),
}


@pytest.mark.parametrize("size,kernel,stride", EXPECTED_PADDING)
def test_same_padding_has_the_expected_amounts(size, kernel, stride):
    assert same_padding(size, kernel, stride) == EXPECTED_PADDING[size, kernel, stride]


def test_same_padding_reads_the_pixels_that_tensorflow_reads():
    line = torch.arange(1.0, 7).view(1, 1, 1, 6).expand(1, 1, 6, 6)
    windows = pad_same(line, 3, 2).unfold(3, 3, 2)[0, 0, 0]
    assert windows.tolist() == [[1, 2, 3], [3, 4, 5], [5, 6, 0]]
    for same, expected_rows in ((True, [2, 3, 4]), (False, [1, 2, 3])):
        images = torch.randn(1, 1, 6, 6, requires_grad=True)
        StandardizedConv(1, 1, 3, 2, same=same)(images)[0, 0, 1, 1].backward()
        assert images.grad[0, 0].abs().sum(1).nonzero().flatten().tolist() == expected_rows


def test_small_weights_survive_half_precision():
    weight = torch.randn(4, 8, 3, 3) * 1e-4
    assert torch.allclose(
        standardize_weight(weight.half(), "bit").float(), standardize_weight(weight, "bit"), atol=2e-2
    )


def test_groups_divide_any_width():
    assert [group_norm(c, "google").num_groups for c in (2048, 64, 32, 48, 20, 3)] == [32, 32, 32, 16, 4, 1]
    assert group_norm(64, "google").eps == 1e-6 and group_norm(64, "bit").eps == 1e-5


def test_root_max_pool_includes_zero_padding_only_for_bit():
    torch.manual_seed(0)  # a corner must be negative in some channel
    plain, hybrid = ResNetRoot(1, 32, "bit", hybrid=False), ResNetRoot(1, 32, "google", hybrid=True)
    images = torch.randn(1, 1, 16, 16)
    convolved = plain.conv(images)
    expected = F.max_pool2d(convolved, 3, 2, 1)  # pads with -inf
    assert torch.equal(plain(images)[..., 1:, 1:], expected[..., 1:, 1:])
    assert torch.equal(plain(images)[..., 0, 0], expected[..., 0, 0].clamp(min=0)) and (expected[..., 0, 0] < 0).any()
    normed = F.relu(hybrid.norm(hybrid.conv(images)))
    assert torch.equal(hybrid(images), F.max_pool2d(normed, 3, 2, ceil_mode=True))  # windows start at 0, 2, 4, 6


def test_initial_post_activation_unit_returns_its_shortcut():
    x = torch.randn(2, 32, 5, 6)
    same, changed = PostActivationBottleneck(32, 8, 1, "google"), PostActivationBottleneck(32, 16, 2, "google")
    assert same.shortcut is None and torch.equal(same(x), F.relu(x))
    assert torch.equal(changed(x), F.relu(changed.shortcut(x)))


def test_pre_activation_unit_normalises_only_before_a_conv_shortcut():
    x = torch.randn(2, 32, 5, 6)
    same, changed = PreActivationBottleneck(32, 8, 1, "bit"), PreActivationBottleneck(32, 16, 2, "bit")
    for unit in (same, changed):
        torch.nn.init.zeros_(unit.norm3.weight)  # the branch is then conv3 of zeros
    assert torch.equal(same(x), x)
    assert torch.allclose(changed(x), changed.shortcut(F.relu(changed.norm1(x))))


@pytest.mark.parametrize("length", [5, 4, 7, 2])
def test_line_attention_matches_the_loop(length):
    width, heads = 32, 8
    attention = perturb_parameters(LineAttention(width, 5, "bit")).double()
    x = torch.randn(3, length, width, dtype=torch.float64)
    rq, rk, rv = attention.offsets(length)
    if length == 5:
        for i in range(5):
            for j in range(5):
                assert torch.equal(torch.cat([rq[i, j], rk[i, j], rv[i, j]]), attention.relative[j - i + 4])
    expected, weights = torch.zeros_like(x), attention.compute_weights(x)
    for line in range(3):
        qkv = attention.norm_qkv((x[line] @ attention.qkv.weight.T).T[None])[
            0
        ].T  # the norm uses the statistics of this line
        for head in range(heads):
            q, k, v = qkv[:, 8 * head : 8 * head + 8].split((2, 2, 4), 1)
            for i in range(length):
                logits = torch.stack([q[i] @ k[j] + q[i] @ rq[i, j] + k[j] @ rk[i, j] for j in range(length)])
                p = logits.softmax(0)
                assert torch.allclose(weights[line, head, i], p, atol=1e-10)
                expected[line, i, 4 * head : 4 * head + 4] = sum(p[j] * (v[j] + rv[i, j]) for j in range(length))
        expected[line] = attention.norm_out(expected[line].T[None])[0].T
    assert torch.allclose(attention(x), expected, atol=1e-10)


def test_resized_relative_positions_keep_order_and_symmetry():
    attention = LineAttention(32, 5, "bit")
    attention.relative.data = torch.arange(-4.0, 5)[:, None].expand(9, 8).clone()
    _, _, rv = attention.offsets(8)
    assert torch.allclose(rv.diagonal(), torch.zeros(()), atol=1e-5)
    assert torch.allclose(rv, -rv.transpose(0, 1), atol=1e-5)
    assert (rv[0].diff(dim=0) > 0).all()


@pytest.mark.parametrize("stride,size", [(1, (5, 3)), (2, (5, 3)), (2, (4, 6))])
def test_axial_attention_applies_rows_columns_and_average_pooling(stride, size):
    attention = perturb_parameters(AxialAttention(32, (size[1], size[0]), stride, "bit"))
    x = torch.randn(2, 32, *size)
    row_output = torch.stack([attention.row(x[:, :, i].transpose(1, 2)).transpose(1, 2) for i in range(size[0])], 2)
    both = torch.stack(
        [attention.column(row_output[..., j].transpose(1, 2)).transpose(1, 2) for j in range(size[1])], 3
    )
    expected = torch.zeros(2, 32, math.ceil(size[0] / stride), math.ceil(size[1] / stride))
    for i in range(expected.shape[2]):
        for j in range(expected.shape[3]):
            expected[:, :, i, j] = both[:, :, i * stride : (i + 1) * stride, j * stride : (j + 1) * stride].mean((2, 3))
    assert torch.allclose(attention(x), expected, atol=1e-5)


def test_heads_must_divide_half_the_width():
    with pytest.raises(ValueError, match="not divisible by 16"):
        LineAttention(24, 5, "bit")


@pytest.mark.parametrize("blocks", STEM_SHAPES)
def test_stems_have_the_published_size(blocks):
    count, tokens, width = STEM_SHAPES[blocks]
    with torch.device("meta"):
        stem = ResNetStem(blocks)
    assert sum(p.numel() for p in stem.parameters()) == count
    assert (stem.width_out, stem.reduction) == (width, 224 // tokens)
    assert ResNetStem(blocks, 8)(torch.randn(1, 3, 224, 224)).shape == (1, tokens, tokens, width // 8)


def test_stem_fulfils_the_model_contract():
    torch.manual_seed(0)
    stem = contracts.randomise(ResNetStem((1, 2), 16, channels=2))
    images = torch.randn(3, 2, 24, 40)
    contracts.check_batch_independence(stem, images)
    contracts.check_all_gradients(stem, images)
    contracts.check_export_matches(stem, images)
    assert stem(torch.randn(1, 2, 33, 50)).shape == (1, 5, 7, 128)


@pytest.mark.parametrize("numerics", ["google", "bit", "timm"])
def test_numerics_produce_different_outputs(numerics):
    """Outputs differ by more than rounding, so weights must keep their numerics."""
    torch.manual_seed(0)
    weight = torch.randn(4, 8, 3, 3) * 1e-3
    other_numerics = [name for name in ("google", "bit", "timm") if name != numerics]
    assert all(
        compute_max_relative_error(standardize_weight(weight, numerics), standardize_weight(weight, name)) > 1e-3
        for name in other_numerics
    )


@pytest.mark.parametrize("blocks", [(1, 2), (1, 1, 1)])
@pytest.mark.parametrize("size", [(64, 64), (47, 70)])
@torch.inference_mode()
def test_parity_with_timms_hybrid_backbone(blocks, size):
    resnetv2 = pytest.importorskip("timm.models.resnetv2")
    from timm.layers import StdConv2dSame

    conv = partial(StdConv2dSame, eps=1e-8)  # as timm's vision_transformer_hybrid sets it
    options = {
        "channels": (128, 256, 512),
        "stem_chs": 32,
        "stem_type": "same",
        "preact": False,
        "num_classes": 0,
        "global_pool": "",
    }
    theirs = perturb_parameters(resnetv2.ResNetV2(blocks, conv_layer=conv, **options))
    ours = ResNetStem(blocks, 32, numerics="timm").eval()
    ours.load_state_dict(rename_keys(theirs.state_dict(), ("stem.", "root."), (".blocks.", ".units.")))
    images = torch.randn(2, 3, *size)
    assert compute_max_relative_error(ours(images).movedim(-1, 1), theirs(images)) <= 1e-5


@pytest.mark.parametrize("size", [(64, 64), (47, 70)])
@torch.inference_mode()
def test_root_matches_timm(size):
    hybrid = pytest.importorskip("timm.models.vision_transformer_hybrid")
    theirs = perturb_parameters(hybrid._resnetv2(()))
    assert NUMERICS["timm"] == (theirs.conv.eps, "variance", theirs.norm.eps, 0.0)
    ours = ResNetStem((), numerics="timm").eval()
    ours.load_state_dict({f"root.{name}": tensor for name, tensor in theirs.state_dict().items()})
    images = torch.randn(2, 3, *size)
    assert compute_max_relative_error(ours(images).movedim(-1, 1), theirs(images)) <= 1e-5


@pytest.mark.parametrize("kind", ["preactivation", "bottleneck"])
@pytest.mark.parametrize("size", [(64, 64), (47, 70)])
@torch.inference_mode()
def test_parity_with_transformers(kind, size):
    bit = pytest.importorskip("transformers.models.bit.modeling_bit")
    hybrid = kind == "bottleneck"
    padding = {"global_padding": "SAME", "embedding_dynamic_padding": True} if hybrid else {}
    config = bit.BitConfig(layer_type=kind, embedding_size=32, hidden_sizes=[128, 256], depths=[1, 2], **padding)
    theirs = perturb_parameters(bit.BitModel(config))
    assert NUMERICS["transformers"] == (theirs.encoder.stages[0].layers[0].conv1.eps, "variance", 1e-5, 0.0)
    ours = (
        ResNetStem((1, 2), 32, numerics="transformers") if hybrid else ResNet((1, 2), 32, numerics="transformers")
    ).eval()
    pairs = ("embedder.convolution", "root.conv"), ("embedder.", "root."), ("encoder.", ""), (".layers.", ".units.")
    ours.load_state_dict(rename_keys(theirs.state_dict(), *pairs))
    images = torch.randn(2, 3, *size)
    output = ours(images).movedim(-1, 1) if hybrid else ours(images)
    assert compute_max_relative_error(output, theirs(images).last_hidden_state) <= 1e-5
