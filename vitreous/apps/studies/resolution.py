"""Swin (arXiv:2103.14030) against ViT by the size of the images."""

from __future__ import annotations

from vitreous.apps.studies.study import Cell, Chart, Place, Published, Setting, Study, change
from vitreous.recipes.options import TrainOptions

SIDES = {"small": (16, 32), "gpu": (32, 64), "published": (224, 384)}
PATCH = 4  # of both at small scales, in pixels
PUBLISHED = {("Swin-B", "224"): "83.5 %", ("Swin-B", "384"): "84.5 %"}


def cells(setting: Setting) -> tuple[Cell, ...]:
    """Both at each size."""
    rows = []
    for side in SIDES[setting.scale.name]:
        if setting.scale.name == "published":
            rows.append(Cell(("ViT-B", f"{side}"), TrainOptions(recipe="deit", model="ViT-B/16", image_size=side)))
            rows.append(Cell(("Swin-B", f"{side}"), TrainOptions(recipe="swin", model="Swin-B/4", image_size=side)))
            continue
        base = setting.options(TrainOptions(), image_size=side, optimizer="adamw", lr=1e-3)
        rows.append(Cell(("ViT", f"{side}"), change(base, model=setting.vit(patch=PATCH))))
        root = max(32, setting.scale.width // 2 // 32 * 32)
        sizes = {"model.width": f"{root}", "model.blocks": "2 2", "model.heads": f"{root // 32} {root // 16}"}
        sizes["model.window"] = "4"
        rows.append(Cell(("Swin", f"{side}"), change(base, model="Swin-T/4", settings=sizes)))
    return tuple(rows)


def vit_at(place: Place) -> Place:
    """The ViT at the size of a place."""
    return "ViT-B" if "-" in place[0] else "ViT", place[1]


STUDY = Study(
    "swin",
    "Swin against ViT by the size of images",
    question="Is attention within windows, and tokens that merge, better than a plain ViT, as images grow?",
    source="arXiv:2103.14030, Table 1",
    axes=("model", "image size"),
    cells=cells,
    reference=vit_at,
    published=Published(
        "ImageNet accuracy of Swin-B, at 384 pixels fine-tuned from 224; DeiT-B has 81.8 % at 224", PUBLISHED
    ),
    differs=(
        "Small pictures are scaled up to the size, which brings tokens and no detail. Both have as many steps and "
        "patches of one size; the axis of the figure is the compute of training. Swin stands for two stages of two "
        "blocks."
    ),
    chart=Chart("exaflops", "model", logarithmic=True),
)
