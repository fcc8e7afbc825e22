"""Figure 5 and Table 6 of arXiv:2010.11929: accuracy against the compute of training, of ViTs, ResNets and hybrids."""

from __future__ import annotations

from vitreous.apps.studies.frontier import conclude_frontiers
from vitreous.apps.studies.study import Cell, Chart, Place, Published, Setting, Study, change
from vitreous.recipes.options import TrainOptions

#: ImageNet accuracy after 7 epochs of JFT-300M, by family and model (Table 6)
PUBLISHED = {
    ("ViT", "ViT-B/32"): "80.73 %",
    ("ViT", "ViT-B/16"): "84.15 %",
    ("ViT", "ViT-L/32"): "84.37 %",
    ("ViT", "ViT-L/16"): "86.30 %",
    ("ResNet", "BiT-R50x1"): "77.54 %",
    ("ResNet", "BiT-R101x1"): "80.67 %",
    ("ResNet", "BiT-R152x1"): "81.88 %",
    ("hybrid", "R50+ViT-B/32"): "84.90 %",
    ("hybrid", "R50+ViT-B/16"): "85.58 %",
}


def cells(setting: Setting) -> tuple[Cell, ...]:
    """Models of several sizes of each family."""
    if setting.scale.name == "published":
        recipes = {"ViT": "vit-jft", "hybrid": "vit-jft", "ResNet": "bit-jft-adam"}
        return tuple(
            Cell(place, setting.options(TrainOptions(recipe=recipes[place[0]], model=place[1]))) for place in PUBLISHED
        )
    base = setting.options(TrainOptions(), optimizer="adamw", lr=1e-3)
    width, depth = setting.scale.width, setting.scale.depth
    rows = [Cell(("ViT", size), change(base, model=setting.vit(w, d))) for size, w, d in sizes_of(width, depth)]
    rows += [Cell(("hybrid", size), change(base, model=f"Conv+ViT-{w}x{d}/8")) for size, w, d in sizes_of(width, depth)]
    for size, root in (("small", "8"), ("middle", "16"), ("large", "32")):
        settings = {"model.blocks": "1 1", "model.width": root}
        rows.append(Cell(("ResNet", size), change(base, model="BiT-R50x1", settings=settings)))
    return tuple(rows)


def sizes_of(width: int, depth: int) -> tuple[tuple[str, int, int], ...]:
    """Three models around one: name, width, depth. A head has 32 channels."""
    half = max(32, width // 2 // 32 * 32)
    return ("small", half, max(1, depth // 2)), ("middle", width, depth), ("large", 2 * width, depth)


def smallest_vit(place: Place) -> Place:
    """The smallest ViT of the scale that a place is of."""
    return "ViT", "small" if place[1] in ("small", "middle", "large") else "ViT-B/32"


STUDY = Study(
    "compute",
    "Accuracy against compute",
    question="Which family is better for the compute of its training: ViT, ResNet or hybrid?",
    source="arXiv:2010.11929, section 4.4, Figure 5 and Table 6",
    axes=("family", "model"),
    cells=cells,
    reference=smallest_vit,
    published=Published(
        "ImageNet accuracy after pre-training on JFT-300M for 7 epochs and fine-tuning (Table 6)", PUBLISHED
    ),
    differs=(
        "The paper fine-tunes what it has pre-trained; here models are judged on what they are trained on. One "
        "learning rate serves all models of a family, and hybrids have a stem of convolutions for a ResNet."
    ),
    chart=Chart("exaflops", "family", logarithmic=True),
    conclude=conclude_frontiers,
)
