"""Pre-training by lightly-train, for benchmarks/pretraining.py; runs in an environment that has lightly-train and timm.

    python benchmarks/pretraining_lightly.py IMAGES OUT --method dino --model ViT-192x6/8 --minutes 30

The backbone is timm's ViT of that width, depth and patch, at 32 pixels, and the options are the library's own but
for the views: 32 pixels, and four local ones of 16, with its crops and colours. The epochs are
those of the minutes at the rate of a short run. OUT/weights has timm's weights and their config, OUT/told.json the
images a second, epochs and images.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from pathlib import Path
from typing import Any

import lightly_train
import timm
import torch
from safetensors.torch import save_file

NAME = "vit_tiny_patch16_224"  # timm's; its size is set below
HALF = [0.5, 0.5, 0.5]


def options(name: str, heads: int) -> dict[str, Any]:
    """timm's options of our ViT-WIDTHxDEPTH/PATCH at 32 pixels."""
    found = re.fullmatch(r"ViT-(\d+)x(\d+)/(\d+)", name)
    if not found:
        raise SystemExit(f"{name} is not ViT-WIDTHxDEPTH/PATCH")
    width, depth, patch = map(int, found.groups())
    return {"img_size": 32, "patch_size": patch, "embed_dim": width, "depth": depth, "num_heads": heads}


def train(images: Path, out: Path, method: str, model: torch.nn.Module, batch: int, **length: Any) -> float:
    """Train as the library chooses; the seconds that it took, without those before the first step."""
    views: dict[str, Any] = {"image_size": (32, 32), "normalize": {"mean": HALF, "std": HALF}}
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
    parser.add_argument("--model", default="ViT-192x6/8")
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--measured", type=int, default=30, help="steps of the short run")
    given = parser.parse_args()
    shape = options(given.model, given.heads)
    count = sum(path.is_file() for path in given.images.rglob("*"))
    seconds = []
    for steps in (given.measured // 3, given.measured):  # the difference leaves the start out
        model = timm.create_model(NAME, num_classes=0, dynamic_img_size=True, **shape)
        length = {"epochs": 1, "trainer_args": {"limit_train_batches": steps}}
        seconds.append(train(given.images, given.out / "measured", given.method, model, given.batch, **length))
    if count < given.measured * given.batch or seconds[1] <= seconds[0]:
        raise SystemExit(f"{given.measured} steps of {given.batch} images measure nothing of {count} images")
    rate = (given.measured - given.measured // 3) * given.batch / (seconds[1] - seconds[0])
    epochs = max(1, round(rate * 60 * given.minutes / count))
    model = timm.create_model(NAME, num_classes=0, dynamic_img_size=True, **shape)
    train(given.images, given.out / "lightly", given.method, model, given.batch, epochs=epochs)
    weights = torch.load(given.out / "lightly" / "exported_models" / "exported_last.pt", weights_only=True)
    place = given.out / "weights"
    place.mkdir(parents=True, exist_ok=True)
    save_file({name: value.contiguous() for name, value in weights.items()}, place / "model.safetensors")
    pixels = {"input_size": [3, 32, 32], "mean": HALF, "std": HALF, "crop_pct": 1.0, "interpolation": "bicubic"}
    config = {"architecture": NAME, "num_classes": 0, "model_args": shape, "pretrained_cfg": pixels}
    (place / "config.json").write_text(json.dumps(config))
    told = {"images_per_second": rate, "epochs": epochs, "images": epochs * count}
    (given.out / "told.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
