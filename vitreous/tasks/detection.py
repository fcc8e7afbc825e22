"""The task of object detection and instance segmentation: boxes and masks of objects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from vitreous.config import is_list
from vitreous.errors import WeightsError
from vitreous.tasks.base import ExportRules, PredictionOptions, Task
from vitreous.tasks.metrics import METRICS
from vitreous.tasks.tiles import to_native_array

if TYPE_CHECKING:
    from collections.abc import Callable

    from vitreous.data.decoding.spectral import DecodedSample
    from vitreous.data.modalities.base import Preprocess
    from vitreous.tasks.detection_proof import ObjectComparison
    from vitreous.tasks.export_proof import VerificationImages


@dataclass(frozen=True)
class Detection(Task):
    """A detector's task: objects of named `classes`, in the order of their indices. `masks`: whether each object has a
    mask in addition to its box."""

    name: ClassVar[str] = "detection"
    verb_phrase: ClassVar[str] = "detects objects"
    hub_task: ClassVar[str] = "object-detection"
    endpoint: ClassVar[str] = "detect"
    inspectable: ClassVar[bool] = False
    is_dense: ClassVar[bool] = True
    predict_options: ClassVar[frozenset[str]] = frozenset(("threshold", "csv", "to", "coco_ids", "tiles", "overlay"))
    # OpenVINO (2026.2) supports NonMaxSuppression from ONNX, but not from torch.export
    export_rules: ClassVar[ExportRules] = ExportRules(
        outputs="objects",
        any_batch_size=False,
        use_onnx_graph=True,
        int8_refusal="int8 is not supported for detectors: its accuracy loss was never measured",
        fit="whole",
    )
    primary: ClassVar[str] = "ap"
    evaluate_options: ClassVar[frozenset[str]] = frozenset(("tiles",))
    protocol: ClassVar[str] = "coco"

    classes: tuple[str, ...]
    masks: bool = False

    def settings(self) -> dict[str, Any]:
        """Return the class names, and whether objects have masks, by their keys in files."""
        return {"classes": list(self.classes), "masks": self.masks}

    @classmethod
    def from_settings(cls, settings: dict[str, Any], classes: tuple[str, ...], origin: str) -> Self:
        """Create a detection task from stored settings. Raises WeightsError if `masks` is not true or false."""
        masks = settings.get("masks", False)
        if not isinstance(masks, bool):
            raise WeightsError(f"{origin}: invalid masks {masks}", "masks must be true or false")
        return cls(classes, masks)

    @property
    def summary(self) -> str:
        """The task with the number of classes: "detects objects of 80 classes"."""
        return f"detects objects of {len(self.classes)} classes"

    @property
    def overlay_classes(self) -> tuple[str, ...]:
        """The classes that are drawn over images: all classes."""
        return self.classes

    def predict_images(
        self, predictor: Any, images: Any, options: PredictionOptions, bad_images: str, on_images: Callable[[int], None]
    ) -> Any:
        """Detect the objects in images: `ImageObjects` for each image, with scores of at least `options.threshold`.
        Raises UsageError for options that only classifiers support."""
        self.check_predict_keywords(predictor.card.name, options)
        detect_options = {} if options.threshold is None else {"threshold": options.threshold}
        objects = predictor.detect(images, bad_images=bad_images, **detect_options)
        on_images(len(objects) if is_list(objects) else 1)
        return objects

    def prepare_input(self, image: DecodedSample, preprocess: Preprocess) -> np.ndarray:
        """Convert a decoded image to pixels (C, *image): the full image, resized with its aspect ratio kept, and
        padded."""
        from vitreous.tasks.detections import fit_image

        return fit_image(to_native_array(image), preprocess)[0]

    def compute(self, engine: Any, pixels: np.ndarray) -> np.ndarray:
        """Compute the objects in pixels (B, C, *image): (B, N, 6) or more columns, which are box, score, label and mask
        pixels."""
        return np.concatenate([output.reshape(*output.shape[:2], -1) for output in engine.objects(pixels)], -1)

    def output_shape(self, image_size: tuple[int, ...]) -> tuple[int | None, ...]:
        """Return the shape (N, columns) of the objects of an image; both lengths vary."""
        return (None, None)

    def compare_export(
        self, original: Any, export: Any, images: VerificationImages, config: Any, progress: Callable[[int], None]
    ) -> ObjectComparison:
        """Compare the objects that a model and its exported file detect. `config` is the model's config."""
        from vitreous.tasks.detection_proof import compare_objects

        return compare_objects(original, export, images, config.threshold, progress)

    def select_headline_metrics(self, metrics: dict[str, float | None]) -> dict[str, float | None]:
        """Select AP and its secondary metrics, which are shown at the top of an evaluation page."""
        headline_keys = (self.primary_metric, *(METRICS[self.primary_metric].secondary or ()))
        return {name: value for name, value in metrics.items() if name in headline_keys}
