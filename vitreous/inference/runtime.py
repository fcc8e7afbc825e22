"""What computes answers, whoever asks: pixels in, logits out, as numpy arrays.

A batch is cut into parts of one fixed size, the last one filled up with black pictures, so an image's answer is the
same to the last bit whatever comes beside it. On a CPU a part is computed by one thread and has about 800 tokens (four
images of ViT-S/16): fewer would not pay for laying out the weights anew for every product, more would not be faster. On
two cores of an EPYC with AVX2 a ViT-S/16 did, of its best 13.7 images a second, 98 % in parts of four, 92 % in parts of
two and 80 % in parts of one, and one image alone took 560, 320 and 170 ms. Who waits for single images asks for `quick`
ones: parts of about 200 tokens that all threads share.

B images, K classes, D numbers that the head reads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from vitreous.inference.packing import Outputs, unpack

if TYPE_CHECKING:
    from vitreous.inference.engine import Engine, InferenceOptions, Pictures
    from vitreous.models.zoo import Model
    from vitreous.weights.bundle import Bundle

#: (B, C, *image), or pictures at their own aspect, each (C, height, width)
Pixels = np.ndarray | list[np.ndarray]

PART = 4  # images that are computed together where the engine is another library's
QUICK = 200  # tokens of a part where single images are waited for


class Runtime(Protocol):
    """A model that answers; `load` finds the one for a run, a bundle or an exported file."""

    @property
    def precision(self) -> str:
        """The precision of its products: `fp32`, `bf16` or `int8`."""
        ...

    def logits(self, pixels: Any) -> np.ndarray:
        """(B, C, *image) pixels as `Preprocess.array` makes them -> (B, K) float32."""
        ...

    def features(self, pixels: Any) -> np.ndarray:
        """(B, C, *image) pixels -> (B, D) float32, what the head reads. Raises UsageError where there are none."""
        ...

    def objects(self, pixels: np.ndarray) -> Outputs:
        """(B, C, *image) pixels -> boxes, scores, labels and masks of a detector, as `packing` describes them."""
        ...


class TorchRuntime:
    """A bundle, computed by its engine; `quick` answers one image alone sooner, and many later."""

    def __init__(
        self, bundle: Bundle, how: InferenceOptions | None = None, pictures: Pictures | None = None, quick: bool = False
    ) -> None:
        from vitreous.inference.engine import InferenceOptions, make_engine

        self.bundle, self.how, self.quick = bundle, how or InferenceOptions(), quick
        self.note = ""  # which engine was chosen, for people
        self.engine = make_engine(bundle.model, bundle.preprocess, how, pictures)

    def choose_engine(self, total_images: float, features: bool = False) -> None:
        """Replace PyTorch by the fastest installed engine, if the options leave the choice and a job of `total_images`
        (inf: a server) is long enough (`inference.engine_choice`). `features`: the job computes those alone."""
        import torch

        from vitreous.inference.engine_choice import choose_engine
        from vitreous.system.machine import pick_device

        if self.how.engine != "auto":
            return
        baseline = self.before_head if features else self.engine
        parts = torch.get_num_threads() if pick_device(self.how.device) == "cpu" else 1  # computed at the same time
        choice = choose_engine(
            self.headless_model if features else self.bundle.model,
            self.bundle.preprocess,
            options=self.how,
            compute=lambda engine, pixels: compute(engine, pixels, part_size(engine, self.quick), self.quick),
            batch_size=1 if self.quick else self.part * parts,
            total_images=total_images,
            baseline=baseline,
        )
        self.how, self.note = choice.options, choice.note
        if features:
            self.before_head = choice.engine
        else:
            self.engine = choice.engine

    @property
    def precision(self) -> str:
        """The precision of its products: `fp32`, `bf16` or `int8`."""
        return self.engine.precision

    @property
    def part(self) -> int:
        """Images that are computed together."""
        return part_size(self.engine, self.quick)

    @property
    def headless_model(self) -> Model:
        """The model without its head; of dense models, whose heads need feature maps, the backbone."""
        from vitreous.inference.features import headless

        return getattr(self.bundle.model, "backbone", None) or headless(self.bundle.model)

    @cached_property
    def before_head(self) -> Engine:
        """The engine of the model without its head."""
        from vitreous.inference.engine import make_engine

        return make_engine(self.headless_model, self.bundle.preprocess, self.how)

    def logits(self, pixels: Pixels) -> np.ndarray:
        """(B, C, *image) pixels -> (B, K) float32."""
        return compute(self.engine, pixels, self.part, self.quick)

    def features(self, pixels: Pixels) -> np.ndarray:
        """(B, C, *image) pixels -> (B, D) float32, what the head reads."""
        return compute(self.before_head, pixels, self.part, self.quick)

    def objects(self, pixels: np.ndarray) -> Outputs:
        """(B, C, *image) pixels -> boxes, scores, labels and masks of a detector, as `packing` describes them."""
        return unpack(self.logits(pixels))


def part_size(engine: Engine, quick: bool) -> int:
    """Return how many images an engine computes together; `quick`: where single images are waited for."""
    from vitreous.inference.engine import TorchEngine

    if isinstance(engine, TorchEngine):
        return engine.part_size(QUICK) if quick else engine.part_size()
    return 1 if quick else PART


def compute(engine: Engine, pixels: Pixels, size: int, quick: bool = False) -> np.ndarray:
    """The outputs (B, K) of an engine for (B, C, *image) pixels, in parts of `size` images; for pictures at their own
    aspect each alone. `quick`: all threads may share a part that is waited for."""
    import torch

    from vitreous.inference.engine import TorchEngine

    if isinstance(engine, TorchEngine):
        if engine.preprocess.native:
            return engine.steady([torch.from_numpy(np.ascontiguousarray(one)) for one in pixels], size).numpy()
        return engine.steady(torch.from_numpy(np.ascontiguousarray(pixels)), size, quick).numpy()
    assert isinstance(pixels, np.ndarray), "only a PyTorch engine takes pictures of different sizes"
    return in_parts(lambda part: engine(torch.from_numpy(part)).numpy(), pixels, size)


def in_parts(compute: Callable[[np.ndarray], np.ndarray], pixels: np.ndarray, size: int) -> np.ndarray:
    """Compute (B, C, *image) pixels in parts of exactly `size` images, the last one filled up; returns (B, ...)."""
    count = len(pixels)
    lacking = -count % size
    whole = np.concatenate([pixels, np.zeros((lacking, *pixels.shape[1:]), pixels.dtype)]) if lacking else pixels
    return np.concatenate([compute(whole[start : start + size]) for start in range(0, len(whole), size)])[:count]
