"""Figure 12 of arXiv:2010.11929: images a second and the largest batch against the size of images."""

from __future__ import annotations

from vitreous.apps.studies.measures import measure_largest_batch, measure_throughput, pick_run_device
from vitreous.apps.studies.study import (
    AxisValues,
    Chart,
    Measure,
    MeasuredRun,
    Measurement,
    Published,
    Study,
    StudyCell,
    StudySetting,
)
from vitreous.recipes.options import TrainOptions

SPEED_MODELS = {
    "small": ("BiT-R50x1", "ViT-S/32", "ViT-S/16"),
    "gpu": ("BiT-R50x1", "BiT-R152x2", "ViT-B/32", "ViT-B/16", "ViT-L/32"),
    "published": ("BiT-R50x1", "BiT-R50x2", "ViT-B/32", "ViT-L/32", "ViT-B/16", "ViT-L/16", "ViT-H/14", "BiT-R152x4"),
}
CPU_IMAGE_SIZES, GPU_IMAGE_SIZES = (
    (64, 128, 224),
    (64, 128, 224, 384, 512),
)  # sides in pixels; of a GPU those of the paper
CPU_SECONDS_PER_MODEL = (
    20.0  # that a model is measured for on a processor, over all sizes; on a GPU three times as long
)


def speed_cells(setting: StudySetting) -> tuple[StudyCell, ...]:
    """Randomly initialised models of several sizes."""
    return tuple(
        StudyCell((name,), TrainOptions(model=name, image_size=224)) for name in SPEED_MODELS[setting.scale.name]
    )


def measure_throughput_by_size(subject: MeasuredRun) -> list[Measurement]:
    """Measure images/s by image size."""
    is_cpu = pick_run_device(subject) == "cpu"
    return measure_throughput(
        subject,
        CPU_IMAGE_SIZES if is_cpu else GPU_IMAGE_SIZES,
        CPU_SECONDS_PER_MODEL if is_cpu else 3 * CPU_SECONDS_PER_MODEL,
    )


def measure_largest_batch_by_size(subject: MeasuredRun) -> list[Measurement]:
    """Measure the largest batch by image size."""
    return measure_largest_batch(subject, CPU_IMAGE_SIZES if pick_run_device(subject) == "cpu" else GPU_IMAGE_SIZES)


def resnet_reference(axis_values: AxisValues) -> AxisValues:
    """The smallest ResNet at the size of a place."""
    return "BiT-R50x1", axis_values[1]


SPEED_STUDY = Study(
    "speed",
    "Speed against the size of images",
    question="Are ViTs as fast as ResNets, and from what size of images on do they fall behind?",
    source="arXiv:2010.11929, D.5 and Figure 12, left",
    axes=("model", "image size"),
    cells=speed_cells,
    reference=resnet_reference,
    published=Published(
        "Figure 12 has curves of the best batch on a TPUv3 core and no table: ViTs are about as fast as ResNets, and "
        "the square of the number of tokens only begins to show for the largest models on the largest images",
        {},
    ),
    differs=(
        "These are inference images/s on this machine in float32, with the filters of a ResNet standardised "
        "once, of the fastest of the batches that there was time for; other work on the machine makes them fewer. "
        "Sizes that take longer than the time for a model are left out."
    ),
    chart=Chart("image size", "model", logarithmic=True, logarithmic_y=True),
    measure=Measure("fastest_rate", measure_throughput_by_size, trained=False),
)
LARGEST_BATCH_STUDY = Study(
    "largest-batch",
    "Largest batch against the size of images",
    question="How many images fit into memory for ViTs and for ResNets?",
    source="arXiv:2010.11929, D.5 and Figure 12, right",
    axes=("model", "image size"),
    cells=speed_cells,
    reference=resnet_reference,
    published=Published(
        "Figure 12 has curves and no table: large ViTs need less memory than ResNets of their accuracy", {}
    ),
    differs=(
        "On a GPU batches of powers of two are tried until one does not fit. On a processor the tensors of passes of "
        "one image and of two are counted, and the figure is how many 80 % of the free memory would hold, at most "
        "4096: it moves with the memory that is free."
    ),
    chart=Chart("image size", "model", logarithmic=True, logarithmic_y=True),
    measure=Measure("largest_batch", measure_largest_batch_by_size, trained=False),
)
STUDIES = (SPEED_STUDY, LARGEST_BATCH_STUDY)
