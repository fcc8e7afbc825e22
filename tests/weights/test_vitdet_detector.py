"""ViTDet detectors under detectron2's names: names and shapes of ViTDet-B, layer outputs, round trips."""

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from vitreous.data.modalities.base import IMAGENET_MOMENTS
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.errors import WeightsError
from vitreous.models.configs.detector import DetectorConfig
from vitreous.models.names import config_from_name
from vitreous.models.zoo import build_model, build_without_init
from vitreous.tasks.detection import Detection
from vitreous.weights.adopt import open_objective_state, open_weights
from vitreous.weights.bundle import Bundle
from vitreous.weights.convert import convert
from vitreous.weights.formats.vitdet_detector import DETECTOR

RPN_PREFIX, ROI_PREFIX = "proposal_generator.rpn_head", "roi_heads"


def get_layer_shapes(name, *shape, bias=True):
    """Return the shapes of a layer's weight and bias."""
    return {f"{name}.weight": shape} | ({f"{name}.bias": shape[:1]} if bias else {})


def get_conv_shapes(name, outputs, inputs, kernel):
    """Return the shapes of detectron2's `Conv2d` without bias and its LayerNorm."""
    return get_layer_shapes(name, outputs, inputs, kernel, kernel, bias=False) | get_layer_shapes(
        f"{name}.norm", outputs
    )


def get_transposed_conv_shapes(name, inputs, outputs):
    """Return the shapes of a 2 x 2 transposed convolution, whose weight has the inputs first."""
    return {f"{name}.weight": (inputs, outputs, 2, 2), f"{name}.bias": (outputs,)}


def get_backbone_shapes(width=768, depth=12, heads=12, patch=16, image=1024, window=14, global_blocks=(2, 5, 8, 11)):
    """Return the shapes of ViTDet's `ViT`, pre-trained at 224 pixels, or at 4 x 4 patches for small test models."""
    grid = 14 if image == 1024 else 4
    shapes = {"pos_embed": (1, grid**2 + 1, width)} | get_layer_shapes("patch_embed.proj", width, 3, patch, patch)
    for number in range(depth):
        block, side = f"blocks.{number}", image // patch if number in global_blocks else window
        shapes |= get_layer_shapes(f"{block}.norm1", width) | get_layer_shapes(f"{block}.norm2", width)
        shapes |= get_layer_shapes(f"{block}.attn.qkv", 3 * width, width) | get_layer_shapes(
            f"{block}.attn.proj", width, width
        )
        shapes |= {f"{block}.attn.rel_pos_{axis}": (2 * side - 1, width // heads) for axis in "hw"}
        shapes |= get_layer_shapes(f"{block}.mlp.fc1", 4 * width, width) | get_layer_shapes(
            f"{block}.mlp.fc2", width, 4 * width
        )
    return {f"backbone.net.{name}": shape for name, shape in shapes.items()}


def get_pyramid_shapes(width=768, out=256, first=2):
    """Return the shapes of `SimpleFeaturePyramid`."""
    half, quarter = width // 2, width // 4
    finest = f"backbone.simfp_{first}"
    shapes = (
        get_transposed_conv_shapes(f"{finest}.0", width, half)
        | get_layer_shapes(f"{finest}.1", half)
        | get_transposed_conv_shapes(f"{finest}.3", half, quarter)
    )
    shapes |= get_transposed_conv_shapes(f"backbone.simfp_{first + 1}.0", width, half)
    for number, (layer_index, inputs) in enumerate(((4, quarter), (1, half), (0, width), (1, width)), first):
        shapes |= get_conv_shapes(f"backbone.simfp_{number}.{layer_index}", out, inputs, 1)
        shapes |= get_conv_shapes(f"backbone.simfp_{number}.{layer_index + 1}", out, out, 3)
    return shapes


def get_head_shapes(classes=80, width=256, hidden=1024, agnostic=False, masks=True):
    """Return the shapes of `RPN` with two convolutions, the 4conv1fc box head with LayerNorm, and the mask head."""
    shapes = get_layer_shapes(f"{RPN_PREFIX}.conv.conv0", width, width, 3, 3) | get_layer_shapes(
        f"{RPN_PREFIX}.conv.conv1", width, width, 3, 3
    )
    shapes |= get_layer_shapes(f"{RPN_PREFIX}.objectness_logits", 3, width, 1, 1) | get_layer_shapes(
        f"{RPN_PREFIX}.anchor_deltas", 12, width, 1, 1
    )
    for number in range(1, 5):
        shapes |= get_conv_shapes(f"{ROI_PREFIX}.box_head.conv{number}", width, width, 3)
        shapes |= get_conv_shapes(f"{ROI_PREFIX}.mask_head.mask_fcn{number}", width, width, 3) if masks else {}
    shapes |= get_layer_shapes(f"{ROI_PREFIX}.box_head.fc1", hidden, 49 * width)
    shapes |= get_layer_shapes(f"{ROI_PREFIX}.box_predictor.cls_score", classes + 1, hidden)
    shapes |= get_layer_shapes(f"{ROI_PREFIX}.box_predictor.bbox_pred", 4 if agnostic else 4 * classes, hidden)
    if masks:
        shapes |= get_transposed_conv_shapes(f"{ROI_PREFIX}.mask_head.deconv", width, width)
        shapes |= get_layer_shapes(f"{ROI_PREFIX}.mask_head.predictor", classes, width, 1, 1)
    return shapes


SMALL_BACKBONE = {"width": 32, "depth": 3, "heads": 2, "image": 96, "window": 4, "global_blocks": (1,)}


def make_small_state(classes=5, **changes):
    """Return the state of a random detector with 32 channels, in detectron2's layout."""
    shapes = (
        get_backbone_shapes(**SMALL_BACKBONE) | get_pyramid_shapes(32, 16) | get_head_shapes(classes, 16, 24, **changes)
    )
    draw = torch.Generator().manual_seed(3)
    return {name: 0.2 * torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def save_tensors(state, folder, name="model_final.safetensors"):
    """Save tensors as a file."""
    folder.mkdir(exist_ok=True)
    save_file(state, folder / name)
    return folder / name


def list_differing_tensors(first_state, second_state):
    """Return the names of tensors that differ between two states.

    The unused position of the class token is not compared.
    """
    assert first_state.keys() == second_state.keys()
    return [
        name for name in first_state
        if not torch.equal(*(tensor[name][:, 1:] if name.endswith("pos_embed") else tensor[name] for tensor in (first_state, second_state)))
    ]  # fmt: skip


def test_vitdet_b_has_the_names_and_shapes_of_detectron2():
    shapes = get_backbone_shapes() | get_pyramid_shapes() | get_head_shapes()
    assert len(shapes) == (3 + 12 * 14) + (12 + 8 + 6 + 6) + 8 + (12 + 2 + 4) + (12 + 2 + 2)
    config = DETECTOR.configure(shapes, {})
    expected = DetectorConfig(
        backbone=config_from_name("ViTDet-B/16", 1024), classes=80, masks=True, round_anchors=False
    )
    assert config.structure() == expected.structure() and not config.round_anchors
    written = DETECTOR.to_file(config, build_without_init(config).state_dict())
    assert {name: tuple(tensor.shape) for name, tensor in written.items()} == shapes
    theirs = {name: torch.empty(shape).normal_() for name, shape in shapes.items()}
    theirs["backbone.net.pos_embed"][:, 0] = 0
    converted = DETECTOR.to_file(
        config, DETECTOR.to_native_tensors(config, list(build_without_init(config).state_dict()), theirs)
    )
    assert all(torch.equal(converted[name], tensor) for name, tensor in theirs.items())


def compute_reference(state, features):
    """Compute the outputs of detectron2's modules from a feature map (B, D, h, w).

    Returns the levels p2 to p5, and objectness and box deltas of the anchors on p5. For regions (n, W, 7, 7) and
    (n, W, 14, 14), cut from the corner of p2, it returns class logits, box deltas and masks.
    """
    get = state.__getitem__

    def norm(x, name):
        return F.layer_norm(x.movedim(1, -1), x.shape[1:2], get(f"{name}.weight"), get(f"{name}.bias"), 1e-6).movedim(
            -1, 1
        )

    def conv(x, name):
        return norm(F.conv2d(x, get(f"{name}.weight"), padding=get(f"{name}.weight").shape[-1] // 2), f"{name}.norm")

    def up(x, name):
        return F.conv_transpose2d(x, get(f"{name}.weight"), get(f"{name}.bias"), 2)

    def linear(x, name):
        return F.linear(x, get(f"{name}.weight").flatten(1), get(f"{name}.bias"))

    finest = up(F.gelu(norm(up(features, "backbone.simfp_2.0"), "backbone.simfp_2.1")), "backbone.simfp_2.3")
    starts = ((finest, 4), (up(features, "backbone.simfp_3.0"), 1), (features, 0), (F.max_pool2d(features, 2), 1))
    levels = [
        conv(conv(x, f"backbone.simfp_{number}.{layer_index}"), f"backbone.simfp_{number}.{layer_index + 1}")
        for number, (x, layer_index) in enumerate(starts, 2)
    ]
    hidden = levels[3]
    for number in range(2):
        name = f"{RPN_PREFIX}.conv.conv{number}"
        hidden = F.relu(F.conv2d(hidden, get(f"{name}.weight"), get(f"{name}.bias"), padding=1))
    anchors = [
        F.conv2d(hidden, get(f"{RPN_PREFIX}.{name}.weight"), get(f"{RPN_PREFIX}.{name}.bias"))
        for name in ("objectness_logits", "anchor_deltas")
    ]
    box, mask = levels[0][..., :7, :7], levels[0][..., :14, :14]
    for number in range(1, 5):
        box = F.relu(conv(box, f"{ROI_PREFIX}.box_head.conv{number}"))
        mask = F.relu(conv(mask, f"{ROI_PREFIX}.mask_head.mask_fcn{number}"))
    vector = F.relu(linear(box.flatten(1), f"{ROI_PREFIX}.box_head.fc1"))
    boxes = [linear(vector, f"{ROI_PREFIX}.box_predictor.{name}") for name in ("cls_score", "bbox_pred")]
    mask = F.relu(up(mask, f"{ROI_PREFIX}.mask_head.deconv"))
    masks = F.conv2d(
        mask, get(f"{ROI_PREFIX}.mask_head.predictor.weight"), get(f"{ROI_PREFIX}.mask_head.predictor.bias")
    )
    return levels, anchors, boxes, masks


@pytest.mark.parametrize("agnostic", [False, True])
def test_head_outputs_match_detectron2(agnostic, tmp_path):
    state = make_small_state(agnostic=agnostic)
    model = open_weights(save_tensors(state, tmp_path)).build_bundle().model
    features = torch.randn(2, 6, 6, 32, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        levels, anchors, (logits, corrections), masks = compute_reference(state, features.movedim(-1, 1))
        ours = model.pyramid([features])
        for level, expected in zip(ours, [*levels, levels[-1][..., ::2, ::2]], strict=True):
            assert torch.allclose(level, expected, atol=1e-5)
        for rows, expected in zip(model.proposals.head([levels[3]]), anchors, strict=True):
            assert torch.allclose(rows[0], expected, atol=1e-5)
        class_logits, box_deltas = model.regions.box(levels[0][..., :7, :7])
        assert torch.allclose(class_logits, torch.cat([logits[:, -1:], logits[:, :-1]], 1), atol=1e-5)
        assert torch.allclose(box_deltas if agnostic else box_deltas[:, 4:], corrections, atol=1e-5)
        assert torch.allclose(model.regions.mask(levels[0][..., :14, :14]), masks, atol=1e-5)


def test_anchors_match_detectron2(tmp_path):
    model = open_weights(save_tensors(make_small_state(), tmp_path)).build_bundle().model
    rows = model.proposals.make_anchors([torch.zeros(1, 16, 32 // 2**level, 32 // 2**level) for level in range(5)])
    for number, level_anchors in enumerate(rows):
        for ratio_index, ratio in enumerate((0.5, 1.0, 2.0)):
            width = ((8 * 4 * 2**number) ** 2 / ratio) ** 0.5
            sides = torch.tensor([-width, -ratio * width, width, ratio * width]) / 2
            assert torch.allclose(level_anchors[ratio_index], sides)
            assert torch.allclose(
                level_anchors[3 + ratio_index], sides + torch.tensor([4.0 * 2**number, 0, 4.0 * 2**number, 0])
            )


@pytest.mark.parametrize("options", [{}, {"classes": 1}, {"agnostic": True}, {"masks": False}])
def test_detectron2_files_survive_a_round_trip(options, tmp_path):
    state = make_small_state(**options)
    weights = open_weights(save_tensors(state, tmp_path))
    classes, masks = options.get("classes", 5), options.get("masks", True)
    assert weights.task == Detection(tuple(map(str, range(classes))), masks) and not weights.unused
    assert (
        weights.preprocess.mean,
        weights.preprocess.std,
    ) == IMAGENET_MOMENTS and weights.preprocess.filter == "bilinear"
    document = convert(tmp_path / "model_final.safetensors", tmp_path / "bundle")
    assert document["loaded"] == len(weights.read_state())
    objective_state = open_objective_state(tmp_path / "model_final.safetensors")
    assert objective_state and objective_state.config == {"name": "detection", "classes": list(weights.task.classes)}
    reloaded = convert(tmp_path / "bundle", tmp_path / "again", "vitdet")
    assert reloaded["tensors"] == len(state) and not reloaded["assumed_settings"]
    assert not list_differing_tensors(load_file(tmp_path / "again.safetensors"), state)
    outputs = open_weights(tmp_path / "again.safetensors").build_bundle().model(torch.zeros(1, 3, 96, 96))
    assert len(outputs) == 3 + masks and torch.isfinite(outputs[0]).all()


def test_trained_detectors_survive_a_round_trip(tmp_path):
    config = DETECTOR.configure({name: tuple(t.shape) for name, t in make_small_state(classes=1).items()}, {})
    changes = {"agnostic": True, "round_anchors": True, "threshold": 0.25, "detections": 7, "backbone": config.backbone}
    for agnostic in (False, True):
        detector_config = DetectorConfig(
            **{field: getattr(config, field) for field in ("classes", "masks", "width", "hidden")}
            | changes | {"agnostic": agnostic}
        )  # fmt: skip
        model, folder = build_model(detector_config), tmp_path / str(agnostic)
        bundle = save_bundle(model, folder / "bundle")
        document = convert(bundle, folder / "theirs", "vitdet")
        assert document["assumed_settings"] == ["round_anchors True -> False"]
        weights = open_weights(folder / "theirs.safetensors")
        assert weights.config == detector_config
        rows, state = weights.read_state(), model.state_dict()
        changed = [name for name in state if not torch.equal(rows[name], state[name])]
        # box deltas of the background class
        assert changed == ([] if agnostic else ["regions.box.predictor.bbox_pred.weight"])


def save_bundle(model, folder):
    """Save a detector as a bundle."""
    preprocess = ImagePreprocess((96, 96), channels=3, mean=IMAGENET_MOMENTS[0], std=IMAGENET_MOMENTS[1])
    Bundle(model, Detection(tuple("abcdefgh"[: model.config.classes]), model.config.masks), preprocess).save(folder)
    return folder


def test_missing_and_unknown_tensors_are_listed(tmp_path):
    state = make_small_state()
    for name in (f"{ROI_PREFIX}.box_predictor.cls_score.bias", "backbone.simfp_3.1.norm.weight"):
        del state[name]
    state |= {
        f"{ROI_PREFIX}.box_head.fc2.weight": torch.zeros(24, 24),
        f"{RPN_PREFIX}.anchor_deltas.bias": torch.zeros(8),
    }
    with pytest.raises(WeightsError) as error:
        open_weights(save_tensors(state, tmp_path))
    for line in (
        "missing roi_heads.box_predictor.cls_score.bias", "missing backbone.simfp_3.1.norm.weight",
        "unknown roi_heads.box_head.fc2.weight", "rpn_head.anchor_deltas.bias has shape (8,), not (12,)",
    ):  # fmt: skip
        assert line in error.value.message
    del state[f"{ROI_PREFIX}.box_predictor.cls_score.weight"]
    with pytest.raises(WeightsError, match="lacks 'roi_heads"):
        open_weights(save_tensors(state, tmp_path))


def test_pixel_statistics_of_early_files_are_checked(tmp_path):
    pixels = [255 * torch.tensor(values).reshape(3, 1, 1) for values in IMAGENET_MOMENTS]
    names = ("pixel_mean", "pixel_std")
    weights = open_weights(save_tensors(make_small_state() | dict(zip(names, pixels, strict=True)), tmp_path))
    assert sorted(weights.unused) == list(names)
    bgr_order = pixels[0].flip(0).contiguous()
    with pytest.raises(
        WeightsError, match=r"its pixel_mean is 103.53, 116.28, 123.675 \(BGR\), not 123.675, 116.28, 103.53 \(RGB"
    ):
        open_weights(save_tensors(make_small_state() | {"pixel_mean": bgr_order}, tmp_path))
    with pytest.raises(WeightsError, match=r"its pixel_std is 1, 1, 1, not 58.395, 57.12, 57.375 \(RGB, 0 to 255\)"):
        open_weights(
            save_tensors(make_small_state() | {"pixel_mean": pixels[0], "pixel_std": torch.ones(3, 1, 1)}, tmp_path)
        )


def test_class_weights_identify_lvis_detectors(tmp_path):
    state = make_small_state() | {f"{ROI_PREFIX}.box_predictor.fed_loss_cls_weights": torch.arange(5.0)}
    weights = open_weights(save_tensors(state, tmp_path))
    config = weights.config
    assert (config.scores, config.detections, config.threshold) == ("sigmoid", 300, 0.02)
    assert weights.unused == [f"{ROI_PREFIX}.box_predictor.fed_loss_cls_weights"]
    convert(tmp_path / "model_final.safetensors", tmp_path / "again", "vitdet")
    reloaded = load_file(tmp_path / "again.safetensors")
    assert list_differing_tensors(reloaded, state) == weights.unused and (reloaded[weights.unused[0]] == 1).all()
    assert open_weights(tmp_path / "again.safetensors").config == config


def test_a_cascade_is_read_as_a_backbone(tmp_path):
    state = make_small_state()
    cascade = {
        name.replace("predictor.", "predictor.0.").replace("box_head.", "box_head.0."): t for name, t in state.items()
    }
    weights = open_weights(save_tensors(cascade, tmp_path))
    assert weights.config.recipe_family == "vit" and len(weights.unused) == len(state) - len(
        get_backbone_shapes(**SMALL_BACKBONE)
    )


def test_other_detectors_are_written_without_heads(tmp_path):
    config = DETECTOR.configure({name: tuple(t.shape) for name, t in make_small_state().items()}, {})
    light = DetectorConfig(backbone=config.backbone, classes=2, heads="light", width=16, hidden=24)
    folder = save_bundle(build_model(light), tmp_path / "light")
    notes = []
    convert(folder, tmp_path / "out", "vitdet", note=notes.append)
    assert any("only the backbone of" in text for text in notes)
    assert all(name.startswith("backbone.net.") for name in load_file(tmp_path / "out.safetensors"))
