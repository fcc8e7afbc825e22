"""Figure 13 of arXiv:2010.11929: attention along rows and columns in place of all patches."""

from __future__ import annotations

from vitreous.apps.studies.study import Cell, Chart, Published, Setting, Study, change
from vitreous.recipes.options import TrainOptions

MODELS = {"ViT": "ViT-B/{patch}", "Axial-ViT": "Axial-ViT-B/{patch}"}


def cells(setting: Setting) -> tuple[Cell, ...]:
    """Both kinds with larger and with smaller patches, without a class token, which has no place in a grid."""
    base = setting.options(TrainOptions(recipe="vit-jft"))
    rows = []
    for patch in (32, 16) if setting.scale.name == "published" else (setting.patch, max(1, setting.patch // 2)):
        for kind, name in MODELS.items():
            model = name.format(patch=patch)
            if setting.scale.name != "published":
                model = setting.vit(patch=patch)
            settings = {"model.axial": str(kind == "Axial-ViT").lower()}
            settings |= {"model.pool": "mean", "model.class-token": "false"}
            small = {} if setting.scale.name == "published" else {"objective.mimetic": "false"}
            rows.append(Cell((kind, f"{patch}"), change(base, model=model, settings=settings | small)))
    return tuple(rows)


STUDY = Study(
    "axial",
    "Axial attention",
    question="Is attention along rows and columns better than attention to all patches, for its compute?",
    source="arXiv:2010.11929, D.6 and Figure 13",
    axes=("model", "patch"),
    cells=cells,
    reference=lambda place: ("ViT", place[1]),
    published=Published(
        "Figure 13 has points and no table: from worst to best ViT-B/32, Axial-ViT-B/32, ViT-B/16, Axial-ViT-B/16", {}
    ),
    differs=(
        "An axial block has two MLPs, so that Axial-ViT has more compute and more parameters than the ViT beside it, "
        "as in the paper. The paper pre-trains on JFT-300M and judges by 5-shot accuracy on ImageNet."
    ),
    chart=Chart("exaflops", "model", logarithmic=True),
)
