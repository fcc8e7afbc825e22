"""Studies of inference throughput and of the largest batch by image size (arXiv:2010.11929, Figure 12)."""

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
CPU_IMAGE_SIZES, GPU_IMAGE_SIZES = ((64, 128, 224), (64, 128, 224, 384, 512))  # in pixels; on a GPU as in the paper
CPU_SECONDS_PER_MODEL = 20.0  # time limit per model over all image sizes on a CPU; three times as long otherwise


def speed_cells(setting: StudySetting) -> tuple[StudyCell, ...]:
    """Return one cell per model; the models are randomly initialised."""
    return tuple(
        StudyCell((name,), TrainOptions(model=name, image_size=224)) for name in SPEED_MODELS[setting.scale.name]
    )


def measure_throughput_by_size(subject: MeasuredRun) -> list[Measurement]:
    """Measure throughput (images/s) by image size."""
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
    """Return the reference cell: the smallest ResNet at the same image size."""
    return "BiT-R50x1", axis_values[1]


SPEED_STUDY = Study(
    "speed",
    "Inference throughput by image size",
    question="Are ViTs as fast as ResNets, and from which image size are they slower?",
    source="arXiv:2010.11929, D.5 and Figure 12, left",
    axes=("model", "image size"),
    cells=speed_cells,
    reference=resnet_reference,
    published=Published(
        "Figure 12 has curves of the best batch size on a TPUv3 core and no table: ViTs are about as fast as ResNets, "
        "and the quadratic cost of attention becomes visible only for the largest models on the largest images",
        {},
    ),
    differs=(
        "Inference images/s on this machine in float32, at the fastest batch size measured within the time limit. "
        "ResNet filters are standardised once. Other load on the machine lowers the values. Sizes that exceed the "
        "time limit of a model are skipped."
    ),
    chart=Chart("image size", "model", logarithmic=True, logarithmic_y=True),
    run_measure=Measure("fastest_rate", measure_throughput_by_size, needs_training=False),
)
LARGEST_BATCH_STUDY = Study(
    "largest-batch",
    "Largest batch by image size",
    question="How many images fit into memory for ViTs and ResNets?",
    source="arXiv:2010.11929, D.5 and Figure 12, right",
    axes=("model", "image size"),
    cells=speed_cells,
    reference=resnet_reference,
    published=Published(
        "Figure 12 has curves and no table: large ViTs need less memory than ResNets of similar accuracy", {}
    ),
    differs=(
        "On a GPU, batch sizes double until one does not fit. On a CPU, the memory per image is measured with one and "
        "two images, and the batch is the number of images that fit in 80 % of the free memory, at most 4096. The "
        "value depends on free memory."
    ),
    chart=Chart("image size", "model", logarithmic=True, logarithmic_y=True),
    run_measure=Measure("largest_batch", measure_largest_batch_by_size, needs_training=False),
)
STUDIES = (SPEED_STUDY, LARGEST_BATCH_STUDY)
