"""Object detection and instance segmentation: boxes, and masks, of objects."""

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
    """Objects of named classes: `classes` in the order of their numbers; `masks`: each has a mask beside its box."""

    name: ClassVar[str] = "detection"
    does: ClassVar[str] = "finds objects"
    hub_task: ClassVar[str] = "object-detection"
    endpoint: ClassVar[str] = "detect"
    inspectable: ClassVar[bool] = False
    is_dense: ClassVar[bool] = True
    predict_options: ClassVar[frozenset[str]] = frozenset(("threshold", "csv", "to", "coco_ids", "tiles", "overlay"))
    # OpenVINO (2026.2) reads NonMaxSuppression of ONNX, not that of torch.export
    export_rules: ClassVar[ExportRules] = ExportRules(
        outputs="objects",
        batch=False,
        by_onnx=True,
        int8_refusal="int8 is not for detectors: what it costs them was never judged",
        fit="whole",
    )
    leading: ClassVar[str] = "ap"
    evaluate_options: ClassVar[frozenset[str]] = frozenset(("tiles",))
    protocol: ClassVar[str] = "coco"

    classes: tuple[str, ...]
    masks: bool = False

    def settings(self) -> dict[str, Any]:
        """The names of the classes, and whether there are masks."""
        return {"classes": list(self.classes), "masks": self.masks}

    @classmethod
    def from_settings(cls, description: dict[str, Any], classes: tuple[str, ...], origin: str) -> Self:
        """The detection of a description. Raises WeightsError for `masks` that are neither true nor false."""
        masks = description.get("masks", False)
        if not isinstance(masks, bool):
            raise WeightsError(f"{origin}: masks {masks}", "it is true or false")
        return cls(classes, masks)

    @property
    def summary(self) -> str:
        """How many classes."""
        return f"finds objects of {len(self.classes)} classes"

    @property
    def overlay_classes(self) -> tuple[str, ...]:
        """All classes."""
        return self.classes

    def predict_images(
        self, predictor: Any, images: Any, options: PredictionOptions, bad_images: str, on_images: Callable[[int], None]
    ) -> Any:
        """`ImageObjects` for each image, of a score of at least `threshold`. Raises UsageError for other options of
        classifiers."""
        self.check_predict_keywords(predictor.card.name, options)
        asked = {} if options.threshold is None else {"threshold": options.threshold}
        objects = predictor.detect(images, bad_images=bad_images, **asked)
        on_images(len(objects) if is_list(objects) else 1)
        return objects

    def prepare_input(self, picture: DecodedSample, preprocess: Preprocess) -> np.ndarray:
        """A decoded image -> (C, *image): the whole image, scaled to fit."""
        from vitreous.tasks.detections import fit_image

        return fit_image(to_native_array(picture), preprocess)[0]

    def compute(self, engine: Any, pixels: np.ndarray) -> np.ndarray:
        """(B, C, *image) pixels -> (B, N, 6) or more: box, score, label and mask of each object."""
        return np.concatenate([part.reshape(*part.shape[:2], -1) for part in engine.objects(pixels)], -1)

    def output_shape(self, image: tuple[int, ...]) -> tuple[int | None, ...]:
        """(N, 6) or more, whatever they are."""
        return (None, None)

    def compare_export(
        self, original: Any, export: Any, images: VerificationImages, config: Any, progress: Callable[[int], None]
    ) -> ObjectComparison:
        """Compare the objects that both find."""
        from vitreous.tasks.detection_proof import compare_objects

        return compare_objects(original, export, images, config.threshold, progress)

    def select_headline_metrics(self, figures: dict[str, float | None]) -> dict[str, float | None]:
        """AP and what is printed after it."""
        shown = (self.leading_metric, *(METRICS[self.leading_metric].secondary or ()))
        return {name: value for name, value in figures.items() if name in shown}
