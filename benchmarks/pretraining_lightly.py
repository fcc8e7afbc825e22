"""Pre-training with lightly-train, called by benchmarks/pretraining.py in an environment with lightly-train and
vitreous (`pip install lightly-train -e .`).

    python benchmarks/pretraining_lightly.py IMAGES OUT --method dino --model Conv+ViT-128x4/8 --minutes 30

The backbone is our model at 32 pixels with mean pooling, passed to the library as a custom model. Options are the
library's defaults except the views: 32 pixels, and four local views of 16, with its default crops and colours.

The epochs follow from --minutes and the rate of a short run, which should run alone on the machine: --measure only
measures it; OUT/rate.json stores it. OUT/encoder is the backbone as a bundle; OUT/metadata.json has the images/s,
epochs and images.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import lightly_train
import torch
from torch import Tensor, nn

from vitreous.models.names import vit_config_from_name
from vitreous.models.zoo import build_model
from vitreous.weights.bundle import save

NORMALISATION = [0.5, 0.5, 0.5]


class VitreousBackbone(nn.Module):
    """Our encoder with the methods that lightly-train requires."""

    def __init__(self, name: str) -> None:
        super().__init__()
        config = vit_config_from_name(name, 32).with_options(
            classes=0, class_token=False, pool="mean", head={"representation": None}
        )
        self.model = build_model(config)
        self.model.any_size = True  # local views are smaller

    def feature_dim(self) -> int:
        """Width of a token."""
        return self.model.config.width

    def forward_features(self, x: Tensor) -> dict[str, Tensor]:
        """(B, 3, H, W) -> {"features": (B, D, h, w)}: the tokens after the last norm."""
        tokens, patch = self.model.features(x), self.model.config.patch
        return {"features": tokens.mT.unflatten(-1, (x.shape[2] // patch[0], x.shape[3] // patch[1]))}

    def forward_pool(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
        """Mean of the tokens: {"pooled_features": (B, D, 1, 1)}."""
        return {"pooled_features": x["features"].mean((-2, -1), keepdim=True)}

    def get_model(self) -> nn.Module:
        """The module that lightly-train saves."""
        return self.model


def train_lightly(images: Path, out: Path, method: str, model: nn.Module, batch: int, **length: Any) -> float:
    """Train with the library's defaults; returns the seconds."""
    views: dict[str, Any] = {"image_size": (32, 32), "normalize": {"mean": NORMALISATION, "std": NORMALISATION}}
    if method == "dino":
        views["local_view"] = {"view_size": (16, 16), "num_views": 4}
    method_option = {} if method == "default" else {"method": method}
    started = time.perf_counter()
    lightly_train.pretrain(
        out=out,
        data=images,
        model=model,
        batch_size=batch,
        transform_args=views,
        accelerator="cpu",
        overwrite=True,
        **method_option,
        **length,
    )
    return time.perf_counter() - started


def main() -> None:
    """Measure the rate, train, and save the encoder and its metadata."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--method", default="dino", help="method of lightly-train, or `default`")
    parser.add_argument("--model", default="Conv+ViT-128x4/8")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--measured", type=int, default=30, help="steps of the run that measures images/s")
    parser.add_argument("--measure", action="store_true", help="only measure images/s")
    args = parser.parse_args()
    count, rate_file = sum(path.is_file() for path in args.images.rglob("*")), args.out / "rate.json"
    if not rate_file.is_file():
        args.out.mkdir(parents=True, exist_ok=True)
        rate_file.write_text(json.dumps({"images_per_second": measure_rate(args, count)}))
    if args.measure:
        return
    rate = json.loads(rate_file.read_text())["images_per_second"]
    epochs = max(1, round(rate * 60 * args.minutes / count))
    backbone = VitreousBackbone(args.model)
    train_lightly(args.images, args.out / "lightly", args.method, backbone, args.batch, epochs=epochs)
    trained = args.out / "lightly" / "exported_models" / "exported_last.pt"
    backbone.model.load_state_dict(torch.load(trained, weights_only=True))
    save(backbone.model, args.out / "encoder")
    metadata = {"images_per_second": rate, "epochs": epochs, "images": epochs * count}
    (args.out / "metadata.json").write_text(json.dumps(metadata))


def measure_rate(args: argparse.Namespace, count: int) -> float:
    """Images/s of the library's training steps: the difference of two short runs, which excludes start-up."""
    seconds = []
    for steps in (args.measured // 3, args.measured):
        length = {"epochs": 1, "trainer_args": {"limit_train_batches": steps}}
        backbone = VitreousBackbone(args.model)
        seconds.append(train_lightly(args.images, args.out / "measured", args.method, backbone, args.batch, **length))
    if count < args.measured * args.batch or seconds[1] <= seconds[0]:
        raise SystemExit(
            f"{args.measured} steps of {args.batch} images are not enough to measure the rate with {count} images"
        )
    return (args.measured - args.measured // 3) * args.batch / (seconds[1] - seconds[0])


if __name__ == "__main__":
    main()
