"""Types of the documents that the public functions return and `--json` prints.

A document contains the metrics of the model's task, or of its evaluation protocol; missing values are None. Values of
type `object` are documented where they are created.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NotRequired, TypeAlias, TypedDict

Row: TypeAlias = dict[str, str | int | float | None]


class Metrics(TypedDict):
    """Metrics of a split: the keys of `tasks.metrics.METRICS`, of which those of the model's task are set.

    `images` is the number of evaluated images and `unreadable` the number of images that could not be read. `interval`
    has the 95 % interval of each metric. `primary` is the key of the primary metric, `better` its direction.
    """

    top1: float | None
    balanced_accuracy: float | None
    map: float | None
    top5: float | None
    macro_f1: float | None
    micro_f1: float | None
    nll: float | None
    ece: float | None
    feature_std: float | None
    knn_top1: float | None
    knn_map: float | None
    rankme: float | None
    retrieval_r1: float | None
    image_to_text_r1: float | None
    image_to_text_r5: float | None
    image_to_text_r10: float | None
    text_to_image_r1: float | None
    text_to_image_r5: float | None
    text_to_image_r10: float | None
    miou: float | None
    dice: float | None
    pixel_accuracy: float | None
    boundary_f: float | None
    pq: float | None
    sq: float | None
    rq: float | None
    pq_things: float | None
    pq_stuff: float | None
    ap: float | None
    ap50: float | None
    ap75: float | None
    ap_small: float | None
    ap_medium: float | None
    ap_large: float | None
    ap_rare: float | None
    ap_common: float | None
    ap_frequent: float | None
    ar1: float | None
    ar10: float | None
    ar100: float | None
    ar_small: float | None
    ar_medium: float | None
    ar_large: float | None
    box_ap: float | None
    box_ap50: float | None
    box_ap75: float | None
    box_ap_small: float | None
    box_ap_medium: float | None
    box_ap_large: float | None
    box_ap_rare: float | None
    box_ap_common: float | None
    box_ap_frequent: float | None
    box_ar1: float | None
    box_ar10: float | None
    box_ar100: float | None
    box_ar_small: float | None
    box_ar_medium: float | None
    box_ar_large: float | None
    denoising_error: float | None
    frechet_distance: float | None
    r2: float | None
    mae: float | None
    rmse: float | None
    spearman: float | None
    images: int
    unreadable: int
    interval: dict[str, list[float] | None]
    primary: str
    better: Literal["higher", "lower"]


class RunSummary(TypedDict):
    """The result of `vitreous.train`: the content of the run's `summary.json`."""

    model: str
    parameters: int
    data: str
    steps: int
    epochs: float
    seed: int
    wall_seconds: float
    images_per_second: float
    exaflops: float
    flops_utilisation: float | None
    device_hours: float
    peak_memory_bytes: int | None
    skipped: int
    train: dict[str, float | None]
    val: Metrics | None
    test: Metrics | None
    selection: Mapping[str, object] | None
    lr_grid: NotRequired[Mapping[str, object]]
    run: str
    bundle: str


class EvaluationEntry(TypedDict):
    """An evaluation of a split: metrics and 95 % intervals by key. The first metric is the primary metric."""

    split: str
    protocol: str
    metrics: dict[str, float | None]
    interval: dict[str, list[float] | None]


class EvaluationDocument(TypedDict):
    """The result of `vitreous.evaluate`. The metrics are stored under the name of the evaluated split, and in
    `evaluations`.

    With an evaluation protocol the document also has `protocol` and `results`. Documents of comparisons and of
    generative models have other keys (docs/reference/documents.md).
    """

    model: str
    parameters: int
    data: str
    wall_seconds: float
    images_per_second: float
    train: Metrics | None
    val: Metrics | None
    test: Metrics | None
    run: str
    bundle: str
    split: str
    protocol: str
    results: list[Row]
    evaluations: list[EvaluationEntry]
    classes: list[str]
    targets: list[str]
    per_class: list[Row]
    confusion: list[list[int]] | None
    most_confused: Mapping[str, list[Row]] | None
    calibration: Mapping[str, object] | None
    trained_on: bool | None
    trained_on_images: int | None
    selected_on: object
    clip_views: NotRequired[str]
    abstain: object
    outliers: object
    suspects: object
    report: str | None


class FigureFiles(TypedDict):
    """A figure of `vitreous.inspect`: its texts, and the names of its files in the folder of the document."""

    name: str
    title: str
    caption: str
    png: str
    svg: str
    npz: str
    gif: NotRequired[str]
    csv: NotRequired[str]


class InspectionDocument(TypedDict):
    """The result of `vitreous.inspect`. `skipped` maps the names of unsupported figures to the reasons."""

    run: str
    model: str
    image_size: list[int]
    images: list[str]
    predictions: list[Mapping[str, object]]
    figures: list[FigureFiles]
    skipped: dict[str, str]
    out: str
    page: str
    wall_seconds: float


class Ingredient(TypedDict):
    """A model of a soup (the average of several models' weights): its score, the score of the soup with it, whether it
    was selected, and its weight in the average."""

    run: str
    sha256: str
    score: float | None
    score_with: float | None
    selected: bool
    weight: float


class InterpolationResult(TypedDict):
    """A value of `--alpha`, and the score of the interpolated model."""

    alpha: float
    score: float | None


class SoupDocument(TypedDict):
    """The result of `vitreous.soup`. The metrics are stored under the name of the evaluated split."""

    model: str
    parameters: int
    soup: Literal["greedy", "uniform", "interpolated"]
    data: str | None
    split: str | None
    train: NotRequired[Metrics | None]
    val: NotRequired[Metrics | None]
    ingredients: list[Ingredient]
    alphas: list[InterpolationResult]
    bundle: str


class SampleDocument(TypedDict):
    """The result of `vitreous.sample`. `size` is the image size, `sampler` the sampler's name and number of steps."""

    run: str
    files: list[str]
    classes: list[str]
    count: int
    size: str
    frames: int | None
    seeds: list[int]
    guidance: float
    sampler: tuple[str, int]
    precision: str
    seconds: float


class ExportedFile(TypedDict):
    """A file that `vitreous.export` wrote, and the comparison of its outputs with the model's on `images` images."""

    format: str
    file: str
    bytes: int
    images: int
    max_abs_logit_difference: float | None
    top1_agreement: float | None
    top1: dict[str, float] | None
    images_per_second: float | None
    original_images_per_second: float | None
    original_bytes: NotRequired[int]
    sha256: NotRequired[str]
    quantised: NotRequired[str | None]
    dynamic_size: NotRequired[bool]
    verified_on: NotRequired[str]
    accepted_loss: NotRequired[str | None]
    outputs: NotRequired[str]


class ExportDocument(TypedDict):
    """The result of `vitreous.export`."""

    run: str
    exports: list[ExportedFile]


class PushDocument(TypedDict):
    """The result of `vitreous.push`. `files` has the size of each file in bytes, `card` is the text of the model
    card."""

    repository: str
    url: str
    commit: str
    files: dict[str, int]
    bytes: int
    private: bool
    dry_run: bool
    out: str | None
    card: str
