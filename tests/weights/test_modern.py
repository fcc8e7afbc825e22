"""EVA-02, Perception Encoder, AIMv2, TIPSv2 and ViT-5: parity with timm, transformers, and original code restated
here."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.weights.peers import (
    ERROR_LIMIT,
    IMAGE_SIZE,
    OBLONG_SIZE,
    Peer,
    check_agreement,
    compute_difference,
    make_images,
    make_timm_peer,
    open_model,
    randomise,
)
from vitreous.models.names import config_from_name
from vitreous.models.zoo import build_without_init
from vitreous.weights.adopt import open_weights

#: parameters without a head, measured on timm 1.0.31 and on the original code
PARAMETERS = {
    "EVA02-Ti/14": 5_502_144,
    "EVA02-S/14": 21_621_120,
    "EVA02-B/14": 85_758_720,
    "EVA02-L/14": 303_268_800,
    "PE-Core-Ti/16": 6_042_240,
    "PE-Core-S/16": 23_586_048,
    "PE-Core-B/16": 92_886_528,
    "PE-Core-L/14": 316_102_656,
    "PE-Core-G/14": 1_880_066_560,
    "PE-Spatial-B/16": 86_433_792,
    "AIMv2-L/14": 309_197_824,
    "AIMv2-H/14": 680_851_968,
    "AIMv2-1B/14": 1_234_958_336,
    "AIMv2-3B/14": 2_720_658_432,
    "ViT-5-S/16": 22_039_144 - 385_000,
    "ViT-5-B/16": 86_543_080 - 769_000,
    "ViT-5-L/16": 304_258_024 - 1_025_000,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_counts_are_those_of_the_published_models(name):
    config = config_from_name(name)
    assert config.name() == name
    model = build_without_init(config.with_options(classes=0))
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]


def make_timm_model(name: str, sizes: tuple[tuple[int, int], ...] = (IMAGE_SIZE, OBLONG_SIZE), **options) -> Peer:
    """Return a small model of timm by name."""
    timm = pytest.importorskip("timm")
    small = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 3, "num_heads": 4, "num_classes": 7}
    return make_timm_peer(timm.create_model(name, dynamic_img_size=True, **small | options), sizes=sizes)


def make_hf_model(kind: str, **options) -> Peer:
    """Return a small image encoder of transformers."""
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 32, "patch_size": 8}
    config = getattr(transformers, f"{kind}VisionConfig")(**small | options)
    if kind == "Tipsv2":
        from transformers.models.tipsv2.modeling_tipsv2 import Tipsv2VisionModel as model_class
    else:
        model_class = getattr(transformers, f"{kind}VisionModel")
    model = randomise(model_class(config))

    def save(folder):
        """Save the model as transformers does."""
        model.save_pretrained(folder)
        return folder

    return Peer(model, lambda images: model(images).last_hidden_state, sizes=(IMAGE_SIZE,), save=save)


PEERS = {
    "EVA-02 S of timm": lambda: make_timm_model("eva02_small_patch14_224"),
    "EVA-02 B of timm": lambda: make_timm_model("eva02_base_patch14_224"),
    # for other sizes timm rescales the coordinates of a Perception Encoder, the original code does not
    "Perception Encoder of timm": lambda: make_timm_model(
        "vit_pe_core_base_patch16_224", (IMAGE_SIZE,), ref_feat_shape=(4, 4)
    ),
    "Perception Encoder, dense, of timm": lambda: make_timm_model(
        "vit_pe_spatial_base_patch16_512", (IMAGE_SIZE,), ref_feat_shape=(4, 4), num_classes=0
    ),
    "AIMv2 of timm": lambda: make_timm_model("aimv2_large_patch14_224"),
    "AIMv2 of transformers": lambda: make_hf_model("Aimv2", intermediate_size=96, use_head=False),
    "TIPSv2 of transformers": lambda: make_hf_model("Tipsv2"),
}


@pytest.mark.parametrize("name", PEERS)
def test_features_and_logits_match(name, tmp_path):
    peer = PEERS[name]()
    model = open_model(peer.file(tmp_path), peer.settings)
    model.any_size = True
    check_agreement(model, peer)


def rotate_neighbours(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate channels 2 i and 2 i + 1 of (..., N, d) by angles (N, d / 2)."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def compute_angles(rows: Tensor, columns: Tensor, pairs: int, base: float, columns_first: bool) -> Tensor:
    """Compute the angles (h w, 2 pairs) of a grid from the coordinates of its rows and columns."""
    frequencies = base ** (-torch.arange(pairs) / pairs)
    axes = [rows[:, None, None] * frequencies, columns[None, :, None] * frequencies]
    axes = [axis.expand(len(rows), len(columns), pairs) for axis in axes]
    return torch.cat(axes[::-1] if columns_first else axes, -1).flatten(0, 1)


class OriginalPE(nn.Module):
    """Perception Encoder by the formulas of core/vision_encoder/pe.py, with the tensor names of its files."""

    def __init__(self, width: int = 64, heads: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.class_embedding = nn.Parameter(torch.zeros(width))
        self.positional_embedding = nn.Parameter(torch.zeros(17, width))
        self.proj = nn.Parameter(torch.zeros(width, 24))
        self.conv1 = nn.Conv2d(3, width, 8, 8, bias=False)
        self.ln_pre, self.ln_post = nn.LayerNorm(width, eps=1e-5), nn.LayerNorm(width, eps=1e-5)
        self.transformer = nn.ModuleDict({"resblocks": nn.ModuleList(self.build_block(width) for _ in range(depth))})
        self.attn_pool = self.build_block(width, norms=("layernorm",))
        self.attn_pool.register_parameter("probe", nn.Parameter(torch.zeros(1, 1, width)))

    @staticmethod
    def build_block(width: int, norms: tuple[str, ...] = ("ln_1", "ln_2")) -> nn.ModuleDict:
        """Build the layers of a block, or of the pooling."""
        return nn.ModuleDict(
            {
                "attn": nn.MultiheadAttention(width, 8 if len(norms) == 1 else 4, batch_first=True),
                "mlp": nn.ModuleDict({"c_fc": nn.Linear(width, 4 * width), "c_proj": nn.Linear(4 * width, width)}),
                **{name: nn.LayerNorm(width, eps=1e-5) for name in norms},
            }
        )

    def tokens(self, images: Tensor) -> Tensor:
        """Compute the normed tokens (B, 1 + N, D)."""
        maps = self.conv1(images)
        grid = tuple(maps.shape[2:])
        table = self.positional_embedding[1:].T.unflatten(-1, (4, 4))[None]
        table = F.interpolate(table, size=grid, mode="bilinear", align_corners=False)[0].flatten(1).T
        front = (self.class_embedding + self.positional_embedding[0]).expand(len(images), 1, -1)
        x = self.ln_pre(torch.cat([front, maps.flatten(2).mT + table], 1))
        rows, columns = (torch.arange(length) + 1.0 for length in grid)  # the class token has the coordinates 0
        width = x.shape[-1] // self.heads
        patch_angles = compute_angles(rows, columns, width // 4, 1e4, columns_first=True)
        angles = torch.cat([torch.zeros(1, width // 2), patch_angles])
        for block in self.transformer["resblocks"]:
            attention, y = block["attn"], block["ln_1"](x)
            qkv = F.linear(y, attention.in_proj_weight, attention.in_proj_bias).unflatten(-1, (3, self.heads, -1))
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(rotate_neighbours(q, angles), rotate_neighbours(k, angles), v)
            x = x + attention.out_proj(y.transpose(1, 2).flatten(2))
            x = x + block["mlp"]["c_proj"](F.gelu(block["mlp"]["c_fc"](block["ln_2"](x))))
        return self.ln_post(x)

    def forward(self, images: Tensor) -> Tensor:
        """Compute the image embeddings (B, 24)."""
        x, pool = self.tokens(images), self.attn_pool
        y = pool["attn"](pool.probe.expand(len(x), -1, -1), x, x, need_weights=False)[0]
        y = y + pool["mlp"]["c_proj"](F.gelu(pool["mlp"]["c_fc"](pool["layernorm"](y))))
        return y[:, 0] @ self.proj


@pytest.mark.parametrize("start", ["", "visual."])
def test_perception_encoder_matches_the_original_code(tmp_path, start):
    """At all sizes; a full file also has a text encoder, whose names start without `visual.`."""
    original = randomise(OriginalPE())
    text = {"transformer.resblocks.0.ln_1.weight": torch.ones(8), "logit_scale": torch.ones(())} if start else {}
    state = {f"{start}{name}": tensor.contiguous() for name, tensor in original.state_dict().items()}
    save_file(state | text, tmp_path / "pe.safetensors")
    weights = open_weights(tmp_path / "pe.safetensors", {"heads": 4})
    assert weights.title == "the original Perception Encoder" and weights.preprocess.mean == (0.5, 0.5, 0.5)
    model = weights.build_bundle().model
    model.any_size = True
    for size in ((32, 32), (48, 48), (32, 64)):
        images = make_images(size)
        assert compute_difference(model.features(images), original.tokens(images)) <= ERROR_LIMIT
        assert compute_difference(model(images), original(images)) <= ERROR_LIMIT


class OriginalViT5(nn.Module):
    """ViT-5 by the formulas of models_vit5.py: registers after the patches, norms of queries and keys, RMSNorm."""

    def __init__(self, width: int = 48, heads: int = 3, depth: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, width, 8, 8)})
        self.cls_token, self.reg_token = nn.Parameter(torch.zeros(1, 1, width)), nn.Parameter(torch.zeros(1, 4, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, 16, width))
        self.norm, self.head = nn.RMSNorm(width, eps=1e-6), nn.Linear(width, 5)
        self.blocks = nn.ModuleList(self.build_block(width, width // heads) for _ in range(depth))

    @staticmethod
    def build_block(width: int, head_width: int) -> nn.ModuleDict:
        """Build the layers of a block."""
        norms = {name: nn.RMSNorm(head_width, eps=1e-6) for name in ("q_norm", "k_norm")}
        attention = {"qkv": nn.Linear(width, 3 * width, bias=False), "proj": nn.Linear(width, width), **norms}
        block = nn.ModuleDict(
            {
                "attn": nn.ModuleDict(attention),
                "mlp": nn.ModuleDict({"fc1": nn.Linear(width, 4 * width), "fc2": nn.Linear(4 * width, width)}),
                **{name: nn.RMSNorm(width, eps=1e-6) for name in ("norm1", "norm2")},
            }
        )
        for name in ("gamma_1", "gamma_2"):
            block.register_parameter(name, nn.Parameter(torch.ones(width)))
        return block

    def forward(self, images: Tensor) -> Tensor:
        """Compute logits (B, 5) of images of the native size."""
        patches = self.patch_embed["proj"](images).flatten(2).mT + self.pos_embed
        x = torch.cat([self.cls_token.expand(len(images), -1, -1), patches], 1)
        x = torch.cat([x, self.reg_token.expand(len(images), -1, -1)], 1)
        width, index = x.shape[-1] // self.heads, torch.arange
        angles = torch.cat(
            [
                torch.zeros(1, width // 2),
                compute_angles(index(4), index(4), width // 4, 1e4, columns_first=False),
                compute_angles(index(2), index(2), width // 4, 100.0, columns_first=False),
            ]
        )
        for block in self.blocks:
            attention = block["attn"]
            qkv = attention["qkv"](block["norm1"](x)).unflatten(-1, (3, self.heads, -1))
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            q, k = attention["q_norm"](q), attention["k_norm"](k)
            y = F.scaled_dot_product_attention(rotate_neighbours(q, angles), rotate_neighbours(k, angles), v)
            x = x + block.gamma_1 * attention["proj"](y.transpose(1, 2).flatten(2))
            x = x + block.gamma_2 * block["mlp"]["fc2"](F.gelu(block["mlp"]["fc1"](block["norm2"](x))))
        return self.head(self.norm(x)[:, 0])


def test_vit5_matches_the_original_code(tmp_path):
    original = randomise(OriginalViT5())
    save_file(original.state_dict(), tmp_path / "vit5.safetensors")
    weights = open_weights(tmp_path / "vit5.safetensors", {"heads": 3})
    assert weights.title == "the original ViT-5" and weights.config.rotary.reference == 4
    images = make_images(IMAGE_SIZE)
    assert compute_difference(weights.build_bundle().model(images), original(images)) <= ERROR_LIMIT
