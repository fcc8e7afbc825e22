"""Figure 12 of arXiv:2010.11929: images a second and the largest batch against the size of images."""

from __future__ import annotations

from vitreous.apps.studies.measures import device_of, read_batches, read_speed
from vitreous.apps.studies.study import Cell, Chart, Measure, Place, Published, Reading, Setting, Study, Subject
from vitreous.recipes.options import TrainOptions

MODELS = {
    "small": ("BiT-R50x1", "ViT-S/32", "ViT-S/16"),
    "gpu": ("BiT-R50x1", "BiT-R152x2", "ViT-B/32", "ViT-B/16", "ViT-L/32"),
    "published": ("BiT-R50x1", "BiT-R50x2", "ViT-B/32", "ViT-L/32", "ViT-B/16", "ViT-L/16", "ViT-H/14", "BiT-R152x4"),
}
PROCESSOR, GPU = (64, 128, 224), (64, 128, 224, 384, 512)  # sides in pixels; of a GPU those of the paper
SECONDS = 20.0  # that a model is measured for on a processor, over all sizes; on a GPU three times as long


def cells(setting: Setting) -> tuple[Cell, ...]:
    """Models of several sizes, as they are drawn."""
    return tuple(Cell((name,), TrainOptions(model=name, image_size=224)) for name in MODELS[setting.scale.name])


def read_rates(subject: Subject) -> list[Reading]:
    """Images a second by the size of images."""
    alone = device_of(subject) == "cpu"
    return read_speed(subject, PROCESSOR if alone else GPU, SECONDS if alone else 3 * SECONDS)


def read_largest(subject: Subject) -> list[Reading]:
    """Images in the largest batch by the size of images."""
    return read_batches(subject, PROCESSOR if device_of(subject) == "cpu" else GPU)


def resnet(place: Place) -> Place:
    """The smallest ResNet at the size of a place."""
    return "BiT-R50x1", place[1]


SPEED = Study(
    "speed",
    "Speed against the size of images",
    question="Are ViTs as fast as ResNets, and from what size of images on do they fall behind?",
    source="arXiv:2010.11929, D.5 and Figure 12, left",
    axes=("model", "image size"),
    cells=cells,
    reference=resnet,
    published=Published(
        "Figure 12 has curves of the best batch on a TPUv3 core and no table: ViTs are about as fast as ResNets, and "
        "the square of the number of tokens only begins to show for the largest models on the largest images",
        {},
    ),
    differs=(
        "These are images a second of this machine, as a model infers in float32, the filters of a ResNet standardised "
        "once, of the fastest of the batches that there was time for; other work on the machine makes them fewer. "
        "Sizes that take longer than the time for a model are left out."
    ),
    chart=Chart("image size", "model", logarithmic=True, logarithmic_y=True),
    measure=Measure("fastest_rate", read_rates, trained=False),
)
BATCH = Study(
    "largest-batch",
    "Largest batch against the size of images",
    question="How many images does the memory hold at once, of ViTs and of ResNets?",
    source="arXiv:2010.11929, D.5 and Figure 12, right",
    axes=("model", "image size"),
    cells=cells,
    reference=resnet,
    published=Published(
        "Figure 12 has curves and no table: large ViTs need less memory than ResNets of their accuracy", {}
    ),
    differs=(
        "On a GPU batches of powers of two are tried until one does not fit. On a processor the tensors of passes of "
        "one image and of two are counted, and the figure is how many 80 % of the free memory would hold, at most "
        "4096: it moves with the memory that is free."
    ),
    chart=Chart("image size", "model", logarithmic=True, logarithmic_y=True),
    measure=Measure("largest_batch", read_largest, trained=False),
)
STUDIES = (SPEED, BATCH)
