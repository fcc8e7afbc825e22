"""Weights saved by other libraries give the same features and logits when opened here.

All parameters are random, norms and layer scales included. Inputs have the native size, and where the other library
supports it, a size that is neither native nor square.
"""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from tests.weights import peers
from tests.weights.peers import check_agreement, compute_difference, make_images, make_timm_vit, open_model
from vitreous.nn.grid import resize_position_table
from vitreous.weights.adopt import open_weights
from vitreous.weights.formats import others

pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")

CLIP_OPTIONS = {
    "pre_norm": True,
    "norm_layer": partial(nn.LayerNorm, eps=1e-5),
    "act_layer": "quick_gelu",
    "settings": {"mlp.gelu": "quick"},
}


def make_swiglu_peer():
    from timm.layers import SwiGLUPacked

    return make_timm_vit(
        mlp_layer=SwiGLUPacked, act_layer=nn.SiLU, mlp_ratio=4, init_values=1e-5, reg_tokens=4, no_embed_class=True
    )


PEERS = {
    "timm ViT": make_timm_vit,
    "timm ViT, patches that are not square": lambda: make_timm_vit(patch_size=(8, 4), settings={"image": (32, 32)}),
    "timm ViT, tanh GELU": lambda: make_timm_vit(act_layer="gelu_tanh", settings={"mlp.gelu": "tanh"}),
    "timm DeiT, distilled": peers.make_timm_distilled,
    "timm DeiT-III": lambda: make_timm_vit(init_values=1e-6, no_embed_class=True),
    "timm DINOv2": lambda: make_timm_vit(init_values=1e-5),
    "timm DINOv2, registers": lambda: make_timm_vit(init_values=1e-5, reg_tokens=4, no_embed_class=True),
    "timm DINOv2, registers and SwiGLU": make_swiglu_peer,
    "timm CLIP": lambda: make_timm_vit(**CLIP_OPTIONS),
    "timm hybrid, root alone": lambda: peers.make_timm_hybrid((), 2, (32, 32), (48, 40)),
    "timm hybrid, R26": lambda: peers.make_timm_hybrid((1, 1, 1, 1), 1, (64, 64), (96, 64)),
    "timm hybrid, R50 of three stages": lambda: peers.make_timm_hybrid((1, 2, 3), 1, (32, 32), (64, 48)),
    "timm BiT": peers.make_timm_bit,
    "timm SAM": peers.make_timm_sam,
    "timm SAM, other window": lambda: peers.make_timm_sam(48, 4, global_attn_indexes=(0,)),
    "transformers ViT": peers.make_transformers_vit,
    "transformers ViT, tanh GELU": lambda: peers.make_transformers_vit(hidden_act="gelu_new"),
    "transformers ViT, quick GELU": lambda: peers.make_transformers_vit(hidden_act="quick_gelu"),
    "transformers ViT, larger epsilon": lambda: peers.make_transformers_vit(layer_norm_eps=1e-2),
    "transformers ViT, no bias on q, k, v": lambda: peers.make_transformers_vit(qkv_bias=False),
    "transformers ViT, no head": lambda: peers.make_transformers_vit(classes=0),
    "transformers DeiT with teacher": peers.make_transformers_deit,
    "transformers ViTMAE": peers.make_transformers_mae,
    "transformers DINOv2": peers.make_transformers_dinov2,
    "transformers DINOv2, registers": lambda: peers.make_transformers_dinov2(registers=3),
    "transformers DINOv2, SwiGLU": lambda: peers.make_transformers_dinov2(swiglu=True),
    "transformers DINOv2, registers and SwiGLU": lambda: peers.make_transformers_dinov2(registers=4, swiglu=True),
    "transformers CLIP, projected": peers.make_transformers_clip,
    "transformers CLIP, no projection": lambda: peers.make_transformers_clip(False),
    "transformers CLIP, exact GELU": lambda: peers.make_transformers_clip(hidden_act="gelu"),
    "transformers SAM": peers.make_transformers_sam,
    "transformers SAM, other window": lambda: peers.make_transformers_sam(48, 4, global_attn_indexes=[0]),
    "transformers BiT": peers.make_transformers_bit,
    "transformers BiT, no head": lambda: peers.make_transformers_bit(classes=0),
    "torchvision ViT": peers.make_torchvision_vit,
    "torchvision ViT, representation": lambda: peers.make_torchvision_vit(representation=20),
}


@pytest.mark.parametrize("name", PEERS)
def test_features_and_logits_match_the_peer(name, tmp_path):
    peer = PEERS[name]()
    check_agreement(open_model(peer.file(tmp_path), peer.settings), peer)


def test_original_deit_iii_files_match(tmp_path):
    peer = make_timm_vit(init_values=1e-6, no_embed_class=True)
    peer = peers.rename_tensors(peer, (r"\.ls(\d)\.gamma", r".gamma_\1"))
    peer.sizes = peer.sizes[:1]  # at other sizes timm resizes differently from the original: test_resizing
    check_agreement(open_model(peer.file(tmp_path), peer.settings), peer)


@pytest.mark.parametrize("registers", [0, 4])
@pytest.mark.parametrize("gated", [False, True])
def test_original_dinov2_files_match(registers, gated, tmp_path):
    """Original names, with timm's conversion as the reference; the resize rules differ at other sizes."""
    from timm.layers import SwiGLUPacked
    from timm.models.vision_transformer import checkpoint_filter_fn

    options = {"mlp_layer": SwiGLUPacked, "act_layer": nn.SiLU} if gated else {}
    peer = make_timm_vit(init_values=1e-5, num_classes=0, reg_tokens=registers, no_embed_class=registers > 0, **options)
    renamed = {}
    for name, tensor in peer.model.state_dict().items():
        name = name.replace("mlp.fc1", "mlp.w12").replace("mlp.fc2", "mlp.w3") if gated else name
        renamed["register_tokens" if name == "reg_token" else name] = tensor.clone()
    if registers:
        renamed["pos_embed"] = torch.cat([0.3 * torch.ones(1, 1, 48), renamed["pos_embed"]], 1)
    renamed["mask_token"] = torch.ones(1, 48)
    save_file(renamed, tmp_path / "dinov2.safetensors")
    peer.model.load_state_dict(checkpoint_filter_fn(dict(renamed), peer.model))
    peer.logits, peer.sizes = None, peer.sizes if registers else peer.sizes[:1]
    weights = open_weights(tmp_path / "dinov2.safetensors", peer.settings)
    assert (weights.title, weights.unused) == ("the original DINOv2", ["mask_token"])
    check_agreement(weights.build_bundle().model, peer)


@pytest.mark.parametrize("projected", [True, False])
def test_original_clip_files_match(projected, tmp_path):
    from timm.models.vision_transformer import checkpoint_filter_fn

    peer = make_timm_vit(**CLIP_OPTIONS, num_classes=24 if projected else 0)
    state = peer.model.state_dict()
    swaps = [
        ("patch_embed.proj", "conv1"),
        ("norm_pre", "ln_pre"),
        ("attn.qkv.", "attn.in_proj_"),
        ("attn.proj", "attn.out_proj"),
    ]
    swaps += [("mlp.fc1", "mlp.c_fc"), ("mlp.fc2", "mlp.c_proj"), ("norm1", "ln_1"), ("norm2", "ln_2")]
    renamed = {"text_projection": torch.ones(3, 3), "logit_scale": torch.ones(())}
    for name, tensor in state.items():
        for ours, theirs in swaps:
            name = name.replace(ours, theirs)
        name = (
            name.replace("blocks.", "transformer.resblocks.")
            if name.startswith("blocks")
            else name.replace("norm.", "ln_post.", 1)
        )
        if name == "cls_token":
            name, tensor = "class_embedding", tensor[0, 0]
        elif name == "pos_embed":
            name, tensor = "positional_embedding", tensor[0]
        elif name == "head.weight":
            name, tensor = "proj", tensor.T
        if name != "head.bias":
            renamed[f"visual.{name}"] = tensor.contiguous()
    save_file(renamed, tmp_path / "clip.safetensors")
    peer.model.load_state_dict(checkpoint_filter_fn(dict(renamed), peer.model))  # the bias of this head is zero
    ours = open_model(tmp_path / "clip.safetensors", {"heads": 4})
    assert ours.config.head.bias is False
    batch = make_images(peers.IMAGE_SIZE)
    assert compute_difference(ours(batch), peer.logits(batch) if projected else peer.model(batch)) <= peers.ERROR_LIMIT
    assert open_weights(tmp_path / "clip.safetensors").unused == ["logit_scale", "text_projection"]


def test_original_sam_files_with_a_decoder_are_read(tmp_path):
    from timm.models.vision_transformer_sam import checkpoint_filter_fn

    peer = peers.make_timm_sam()
    renamed = {
        f"image_encoder.{name.replace('mlp.fc', 'mlp.lin')}": tensor for name, tensor in peer.model.state_dict().items()
    }
    renamed |= {
        "mask_decoder.iou_token.weight": torch.ones(1, 8),
        "prompt_encoder.no_mask_embed.weight": torch.ones(1, 8),
    }
    save_file(renamed, tmp_path / "sam.safetensors")
    peer.model.load_state_dict(checkpoint_filter_fn(renamed, peer.model))
    weights = open_weights(tmp_path / "sam.safetensors", peer.settings)
    assert len(weights.unused) == 2
    check_agreement(weights.build_bundle().model, peer)


def test_full_clip_and_sam_folders_are_read(tmp_path):
    text = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 40,
    }
    vision = peers.SMALL_CONFIG | {"intermediate_size": 96}
    clip = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=24))
    peers.randomise(clip).save_pretrained(tmp_path / "clip")
    ours = open_model(tmp_path / "clip")
    batch = make_images((48, 40))
    with torch.inference_mode():
        theirs = clip.visual_projection(clip.vision_model(batch, interpolate_pos_encoding=True).pooler_output)
        assert compute_difference(ours(batch), theirs) <= peers.ERROR_LIMIT
    vision = peers.make_transformers_sam().model.config
    decoder = {
        "hidden_size": 16,
        "mlp_dim": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "iou_head_hidden_dim": 16,
    }
    sam = transformers.SamModel(
        transformers.SamConfig(
            vision_config=vision,
            mask_decoder_config=decoder,
            prompt_encoder_config={"hidden_size": 16, "image_size": 64, "patch_size": 8},
        )
    )
    peers.randomise(sam).save_pretrained(tmp_path / "sam")
    ours = open_model(tmp_path / "sam")
    batch = make_images((64, 64))
    with torch.inference_mode():
        theirs = sam.vision_encoder(batch).last_hidden_state.flatten(2).transpose(1, 2)
        assert compute_difference(ours.features(batch), theirs) <= peers.ERROR_LIMIT


def test_timm_and_open_clip_folders_are_read(tmp_path):
    peer = make_timm_vit(**CLIP_OPTIONS, num_classes=7)
    (tmp_path / "timm").mkdir()
    peer.file(tmp_path / "timm").rename(tmp_path / "timm" / "model.safetensors")
    settings = {
        "architecture": "vit_base_patch32_clip_quickgelu_224",
        "num_classes": 7,
        "pretrained_cfg": {"input_size": [3, 32, 32]},
    }
    (tmp_path / "timm" / "config.json").write_text(json.dumps(settings))
    check_agreement(open_model(tmp_path / "timm", {"heads": 4}), peer)
    for quick in (True, False):
        clip = peers.make_transformers_clip(
            hidden_act="quick_gelu" if quick else "gelu", hidden_size=128, num_attention_heads=2
        )
        folder = tmp_path / f"open_clip_{quick}"
        folder.mkdir()
        model = open_model(clip.file(folder))
        foreign_tensors = others.CLIP.to_foreign_tensors(model.config, model.state_dict())
        clip_folder = tmp_path / f"open_clip_{quick}_original"
        clip_folder.mkdir()
        save_file(
            {f"visual.{name}": tensor.contiguous() for name, tensor in foreign_tensors.items()},
            clip_folder / "open_clip_model.safetensors",
        )
        tower = {"image_size": 32, "layers": 3, "width": 128, "patch_size": 8}
        described = {"model_cfg": {"embed_dim": 24, "vision_cfg": tower} | ({"quick_gelu": True} if quick else {})}
        (clip_folder / "open_clip_config.json").write_text(json.dumps(described))
        clip.sizes = clip.sizes[:1]  # at other sizes open_clip and transformers resize differently
        clip_model = open_model(clip_folder)
        check_agreement(clip_model, clip)
        assert clip_model.config.positions.resize == "bicubic-antialias"


def make_position_table(grid, width=6):
    return 0.2 * torch.randn(*grid, width, generator=torch.Generator().manual_seed(0))  # the scale of trained positions


GRID_PAIRS = [((4, 4), (6, 6)), ((6, 6), (4, 4)), ((4, 4), (7, 5)), ((14, 14), (24, 24)), ((7, 7), (3, 9))]


@pytest.mark.parametrize("old,new", GRID_PAIRS)
def test_the_resize_rule_matches_timm(old, new):
    from timm.layers import resample_abs_pos_embed

    source = make_position_table(old)
    theirs = resample_abs_pos_embed(source.flatten(0, 1)[None], list(new), list(old), num_prefix_tokens=0)
    assert (resize_position_table(source, new, "bicubic-antialias").flatten(0, 1) - theirs[0]).abs().max() <= 1e-6
    theirs = resample_abs_pos_embed(
        source.flatten(0, 1)[None], list(new), list(old), 0, interpolation="bilinear", antialias=False
    )
    assert (resize_position_table(source, new, "bilinear").flatten(0, 1) - theirs[0]).abs().max() <= 1e-6


@pytest.mark.parametrize(
    "peer_name,rule", [("vit", "bicubic"), ("mae", "bicubic"), ("deit", "bicubic"), ("clip", "bicubic")]
)
@pytest.mark.parametrize("new", [(6, 6), (7, 5), (3, 2)])
def test_the_resize_rules_match_transformers(peer_name, rule, new):
    peer = {
        "vit": peers.make_transformers_vit,
        "mae": peers.make_transformers_mae,
        "deit": peers.make_transformers_deit,
        "clip": peers.make_transformers_clip,
    }
    check_against_transformers(peer[peer_name]().model, rule, new)


@pytest.mark.parametrize("registers,rule", [(0, "bicubic"), (3, "bicubic-antialias")])
@pytest.mark.parametrize("new", [(6, 6), (7, 5), (3, 2)])
def test_the_resize_rule_matches_transformers_dinov2(registers, rule, new):
    check_against_transformers(peers.make_transformers_dinov2(registers).model, rule, new)


@torch.inference_mode()
def check_against_transformers(model, rule, new):
    embeddings = next(module for name, module in model.named_modules() if name.rpartition(".")[2] == "embeddings")
    position_embedding = getattr(embeddings, "position_embedding", None)
    positions = embeddings.position_embeddings if position_embedding is None else position_embedding.weight[None]
    count = positions.shape[1] - 16
    arriving = torch.zeros(1, count + new[0] * new[1], positions.shape[2])
    theirs = embeddings.interpolate_pos_encoding(arriving, new[0] * 8, new[1] * 8)
    ours = resize_position_table(positions[0, count:].unflatten(0, (4, 4)), new, rule).flatten(0, 1)
    assert (ours - theirs[0, count:]).abs().max() <= 1e-6


@pytest.mark.parametrize("old,new", GRID_PAIRS)
def test_the_resize_rule_of_dino_adds_a_tenth(old, new):
    source = make_position_table(old)
    scale = tuple((n + 0.1) / o for n, o in zip(new, old, strict=True))
    theirs = F.interpolate(source.permute(2, 0, 1)[None], scale_factor=scale, mode="bicubic", align_corners=False)[
        0
    ].permute(1, 2, 0)
    assert theirs.shape[:2] == new
    assert (resize_position_table(source, new, "bicubic-offset") - theirs).abs().max() <= 1e-6
    assert (resize_position_table(source, new, "bicubic") - theirs).abs().max() > 1e-3


@pytest.mark.parametrize("old,new", [*GRID_PAIRS, ((7, 7), (12, 12)), ((16, 16), (37, 37)), ((3, 3), (5, 5))])
def test_the_resize_rule_of_google_matches_scipy_zoom(old, new):
    from scipy.ndimage import zoom

    source = make_position_table(old)
    theirs = zoom(source.numpy(), (*(n / o for n, o in zip(new, old, strict=True)), 1), order=1)
    assert np.abs(resize_position_table(source, new, "zoom").numpy() - theirs).max() <= 1e-6


@pytest.mark.parametrize("old,new", [(28, 48), (28, 14), (8, 26), (24, 22), (32, 31), (28, 42), (14, 24)])
def test_scipy_zoom_loses_the_last_row_at_some_sizes(old, new):
    from scipy.ndimage import zoom

    source = make_position_table((old, old), 2)
    theirs = zoom(source.numpy(), (new / old, new / old, 1), order=1)
    assert np.abs(resize_position_table(source, (new, new), "zoom-scipy").numpy() - theirs).max() <= 1e-6
    lost = not theirs[-1].any() and not theirs[:, -1].any()
    assert lost is ((old, new) not in ((28, 42), (14, 24)))
    assert resize_position_table(source, (new, new), "zoom")[-1].all()


def test_zoom_matches_values_by_hand():
    small = torch.arange(4.0).reshape(2, 2, 1)
    assert resize_position_table(small, (3, 3), "zoom")[..., 0].tolist() == [[0, 0.5, 1], [1, 1.5, 2], [2, 2.5, 3]]
    assert torch.allclose(
        resize_position_table(small, (4, 4), "zoom")[0, :, 0], torch.tensor([0, 1 / 3, 2 / 3, 1]), atol=1e-6
    )
    line = torch.arange(14.0)[:, None]
    expected = torch.tensor([0, 0.56521739, 1.13043478, 1.69565217])
    assert torch.allclose(resize_position_table(line, (24,), "zoom")[:4, 0], expected, atol=1e-6)


def list_full_size_models():
    """Map names to functions that build models of published sizes, so that only one is in memory."""
    import timm

    def make_vit(name, sizes=((224, 224), (256, 192)), **options):
        return lambda: peers.make_timm_peer(
            timm.create_model(name, num_classes=1000, dynamic_img_size=True, **options), None, sizes=sizes
        )

    def make_bit():
        peer = peers.make_timm_peer(
            timm.create_model("resnetv2_50x1_bit", num_classes=1000), None, sizes=((224, 224), (192, 256))
        )
        peer.features = lambda x: peer.model.forward_features(x).flatten(2).transpose(1, 2)
        return peer

    def make_sam():
        peer = peers.make_timm_peer(
            timm.create_model("samvit_base_patch16", num_classes=0), None, sizes=((1024, 1024),)
        )
        peer.features, peer.logits = lambda x: peer.model.forward_features(x).flatten(2).transpose(1, 2), None
        return peer

    base_size = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
    sized = base_size | {"image_size": 224, "patch_size": 16}
    return {
        "timm ViT-S/16": make_vit("vit_small_patch16_224"),
        "timm ViT-B/16": make_vit("vit_base_patch16_224"),
        "timm ViT-L/16": make_vit("vit_large_patch16_224"),
        "timm R50+ViT-B/16": make_vit("vit_base_r50_s16_224"),
        "timm BiT-R50x1": make_bit,
        "timm DeiT-B distilled": make_vit("deit_base_distilled_patch16_224"),
        "timm SAM-B": make_sam,
        "transformers ViT-B/16": lambda: peers.make_transformers_vit(classes=1000, **sized),
        "transformers DINOv2-B with registers": lambda: peers.make_transformers_dinov2(
            registers=4,
            **{key: value for key, value in base_size.items() if key != "intermediate_size"},
            image_size=518,
            patch_size=14,
        ),
        "transformers CLIP-L/14": lambda: peers.make_transformers_clip(
            hidden_size=1024,
            num_hidden_layers=24,
            num_attention_heads=16,
            intermediate_size=4096,
            image_size=224,
            patch_size=14,
            projection_dim=768,
        ),
        "torchvision vit_b_16": lambda: peers.make_torchvision_vit(
            image_size=224, patch_size=16, num_layers=12, num_heads=12, hidden_dim=768, mlp_dim=3072, num_classes=1000
        ),
    }


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_models_of_published_sizes_match(tmp_path, capsys):
    """The number of heads is inferred from the published models.

    Float32 rounding in a ResNet-50 exceeds 1e-5, so hybrids and ResNets are also compared in float64.
    """
    for number, (name, make) in enumerate(list_full_size_models().items()):
        peer = make()
        folder = tmp_path / str(number)
        folder.mkdir()
        if name.startswith("transformers"):
            peer.sizes = ((224, 224), (252, 196)) if "14" in name or "DINO" in name else ((224, 224), (256, 192))
        ours = open_model(peer.file(folder), peer.settings)
        for path in sorted(folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        with capsys.disabled():
            is_deep = "R50" in name
            print(f"\n{name}: {check_agreement(ours, peer, 5e-5 if is_deep else peers.ERROR_LIMIT):.1e}", end="")
            if is_deep:
                ours, peer.model = ours.double(), peer.model.double()
                print(f", in float64 {check_agreement(ours, peer, 1e-8):.1e}", end="")
        del peer, ours


def test_the_resize_rule_matches_torchvision():
    from torchvision.models.vision_transformer import interpolate_embeddings

    model = peers.make_torchvision_vit().model
    state = interpolate_embeddings(48, 8, model.state_dict())
    positions = model.encoder.pos_embedding.detach()[0, 1:]
    side = round(len(positions) ** 0.5)
    ours = resize_position_table(positions.unflatten(0, (side, side)), (6, 6), "bicubic-aligned").flatten(0, 1)
    assert (ours - state["encoder.pos_embedding"][0, 1:]).abs().max() <= 1e-6
