"""Figure 8 of arXiv:2010.11929: depth, width, MLP or patch of a ViT changed by itself, and all at once."""

from __future__ import annotations

from vitreous.apps.studies.study import Cell, Chart, Published, Setting, Study, change
from vitreous.recipes.options import TrainOptions


def cells(setting: Setting) -> tuple[Cell, ...]:
    """The model of the scale, and models of twice one of its sizes; patches are halved."""
    published = setting.scale.name == "published"
    width, depth, patch = (1024, 8, 32) if published else (setting.scale.width, setting.scale.depth, setting.patch)
    base = setting.options(TrainOptions(recipe="vit-jft"))

    def sized(wide: float, deep: float, cut: int, hidden: float) -> TrainOptions:
        model = f"ViT-{round(width * wide)}x{round(depth * deep)}/{max(1, patch // cut)}"
        return change(base, model=model, settings={"model.hidden": f"{round(2 * width * hidden)}"})

    shapes = {
        "base": sized(1, 1, 1, 1),
        "depth x2": sized(1, 2, 1, 1),
        "depth x4": sized(1, 4, 1, 1),
        "width x2": sized(2, 1, 1, 1),
        "MLP x2": sized(1, 1, 1, 2),
        "MLP x4": sized(1, 1, 1, 4),
        "patch /2": sized(1, 1, 2, 1),
        "all": sized(1.5, 1.5, 2, 1.5),
    }
    return tuple(Cell((name.split()[0], name), options) for name, options in shapes.items())


STUDY = Study(
    "shape",
    "Depth, width, MLP and patch",
    question="Which size of a ViT is worth its compute: depth, width, the MLP, or smaller patches?",
    source="arXiv:2010.11929, D.2 and Figure 8",
    axes=("changed", "model"),
    cells=cells,
    reference=("base", "base"),
    published=Published(
        "Figure 8 has curves and no table: depth gains most, up to 64 layers and less after 16; width gains least; "
        "smaller patches gain without a parameter more",
        {},
    ),
    differs=(
        "The paper starts from 8 layers of width 1024 with an MLP of 2048 on patches of 32, pre-trains on JFT-300M and "
        "judges by 5-shot accuracy. Sizes here begin smaller, and every run has the same number of steps: a larger "
        "model has more compute, which is the axis of the figure."
    ),
    chart=Chart("exaflops", "changed", logarithmic=True),
)
