"""What a user can say to `train`; what is left unsaid (None) is derived from the data, the model and the machine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from tyro.conf import Positional, Suppress, arg


@dataclass(frozen=True)
class TrainOptions:
    """Train a Vision Transformer, judge it, and save it.

    Example: vitreous train photos/ --model ViT-S/16 --epochs 100 --out runs/photos

    Every other value of the run can be set by its path, as config.yaml has it: --optimizer.betas 0.9 0.95
    """

    data: Annotated[Positional[str], arg(metavar="DATA")]
    """`digits`, a folder with train/, val/, test/ of CLASS/*, or a folder of CLASS/*."""
    model: str | None = None
    """ViT-B/16, R50+ViT-B/16, BiT-R50x1, vit_base_patch16_224, ViT-WIDTHxDEPTH/PATCH; `vitreous models` lists them."""
    init: str | None = None
    """Weights to start from: a run folder, a bundle, a file or folder of a known format, hf:org/name, timm:name."""
    out: str | None = None
    """The run folder to make (default: runs/DATE-MODEL-DATA)."""
    resume: bool = False
    """Continue the run in --out (default: runs/latest)."""
    config: str | None = None
    """A config.yaml to take every value from; options given beside it win."""
    dry_run: bool = False
    """Print the plan (model, memory, time) and train nothing."""
    image_size: int | None = None
    """Side of the model's input, pixels."""
    patch_size: int | None = None
    """Side of a patch, pixels."""
    epochs: float | None = None
    """Passes over the training images."""
    steps: int | None = None
    """Optimiser steps, instead of --epochs."""
    batch_size: int | None = None
    """Images of one forward pass, over all devices."""
    accumulate: int | None = None
    """Batches to an optimiser step."""
    optimizer: Literal["adamw", "sgd", "muon"] | None = None
    """Muon moves the matrices of the blocks, and AdamW the rest."""
    lr: Annotated[float | None, arg(aliases=["--learning-rate"])] = None
    """Peak learning rate."""
    weight_decay: float | None = None
    """Decoupled weight decay of matrices, multiplied by the learning rate."""
    warmup_steps: int | None = None
    """Steps of linear warm-up."""
    decay: Literal["cosine", "linear", "constant"] | None = None
    """Shape of the learning rate after the warm-up."""
    clip_grad: float | None = None
    """Largest norm of the gradient."""
    ema: float | None = None
    """Decay of the averaged weights, which are then judged and saved; 0 for none."""
    label_smoothing: float | None = None
    """Share of the target given to all classes alike."""
    drop_path: float | None = None
    """Stochastic depth of the last block."""
    dropout: float | None = None
    """Dropout, as the paper places it."""
    patch_dropout: float | None = None
    """Share of the patches left out in the first part of the training: faster, and a regulariser."""
    progressive: float | None = None
    """Side of the first pictures as a share of the model's; they grow to it: faster."""
    mixup: float | None = None
    """Alpha of MixUp; 0 for none."""
    cutmix: float | None = None
    """Alpha of CutMix; 0 for none."""
    rand_augment: int | None = None
    """Operations of RandAugment to a picture; 0 for none."""
    erase: float | None = None
    """Probability of random erasing."""
    bad_images: Literal["stop", "skip"] = "stop"
    """What to do about images that cannot be read."""
    workers: int | None = None
    """Processes that decode images."""
    seed: int | None = None
    """Seed of weights, order and augmentation."""
    split_seed: int | None = None
    """Seed of the split, where the data have none."""
    device: str | None = None
    """auto, cpu, cuda, cuda:1 or mps."""
    precision: Literal["auto", "fp32", "bf16"] | None = None
    """Numbers to compute with; weights are kept in fp32."""
    compile: bool | None = None
    """torch.compile the model."""
    shards: int | None = None
    """Parts of a batch computed side by side on a CPU (default: one a core, at most 8)."""
    log_every: int | None = None
    """Steps between two lines of metrics."""
    evaluate_every: int | None = None
    """Steps between two evaluations on the validation split."""
    save_every: int | None = None
    """Steps between two checkpoints."""
    keep: int | None = None
    """Checkpoints to keep."""
    settings: Suppress[dict[str, list[str]]] = field(default_factory=dict)
    """Anything else of the run, by its path: `--optimizer.betas 0.9 0.95`."""
