"""Inference and training steps with the models of other libraries."""
# pyright: reportMissingImports=false

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitreous.apps.bench.work import BenchmarkStep, LogitsStep, Workload
from vitreous.models.config import ViTConfig
from vitreous.models.names import config_from_name, vit_config_from_name
from vitreous.system.cores import count_compute_threads
from vitreous.system.machine import DTYPES

NUM_CLASSES = 1000


def get_swin_options(workload: Workload) -> dict[str, Any]:
    """Return the shape of the workload's Swin V1 as keyword arguments that timm, transformers and torchvision share;
    empty for any other model."""
    config: Any = config_from_name(workload.model, workload.image_size)
    if config.recipe_family != "swin":
        return {}
    shape = {"patch_size": config.patch_size[0], "embed_dim": config.width, "window_size": config.attention.window}
    return {**shape, "depths": list(config.blocks), "num_heads": list(config.heads)}


def describe_vit_kind(config: ViTConfig, libraries: Sequence[str]) -> str:
    """Return the kind of ViT that other libraries build differently: `plain`, `dinov3` or `siglip`. Raises ValueError
    for other options, which a race would not compare fairly, and for a kind that is not in `libraries`."""
    kind = "plain"
    if config.attention.kind == "rotary" and config.rotary.coordinates == "centred":
        kind = "dinov3"
    elif config.pool == "attention" and not config.class_token and config.attention.kind == "plain":
        kind = "siglip"
    elif config.attention.kind != "plain" or config.pool != "class" or config.norm.kind != "layer":
        kind = config.name()
    if kind not in libraries:
        raise ValueError(f"this library has no {config.name()}")
    return kind


class EncoderWithHead(nn.Module):
    """An encoder of transformers with a linear classifier of its pooled output."""

    def __init__(self, encoder: nn.Module, width: int) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(width, NUM_CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Compute logits: (B, C, H, W) -> (B, K)."""
        return self.head(self.encoder(images).pooler_output)


def build_timm_model(workload: Workload) -> nn.Module:
    """Build timm's ViT, DINOv3, SigLIP or Swin with the shape of the workload's model. Raises ValueError for other
    models."""
    from timm.models.eva import Eva
    from timm.models.swin_transformer import SwinTransformer
    from timm.models.vision_transformer import VisionTransformer

    if swin := get_swin_options(workload):
        return SwinTransformer(workload.image_size, num_classes=NUM_CLASSES, drop_path_rate=0.0, **swin)
    config = vit_config_from_name(workload.model, workload.image_size)
    kind = describe_vit_kind(config, ("plain", "dinov3", "siglip"))
    shape: dict[str, Any] = {
        **{"img_size": workload.image_size, "patch_size": config.patch[0], "num_classes": NUM_CLASSES},
        **{"embed_dim": config.width, "depth": config.depth, "num_heads": config.heads},
        "mlp_ratio": config.mlp.hidden / config.width,
    }
    if kind == "dinov3":
        rotary = {"use_rot_pos_emb": True, "rope_type": "dinov3", "rope_rotate_half": True, "rope_temperature": 100.0}
        options = {"use_abs_pos_emb": False, "num_reg_tokens": 4, "init_values": 1e-5, "global_pool": "token"}
        return Eva(**shape, **rotary, **options, swiglu_mlp=config.mlp.kind == "swiglu")
    options = {"class_token": False, "global_pool": "map", "act_layer": "gelu_tanh"} if kind == "siglip" else {}
    return VisionTransformer(**shape, **options)


def build_transformers_model(workload: Workload) -> Any:
    """Build transformers' ViT, DINOv3, SigLIP or Swin with the shape of the workload's model. Raises ValueError for
    other models."""
    import transformers

    if swin := get_swin_options(workload):
        shape: dict[str, Any] = {
            **swin,
            "image_size": workload.image_size,
            "num_labels": NUM_CLASSES,
            "drop_path_rate": 0.0,
        }
        return transformers.SwinForImageClassification(transformers.SwinConfig(**shape))
    config = vit_config_from_name(workload.model, workload.image_size)
    kind = describe_vit_kind(config, ("plain", "dinov3", "siglip"))
    sizes = {"hidden_size": config.width, "num_hidden_layers": config.depth, "num_attention_heads": config.heads}
    shape = {"image_size": workload.image_size, "patch_size": config.patch[0], "intermediate_size": config.mlp.hidden}
    if kind == "dinov3":
        gated = {"use_gated_mlp": True, "hidden_act": "silu"} if config.mlp.kind == "swiglu" else {}
        dinov3_config = transformers.DINOv3ViTConfig(**sizes, **shape, **gated, num_register_tokens=4)
        return EncoderWithHead(transformers.DINOv3ViTModel(dinov3_config), config.width)
    if kind == "siglip":
        siglip_config = transformers.SiglipVisionConfig(**sizes, **shape)
        return EncoderWithHead(transformers.SiglipVisionModel(siglip_config), config.width)
    vit_options: dict[str, Any] = {**sizes, **shape, "num_labels": NUM_CLASSES}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**vit_options))


def build_torchvision_model(workload: Workload) -> nn.Module:
    """Build torchvision's ViT or Swin with the shape of the workload's model. Raises ValueError for other models."""
    from torchvision.models import SwinTransformer, VisionTransformer

    if swin := get_swin_options(workload):
        square_sizes = {name: [swin[name]] * 2 for name in ("patch_size", "window_size")}
        return SwinTransformer(**{**swin, **square_sizes}, stochastic_depth_prob=0.0, num_classes=NUM_CLASSES)
    config = vit_config_from_name(workload.model, workload.image_size)
    describe_vit_kind(config, ("plain",))
    return VisionTransformer(
        workload.image_size,
        config.patch[0],
        config.depth,
        config.heads,
        config.width,
        config.mlp.hidden,
        num_classes=NUM_CLASSES,
    )


MODEL_BUILDERS = {
    "timm": build_timm_model,
    "transformers": build_transformers_model,
    "torchvision": build_torchvision_model,
}


def make_normalised_batch(workload: Workload, seed: int = 0) -> Tensor:
    """Return (B, 3, size, size) random normalised images. Steps of other libraries do not include normalising uint8
    pixels, which steps of vitreous do."""
    size = (workload.batch_size, 3, workload.image_size, workload.image_size)
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(workload.device)


def build_inference_model(workload: Workload, peer: str = "timm") -> nn.Module:
    """Build another library's model for inference, with the same random weights in every call."""
    torch.manual_seed(0)
    return MODEL_BUILDERS[peer](workload).eval().requires_grad_(False)


@torch.inference_mode()
def compute_fp32_logits(workload: Workload, peer: str = "timm") -> np.ndarray:
    """Compute (B, K) float32 logits of another library's model for the workload's batch, with PyTorch on the CPU."""
    return extract_logits(build_inference_model(workload, peer)(make_normalised_batch(workload).cpu()))


def get_logits(output: Any) -> Tensor:
    """Return the logits (B, K) of a model's output, a tensor or an object with `logits`."""
    return getattr(output, "logits", output)


def extract_logits(output: Any) -> np.ndarray:
    """Return the logits of a model's output as (B, K) float32."""
    return get_logits(output).float().cpu().numpy()


def build_peer_inference_step(
    workload: Workload, peer: str, precision: str = "fp32", compiled: bool = False, mode: str | None = None
) -> BenchmarkStep:
    """Build a forward pass of another library's model in PyTorch. `compiled` uses inductor with frozen weights; `mode`
    is that of torch.compile."""
    model: Any = build_inference_model(workload, peer).to(workload.device, DTYPES[precision])
    images = make_normalised_batch(workload).to(DTYPES[precision])
    if compiled:
        import torch._inductor.config as inductor

        inductor.freezing = True
        model = torch.compile(model, mode=mode)

    @torch.inference_mode(not compiled)
    @torch.no_grad()
    def compute_outputs() -> Any:
        """Return the model's output for the batch."""
        return model(images)

    def run_step() -> float:
        """Compute the output for the batch; return the number of images."""
        compute_outputs()
        return workload.batch_size

    return LogitsStep(run_step, lambda: extract_logits(compute_outputs()), lambda: compute_fp32_logits(workload, peer))


def build_onnxruntime_step(workload: Workload, quantised: bool = False) -> BenchmarkStep:
    """Build a forward pass of timm's model with onnxruntime, in float32 or, if `quantised`, in dynamic int8 as in
    onnxruntime's documentation."""
    import onnxruntime as ort

    images = make_normalised_batch(workload)
    with tempfile.TemporaryDirectory() as scratch:
        file = os.path.join(scratch, "model.onnx")
        torch.onnx.export(
            build_inference_model(workload), (images,), file, dynamo=True, external_data=False, verbose=False
        )
        if quantised:
            from onnxruntime.quantization import quantize_dynamic
            from onnxruntime.quantization.shape_inference import quant_pre_process

            quant_pre_process(file, prepared := os.path.join(scratch, "prepared.onnx"))
            quantize_dynamic(prepared, file)
        options = ort.SessionOptions()
        if "OMP_NUM_THREADS" in os.environ:  # onnxruntime ignores the variable, PyTorch follows it
            options.intra_op_num_threads = count_compute_threads()
        session = ort.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    inputs = {session.get_inputs()[0].name: images.numpy()}

    def run_step() -> float:
        """Compute the logits of the batch; return the number of images."""
        session.run(None, inputs)
        return workload.batch_size

    return LogitsStep(run_step, lambda: np.asarray(session.run(None, inputs)[0]), lambda: compute_fp32_logits(workload))


def build_openvino_step(workload: Workload, precision: str) -> BenchmarkStep:
    """Build a forward pass of timm's model with OpenVINO in fp32, bf16 or int8. int8 is quantised by nncf, calibrated
    on other random images."""
    import openvino as ov

    from vitreous.inference.libraries import compile_openvino_graph

    images = make_normalised_batch(workload)
    graph = ov.convert_model(torch.export.export(build_inference_model(workload), (images,)))
    if precision == "int8":
        import nncf

        examples = nncf.Dataset(
            [make_normalised_batch(workload, 1 + seed).numpy() for seed in range(max(1, 32 // workload.batch_size))]
        )
        graph = nncf.quantize(graph, examples, model_type=nncf.ModelType.TRANSFORMER)
    hint = {"fp32": "f32", "bf16": "bf16", "int8": "f32"}[precision]
    compiled = compile_openvino_graph(graph, hint)

    def run_step() -> float:
        """Compute the logits of the batch; return the number of images."""
        compiled([images.numpy()])
        return workload.batch_size

    return LogitsStep(
        run_step, lambda: np.asarray(compiled([images.numpy()])[0]), lambda: compute_fp32_logits(workload)
    )


def build_peer_train_step(
    workload: Workload, peer: str, precision: str = "fp32", compiled: bool = False, mode: str | None = None
) -> BenchmarkStep:
    """Build a training step of another library's model: forward, backward, clipping, AdamW (fused for bf16). `mode` is
    that of torch.compile."""
    model = MODEL_BUILDERS[peer](workload).to(workload.device).train()
    images, labels = (
        make_normalised_batch(workload),
        torch.randint(0, NUM_CLASSES, (workload.batch_size,), device=workload.device),
    )
    use_bf16 = precision == "bf16"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05, fused=True if use_bf16 else None)
    forward = torch.compile(model, mode=mode) if compiled else model

    def run_step() -> float:
        """Run one training step; return the number of images."""
        with torch.autocast(workload.device.split(":")[0], torch.bfloat16) if use_bf16 else nullcontext():
            loss = F.cross_entropy(get_logits(forward(images)).float(), labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return workload.batch_size

    return run_step
