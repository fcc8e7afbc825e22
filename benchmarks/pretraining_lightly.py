"""Pre-training by lightly-train, for benchmarks/pretraining.py; runs in an environment that has lightly-train and
vitreous (`pip install lightly-train -e .`).

    python benchmarks/pretraining_lightly.py IMAGES OUT --method dino --model Conv+ViT-128x4/8 --minutes 30

The backbone is ours of that name at 32 pixels, with the mean of its tokens, given to the library as a model of the
user's own; the options are the library's but for the views: 32 pixels, and four local ones of 16, with its crops and
colours. The epochs are those of the minutes at the rate of a short run, to be measured alone on the machine: --measure
measures and stops, OUT/rate.json keeps it. OUT/encoder is the backbone as a bundle, OUT/told.json the images a second,
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
    """Our encoder with the methods that lightly-train asks of a model."""

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
        """What lightly-train saves."""
        return self.model


def train_lightly(images: Path, out: Path, method: str, model: nn.Module, batch: int, **length: Any) -> float:
    """Train as the library chooses; the seconds that it took, without those before the first step."""
    views: dict[str, Any] = {"image_size": (32, 32), "normalize": {"mean": NORMALISATION, "std": NORMALISATION}}
    if method == "dino":
        views["local_view"] = {"view_size": (16, 16), "num_views": 4}
    given = {} if method == "default" else {"method": method}
    started = time.perf_counter()
    lightly_train.pretrain(
        out=out,
        data=images,
        model=model,
        batch_size=batch,
        transform_args=views,
        accelerator="cpu",
        overwrite=True,
        **given,
        **length,
    )
    return time.perf_counter() - started


def main() -> None:
    """Measure, train, and save what vitreous reads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--method", default="dino", help="of lightly-train, or `default`")
    parser.add_argument("--model", default="Conv+ViT-128x4/8")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--measured", type=int, default=30, help="steps of the short run")
    parser.add_argument("--measure", action="store_true", help="measure the images a second alone")
    given = parser.parse_args()
    count, kept = sum(path.is_file() for path in given.images.rglob("*")), given.out / "rate.json"
    if not kept.is_file():
        given.out.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps({"images_per_second": measure_rate(given, count)}))
    if given.measure:
        return
    rate = json.loads(kept.read_text())["images_per_second"]
    epochs = max(1, round(rate * 60 * given.minutes / count))
    backbone = VitreousBackbone(given.model)
    train_lightly(given.images, given.out / "lightly", given.method, backbone, given.batch, epochs=epochs)
    trained = given.out / "lightly" / "exported_models" / "exported_last.pt"
    backbone.model.load_state_dict(torch.load(trained, weights_only=True))
    save(backbone.model, given.out / "encoder")
    told = {"images_per_second": rate, "epochs": epochs, "images": epochs * count}
    (given.out / "told.json").write_text(json.dumps(told))


def measure_rate(given: argparse.Namespace, count: int) -> float:
    """Images a second of the library's training steps: of a short run less a shorter one, which leaves the start
    out."""
    seconds = []
    for steps in (given.measured // 3, given.measured):
        length = {"epochs": 1, "trainer_args": {"limit_train_batches": steps}}
        backbone = VitreousBackbone(given.model)
        seconds.append(
            train_lightly(given.images, given.out / "measured", given.method, backbone, given.batch, **length)
        )
    if count < given.measured * given.batch or seconds[1] <= seconds[0]:
        raise SystemExit(f"{given.measured} steps of {given.batch} images measure nothing of {count} images")
    return (given.measured - given.measured // 3) * given.batch / (seconds[1] - seconds[0])


if __name__ == "__main__":
    main()
