"""Studies of the design of a ViT (arXiv:2010.11929): position embeddings, pooling, shape, axial attention, and masked
patch prediction."""

from __future__ import annotations

from vitreous.apps.studies.study import AxisValues, Chart, Published, Study, StudyCell, StudySetting, update_options
from vitreous.apps.studies.transfer import resolve_other_datasets
from vitreous.recipes.options import TrainOptions

# Table 8 of arXiv:2010.11929: type of position embedding, and where it is added.
#: row of the table -> settings of the model
POSITION_KINDS = {
    "none": {"model.positions.kind": "none"},
    "1-D": {"model.positions.kind": "learned"},
    "2-D": {"model.positions.kind": "axes"},
    "relative": {"model.positions.kind": "none", "model.attention.kind": "relative"},
}
#: column of the table -> where positions are added
POSITION_INSERTIONS = {"input": "input", "every layer": "each", "every layer, shared": "shared"}
INPUT_ONLY_POSITIONS = ("none", "relative")  # types that the table lists in one column only

POSITIONS_PUBLISHED = {
    ("none", "input"): "61.382 %",
    ("1-D", "input"): "64.206 %",
    ("1-D", "every layer"): "63.964 %",
    ("1-D", "every layer, shared"): "64.292 %",
    ("2-D", "input"): "64.001 %",
    ("2-D", "every layer"): "64.046 %",
    ("2-D", "every layer, shared"): "64.022 %",
    ("relative", "input"): "64.032 %",
}


def position_cells(setting: StudySetting) -> tuple[StudyCell, ...]:
    """Return one cell per type of position embedding and place where it is added, as in the table."""
    base = setting.options(TrainOptions(recipe="vit-jft", model="ViT-B/16"))
    cells = []
    for label, model_settings in POSITION_KINDS.items():
        for insertion, position_at in POSITION_INSERTIONS.items():
            if label in INPUT_ONLY_POSITIONS and insertion != "input":
                continue
            options = update_options(base, settings=model_settings | {"model.positions.at": position_at})
            cells.append(StudyCell((label, insertion), options))
    return tuple(cells)


POSITIONS_STUDY = Study(
    "positions",
    "Position embeddings",
    question="Does the type of position embedding matter, and where it is added?",
    source="arXiv:2010.11929, Table 8",
    axes=("positions", "added at"),
    cells=position_cells,
    reference=("1-D", "input"),
    published=Published("ImageNet 5-shot accuracy of ViT-B/16 pre-trained on JFT-300M (Table 8)", POSITIONS_PUBLISHED),
    differs=(
        "The paper pre-trains on JFT-300M and evaluates a linear 5-shot classifier on ImageNet. Here models are "
        "trained and evaluated on the classes of --data, and they are smaller. With few small patches, positions "
        "carry more information about an image, and are learned from fewer images."
    ),
)


# Figure 9 of arXiv:2010.11929: a class token or mean pooling, each at several learning rates.
POOLING_SETTINGS = {
    "class token": {"model.pool": "class", "model.class-token": "true"},
    "mean": {"model.pool": "mean", "model.class-token": "false"},
}
POOLING_RATES = {"small": ("3e-4", "1e-3", "3e-3"), "gpu": ("3e-4", "1e-3", "3e-3"), "published": ("3e-4", "8e-4")}


def pooling_cells(setting: StudySetting) -> tuple[StudyCell, ...]:
    """Return one cell per type of pooling and learning rate, with AdamW instead of the paper's Adam."""
    base = setting.options(TrainOptions(recipe="vit-jft", model="ViT-B/16"), optimizer="adamw")
    return tuple(
        StudyCell((pool, learning_rate), update_options(base, lr=float(learning_rate), settings=model_settings))
        for pool, model_settings in POOLING_SETTINGS.items()
        for learning_rate in POOLING_RATES[setting.scale.name]
    )


def class_token_reference(axis_values: AxisValues) -> AxisValues:
    """Return the reference cell: the class token at the same learning rate."""
    return "class token", axis_values[1]


POOLING_STUDY = Study(
    "pooling",
    "Class token or mean pooling",
    question="Does a ViT need a class token, or is mean pooling as good with a tuned learning rate?",
    source="arXiv:2010.11929, D.3 and Figure 9",
    axes=("pooling", "learning rate"),
    cells=pooling_cells,
    reference=class_token_reference,
    published=Published(
        "Figure 9 has curves and no table: the class token at 8e-4 and mean pooling at 3e-4 reach the same accuracy; "
        "mean pooling at 8e-4 is far below",
        {},
    ),
    differs=(
        "In the paper, the class token has an additional tanh layer before the head, mean pooling has none, and "
        "models are pre-trained on JFT-300M. Smaller models and batches use higher learning rates than the paper."
    ),
    chart=Chart("learning rate", "pooling", logarithmic=True),
)


# Figure 8 of arXiv:2010.11929: depth, width, MLP or patch size of a ViT changed separately and together.
def shape_cells(setting: StudySetting) -> tuple[StudyCell, ...]:
    """Return the cells: the base model, and models with a larger depth, width or MLP, or with smaller patches."""
    published = setting.scale.name == "published"
    width, depth, patch = (1024, 8, 32) if published else (setting.scale.width, setting.scale.depth, setting.patch)
    base = setting.options(TrainOptions(recipe="vit-jft"))

    def build_options(width_factor: float, depth_factor: float, patch_divisor: int, mlp_factor: float) -> TrainOptions:
        """Return the options of a model whose dimensions are multiples of the base model's."""
        model = f"ViT-{round(width * width_factor)}x{round(depth * depth_factor)}/{max(1, patch // patch_divisor)}"
        return update_options(base, model=model, settings={"model.mlp.hidden": f"{round(2 * width * mlp_factor)}"})

    shapes = {
        "base": build_options(1, 1, 1, 1),
        "depth x2": build_options(1, 2, 1, 1),
        "depth x4": build_options(1, 4, 1, 1),
        "width x2": build_options(2, 1, 1, 1),
        "MLP x2": build_options(1, 1, 1, 2),
        "MLP x4": build_options(1, 1, 1, 4),
        "patch /2": build_options(1, 1, 2, 1),
        "all": build_options(1.5, 1.5, 2, 1.5),
    }
    return tuple(StudyCell((name.split()[0], name), options) for name, options in shapes.items())


SHAPE_STUDY = Study(
    "shape",
    "Scaling depth, width, MLP and patch size",
    question="Which dimension of a ViT is the best use of compute: depth, width, MLP, or smaller patches?",
    source="arXiv:2010.11929, D.2 and Figure 8",
    axes=("changed", "model"),
    cells=shape_cells,
    reference=("base", "base"),
    published=Published(
        "Figure 8 has curves and no table: depth improves accuracy most, up to 64 layers with diminishing returns "
        "after 16; width improves it least; smaller patches improve it without additional parameters",
        {},
    ),
    differs=(
        "The paper starts from 8 layers of width 1024 with an MLP of 2048 on patches of 32, pre-trains on JFT-300M "
        "and evaluates 5-shot accuracy. Here the base model is smaller. Every run has the same number of steps, so "
        "larger models use more compute, which is the x axis of the figure."
    ),
    chart=Chart("exaflops", "changed", logarithmic=True),
)


# Figure 13 of arXiv:2010.11929: attention along rows and columns instead of all patches.
AXIAL_MODELS = {"ViT": "ViT-B/{patch}", "Axial-ViT": "Axial-ViT-B/{patch}"}


def axial_cells(setting: StudySetting) -> tuple[StudyCell, ...]:
    """Return one cell for ViT and for Axial-ViT with each of two patch sizes. They have no class token, which is not
    part of the grid."""
    base = setting.options(TrainOptions(recipe="vit-jft"))
    cells = []
    for patch in (32, 16) if setting.scale.name == "published" else (setting.patch, max(1, setting.patch // 2)):
        for family, name in AXIAL_MODELS.items():
            model = name.format(patch=patch)
            if setting.scale.name != "published":
                model = setting.format_vit_name(patch=patch)
            settings = {"model.axial": str(family == "Axial-ViT").lower()}
            settings |= {"model.pool": "mean", "model.class-token": "false"}
            small_scale_settings = {} if setting.scale.name == "published" else {"objective.mimetic": "false"}
            cells.append(
                StudyCell(
                    (family, f"{patch}"), update_options(base, model=model, settings=settings | small_scale_settings)
                )
            )
    return tuple(cells)


AXIAL_STUDY = Study(
    "axial",
    "Axial attention",
    question="Is axial attention (along rows and columns) better than global attention at the same compute?",
    source="arXiv:2010.11929, D.6 and Figure 13",
    axes=("model", "patch"),
    cells=axial_cells,
    reference=lambda axis_values: ("ViT", axis_values[1]),
    published=Published(
        "Figure 13 has points and no table: from worst to best ViT-B/32, Axial-ViT-B/32, ViT-B/16, Axial-ViT-B/16", {}
    ),
    differs=(
        "As in the paper, an axial block has two MLPs, so Axial-ViT has more compute and parameters than the ViT with "
        "the same patch size. The paper pre-trains on JFT-300M and evaluates 5-shot accuracy on ImageNet."
    ),
    chart=Chart("exaflops", "model", logarithmic=True),
)


# Masked patch prediction (arXiv:2010.11929, section 4.6 and B.1.2) compared with supervised and no pre-training.
PATCHES_PRETRAINING = {"none": "", "masked patches": "masked-patches", "labels": ""}
#: ImageNet accuracy of ViT-B/16; the paper prints the other two only as differences
PATCHES_PUBLISHED = {("masked patches", "ImageNet"): "79.9 %"}


def masked_patch_cells(setting: StudySetting) -> tuple[StudyCell, ...]:
    """Return one cell per pre-training method and target dataset. Methods pre-train on the study's data, and fine-tune
    with the recipe of the model from scratch."""
    published = setting.scale.name == "published"
    supervised_options = setting.options(TrainOptions(recipe="vit-jft", model="ViT-B/16"))
    masked_options = setting.options(TrainOptions(recipe="masked-patches", model="ViT-B/16"), recipe="masked-patches")
    pretraining_cells = {"masked patches": StudyCell((), masked_options), "labels": StudyCell((), supervised_options)}
    cells = []
    for dataset in resolve_other_datasets(setting):
        recipe = "vit-imagenet" if published else setting.recipe
        scratch = update_options(supervised_options, recipe=recipe)
        parent_options = {"recipe": "finetune-imagenet"} if published else {}
        for pretraining in PATCHES_PRETRAINING:
            prerequisites = {"init": pretraining_cells[pretraining]} if pretraining in pretraining_cells else {}
            cells.append(
                StudyCell(
                    (pretraining, dataset.name),
                    scratch,
                    parents=prerequisites,
                    parent_overrides=parent_options,
                    data=dataset.source,
                )
            )
    return tuple(cells)


def no_pretraining_reference(axis_values: AxisValues) -> AxisValues:
    """Return the reference cell: the model from scratch on the same dataset."""
    return "none", axis_values[1]


MASKED_PATCHES_STUDY = Study(
    "masked-patches",
    "Masked patch prediction and supervised pre-training",
    question="How does masked patch prediction compare with supervised pre-training?",
    source="arXiv:2010.11929, section 4.6 and B.1.2",
    axes=("pre-training", "dataset"),
    cells=masked_patch_cells,
    reference=no_pretraining_reference,
    published=Published(
        "ImageNet accuracy of ViT-B/16 after masked patch prediction on JFT-300M: 2 % above training from scratch, "
        "and 4 % below supervised pre-training",
        PATCHES_PUBLISHED,
    ),
    differs=(
        "The paper pre-trains for a million steps. Here pre-training and target datasets resemble each other, and "
        "images with few patches make prediction easy."
    ),
    other_data_kind="sets",
)
