"""An exported ONNX file, run by onnxruntime, without torch."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import numpy as np

from vitreous.cores import cores
from vitreous.errors import UsageError, WeightsError
from vitreous.evaluation.libraries import needed
from vitreous.serving.card import Card
from vitreous.serving.export_file import AGAIN, CARD, card_in, check_onnx, content, normalised, precision_in
from vitreous.serving.runtime import in_parts

PIXELS = 2 * 224 * 224  # of one part: few enough to lie in caches, enough to be worth a call


def part(image: tuple[int, ...]) -> int:
    """How many images of a size are computed together."""
    return max(1, min(64, PIXELS // max(1, int(np.prod(image)))))


class OnnxRuntime:
    """A file that `vitreous export --to onnx` wrote, on the CPU. Raises WeightsError for any other, and for one that is
    damaged. `quick` computes one image at a time."""

    def __init__(self, path: str | os.PathLike[str], quick: bool = False) -> None:
        runtime, path = needed("onnxruntime"), Path(path)
        raw = content(path)
        text = check_onnx(raw, path).get(CARD)
        self.card: Card = card_in(text, path)
        self.precision = precision_in(text)
        options = runtime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = cores(), 1
        options.log_severity_level = 4
        # a thread that spins takes a core from others
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        try:
            self.session = runtime.InferenceSession(raw, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime has a class of its own for each, none of them public
            raise WeightsError(
                f"{path} is not run by onnxruntime {runtime.__version__} ({str(error)[:200]})", AGAIN
            ) from None
        self.size = 1 if quick else part(self.card.preprocess.image)
        self.outputs = [output.name for output in self.session.get_outputs()]

    def logits(self, pixels: np.ndarray) -> np.ndarray:
        """(B, C, *image) pixels -> (B, K) float32."""
        return in_parts(partial(self.answer, "logits"), pixels, self.size)

    def features(self, pixels: np.ndarray) -> np.ndarray:
        """(B, C, *image) pixels -> (B, D) float32, what the head reads. Raises UsageError for files without them."""
        if "features" not in self.outputs:
            raise UsageError("the file answers in logits only", "export the model again: it then has features too")
        return in_parts(partial(self.answer, "features"), pixels, self.size)

    def answer(self, output: str, pixels: np.ndarray) -> np.ndarray:
        """One of the outputs for exactly these images."""
        return self.session.run([output], {"images": normalised(pixels, self.card.preprocess)})[0]
