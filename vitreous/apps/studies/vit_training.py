"""Studies of training a ViT (arXiv:2010.11929): regularisation, number of images, compute, optimisers, and image
size."""

from __future__ import annotations

from vitreous.apps.studies.frontier import conclude_crossings, conclude_frontiers
from vitreous.apps.studies.study import AxisValues, Chart, Published, Study, StudyCell, StudySetting, update_options
from vitreous.recipes.options import TrainOptions

# Figure 3 of arXiv:2010.11929: regularisation by dataset size.
REGULARISATION_SHARES = (10, 100)  # per cent of the training images
NO_REGULARISATION = {"weight_decay": 0.0, "dropout": 0.0, "label_smoothing": 0.0}
#: the three regularisers that the paper tunes for each dataset
REGULARISATION_KINDS = {
    "none": {},
    "weight decay": {"weight_decay": 0.1},
    "dropout": {"dropout": 0.1},
    "label smoothing": {"label_smoothing": 0.1},
    "all": {"weight_decay": 0.1, "dropout": 0.1, "label_smoothing": 0.1},
}


def regularisation_cells(setting: StudySetting) -> tuple[StudyCell, ...]:
    """Return one cell per regulariser (none, each, all) and fraction of the training images."""
    base = setting.options(TrainOptions(recipe="vit-imagenet", model="ViT-B/16"))
    return tuple(
        StudyCell((regulariser, f"{share} %"), update_options(base, **(NO_REGULARISATION | options)), share / 100)
        for share in REGULARISATION_SHARES
        for regulariser, options in REGULARISATION_KINDS.items()
    )


def unregularised_reference(axis_values: AxisValues) -> AxisValues:
    """Return the reference cell: the unregularised model on the same images."""
    return "none", axis_values[1]


REGULARISATION_STUDY = Study(
    "regularisation",
    "Regularisation by dataset size",
    question="Do small datasets need different regularisation than large ones: weight decay, dropout, label smoothing?",
    source="arXiv:2010.11929, section 4.3 and Figure 3",
    axes=("regulariser", "training images"),
    cells=regularisation_cells,
    reference=unregularised_reference,
    published=Published(
        "the paper tunes weight decay, dropout and label smoothing for ImageNet (weight decay 0.3 and dropout 0.1, "
        "Table 3), and reports no accuracy for each separately",
        {},
    ),
    differs=(
        "The paper tunes the three jointly for each dataset. Here each has one value and is applied separately. "
        "Augmentation and the rest of the recipe also regularise, and are the same in all rows."
    ),
)


# Figure 4 of arXiv:2010.11929: accuracy of ViT, BiT and a hybrid by number of training images.
IMAGES_SHARES = (1, 3, 10, 30, 100)  # per cent
IMAGES_MODELS = {"ViT": "ViT-B/32", "BiT": "BiT-R50x1", "hybrid": "R50+ViT-B/32"}


def make_model_options(family: str, setting: StudySetting) -> TrainOptions:
    """Return the training options of a model family (ViT, BiT or hybrid) at the study's scale."""
    if setting.scale.name == "published":
        recipe = "bit-jft-adam" if family == "BiT" else "vit-jft"
        return setting.options(TrainOptions(recipe=recipe, model=IMAGES_MODELS[family]))
    base = setting.options(TrainOptions(), optimizer="adamw", lr=1e-3)
    if family == "ViT":
        return base
    if family == "BiT":
        return update_options(base, model="BiT-R50x1", settings={"model.blocks": "1 1", "model.width": "16"})
    return update_options(base, model=f"Conv+ViT-{setting.scale.width}x{setting.scale.depth}/8")


def image_cells(setting: StudySetting) -> tuple[StudyCell, ...]:
    """Return one cell per model family and fraction of the training images. A larger fraction contains a smaller
    one."""
    return tuple(
        StudyCell((family, f"{share} %"), make_model_options(family, setting), share=share / 100)
        for family in IMAGES_MODELS
        for share in IMAGES_SHARES
    )


def vit_reference(axis_values: AxisValues) -> AxisValues:
    """Return the reference cell: the ViT with the same fraction of the images."""
    return "ViT", axis_values[1]


IMAGES_STUDY = Study(
    "images",
    "Accuracy by number of training images",
    question="How many training images does a ViT need to outperform a ResNet?",
    source="arXiv:2010.11929, section 4.3 and Figure 4",
    axes=("model", "training images"),
    cells=image_cells,
    reference=vit_reference,
    published=Published(
        "Figure 4 has curves and no table: with 9 million images of JFT, ViT-B/32 is worse than R50x1; with 90 "
        "million or more, it is better",
        {},
    ),
    differs=(
        "The paper's subsets have 9 to 300 million images. Here they are shares of --data, some with a few images per "
        "class. All runs have the same number of steps, so small shares are seen for more epochs. The hybrid has a "
        "convolutional stem instead of a ResNet, and the models differ in compute."
    ),
    chart=Chart("training images", "model", logarithmic=True),
    conclude=conclude_crossings,
)


# Figure 5 and Table 6 of arXiv:2010.11929: accuracy of ViTs, ResNets and hybrids by training compute.
#: ImageNet accuracy after 7 epochs of JFT-300M, by family and model (Table 6)
COMPUTE_PUBLISHED = {
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


def compute_cells(setting: StudySetting) -> tuple[StudyCell, ...]:
    """Return one cell per family and model size."""
    if setting.scale.name == "published":
        recipes = {"ViT": "vit-jft", "hybrid": "vit-jft", "ResNet": "bit-jft-adam"}
        return tuple(
            StudyCell(axis_values, setting.options(TrainOptions(recipe=recipes[axis_values[0]], model=axis_values[1])))
            for axis_values in COMPUTE_PUBLISHED
        )
    base = setting.options(TrainOptions(), optimizer="adamw", lr=1e-3)
    width, depth = setting.scale.width, setting.scale.depth
    cells = [
        StudyCell(("ViT", size), update_options(base, model=setting.format_vit_name(w, d)))
        for size, w, d in list_vit_sizes(width, depth)
    ]
    cells += [
        StudyCell(("hybrid", size), update_options(base, model=f"Conv+ViT-{w}x{d}/8"))
        for size, w, d in list_vit_sizes(width, depth)
    ]
    for size, root_width in (("small", "8"), ("middle", "16"), ("large", "32")):
        settings = {"model.blocks": "1 1", "model.width": root_width}
        cells.append(StudyCell(("ResNet", size), update_options(base, model="BiT-R50x1", settings=settings)))
    return tuple(cells)


def list_vit_sizes(width: int, depth: int) -> tuple[tuple[str, int, int], ...]:
    """List three ViT sizes as (name, width, depth). Widths are multiples of 32, the width of a head."""
    half_width = max(32, width // 2 // 32 * 32)
    return ("small", half_width, max(1, depth // 2)), ("middle", width, depth), ("large", 2 * width, depth)


def smallest_vit_reference(axis_values: AxisValues) -> AxisValues:
    """Return the reference cell: the smallest ViT of the scale."""
    return "ViT", "small" if axis_values[1] in ("small", "middle", "large") else "ViT-B/32"


COMPUTE_STUDY = Study(
    "compute",
    "Accuracy by training compute",
    question="Which family is most accurate for its training compute: ViT, ResNet or hybrid?",
    source="arXiv:2010.11929, section 4.4, Figure 5 and Table 6",
    axes=("family", "model"),
    cells=compute_cells,
    reference=smallest_vit_reference,
    published=Published(
        "ImageNet accuracy after pre-training on JFT-300M for 7 epochs and fine-tuning (Table 6)", COMPUTE_PUBLISHED
    ),
    differs=(
        "The paper pre-trains and fine-tunes; here models are trained and evaluated on the same dataset. All models "
        "of a family share one learning rate, and hybrids have a convolutional stem instead of a ResNet."
    ),
    chart=Chart("exaflops", "family", logarithmic=True),
    conclude=conclude_frontiers,
)


# Table 7 of arXiv:2010.11929: SGD and Adam for ResNets.
OPTIMIZERS_MODELS = {"R50": "BiT-R50x1", "R152x2": "BiT-R152x2"}
#: at small scales: residual units per stage, and the width of the root block
OPTIMIZERS_SIZES = {"R50": ("1 1", "16"), "R152x2": ("2 2", "32")}
OPTIMIZER_OPTIONS = {"SGD": ("sgd", 0.1), "Adam": ("adamw", 1e-3)}
OPTIMIZERS_PUBLISHED = {
    ("R50", "Adam"): "77.54 %",
    ("R50", "SGD"): "78.24 %",
    ("R152x2", "Adam"): "84.97 %",
    ("R152x2", "SGD"): "84.37 %",
}


def optimizer_cells(setting: StudySetting) -> tuple[StudyCell, ...]:
    """Return one cell per ResNet and optimiser. At small scales, the ResNets have few residual units."""
    cells = []
    for model, name in OPTIMIZERS_MODELS.items():
        for optimizer, (optimizer_name, lr) in OPTIMIZER_OPTIONS.items():
            recipe = TrainOptions(recipe=f"bit-jft-{'adam' if optimizer_name == 'adamw' else 'sgd'}", model=name)
            options = setting.options(recipe)
            if setting.scale.name != "published":
                blocks, width = OPTIMIZERS_SIZES[model]
                sizes = {"model.blocks": blocks, "model.width": width}
                options = update_options(options, model=name, optimizer=optimizer_name, lr=lr, settings=sizes)
            cells.append(StudyCell((model, optimizer), options))
    return tuple(cells)


def sgd_reference(axis_values: AxisValues) -> AxisValues:
    """Return the reference cell: the same model with SGD."""
    return axis_values[0], "SGD"


OPTIMIZERS_STUDY = Study(
    "optimizers",
    "SGD and Adam for ResNets",
    question="Do ResNets train better with Adam than with SGD?",
    source="arXiv:2010.11929, D.1 and Table 7",
    axes=("model", "optimiser"),
    cells=optimizer_cells,
    reference=sgd_reference,
    published=Published(
        "ImageNet accuracy after pre-training on JFT-300M and fine-tuning (Table 7)", OPTIMIZERS_PUBLISHED
    ),
    differs=(
        "The paper pre-trains and fine-tunes; here models are trained and evaluated on the same dataset. At small "
        "scales, R50 and R152x2 are a small and a larger ResNet with two stages. Each optimiser has one untuned "
        "learning rate, so a difference may be due to the learning rates."
    ),
)


# Swin (arXiv:2103.14030) and ViT by image size.
RESOLUTION_SIDES = {"small": (16, 32), "gpu": (32, 64), "published": (224, 384)}
RESOLUTION_PATCH = 4  # patch size in pixels of ViT and Swin at small scales
RESOLUTION_PUBLISHED = {("Swin-B", "224"): "83.5 %", ("Swin-B", "384"): "84.5 %"}


def resolution_cells(setting: StudySetting) -> tuple[StudyCell, ...]:
    """Return one cell for ViT and for Swin at each image size."""
    cells = []
    for image_size in RESOLUTION_SIDES[setting.scale.name]:
        if setting.scale.name == "published":
            cells.append(
                StudyCell(
                    ("ViT-B", f"{image_size}"), TrainOptions(recipe="deit", model="ViT-B/16", image_size=image_size)
                )
            )
            cells.append(
                StudyCell(
                    ("Swin-B", f"{image_size}"), TrainOptions(recipe="swin", model="Swin-B/4", image_size=image_size)
                )
            )
            continue
        base = setting.options(TrainOptions(), image_size=image_size, optimizer="adamw", lr=1e-3)
        cells.append(
            StudyCell(
                ("ViT", f"{image_size}"), update_options(base, model=setting.format_vit_name(patch=RESOLUTION_PATCH))
            )
        )
        width = max(32, setting.scale.width // 2 // 32 * 32)
        sizes = {"model.width": f"{width}", "model.blocks": "2 2", "model.heads": f"{width // 32} {width // 16}"}
        sizes["model.attention.window"] = "4"
        cells.append(StudyCell(("Swin", f"{image_size}"), update_options(base, model="Swin-T/4", settings=sizes)))
    return tuple(cells)


def vit_at_size_reference(axis_values: AxisValues) -> AxisValues:
    """Return the reference cell: the ViT at the same image size."""
    return "ViT-B" if "-" in axis_values[0] else "ViT", axis_values[1]


RESOLUTION_STUDY = Study(
    "swin",
    "Swin and ViT by image size",
    question="Does a Swin Transformer outperform a plain ViT as images become larger?",
    source="arXiv:2103.14030, Table 1",
    axes=("model", "image size"),
    cells=resolution_cells,
    reference=vit_at_size_reference,
    published=Published(
        "ImageNet accuracy of Swin-B, fine-tuned from 224 to 384 pixels; DeiT-B has 81.8 % at 224", RESOLUTION_PUBLISHED
    ),
    differs=(
        "Small images are upscaled, which adds tokens but no detail. Both models have the same number of steps and "
        "the same patch size; the x axis is training compute. Swin has two stages of two blocks."
    ),
    chart=Chart("exaflops", "model", logarithmic=True),
)
