"""An exported OpenVINO file, a .xml and the .bin beside it, without torch."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import numpy as np

from vitreous.cores import cores
from vitreous.errors import WeightsError
from vitreous.evaluation.libraries import needed, unobserved
from vitreous.serving.card import Card
from vitreous.serving.export_file import AGAIN, CARD, card_in, check_xml, content, normalised, precision_in
from vitreous.serving.onnx import part
from vitreous.serving.runtime import in_parts


class OpenVinoRuntime:
    """A file that `vitreous export --to openvino` wrote, on the CPU in float32, with products in int8 where it was
    quantised.

    Raises WeightsError for any other, and for one that is damaged or without its .bin.
    """

    def __init__(self, path: str | os.PathLike[str], quick: bool = False) -> None:
        path = Path(path)
        xml, weights = content(path), content(path.with_suffix(".bin"))
        check_xml(xml, weights, path)
        with unobserved():
            ov = needed("openvino")
        hints = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": cores()}
        try:
            core = ov.Core()
            graph = core.read_model(model=xml, weights=weights)
            text = graph.get_rt_info(CARD).value if graph.has_rt_info(CARD) else None
            self.card: Card = card_in(text, path)
            self.precision = precision_in(text)
            self.compiled = core.compile_model(graph, "CPU", hints)
        except RuntimeError as error:
            raise WeightsError(f"{path} is not run by OpenVINO {ov.__version__} ({str(error)[:200]})", AGAIN) from None
        self.size = 1 if quick else part(self.card.preprocess.image)

    def logits(self, pixels: np.ndarray) -> np.ndarray:
        """(B, C, *image) pixels -> (B, K) float32."""
        return in_parts(partial(self.answer, 0), pixels, self.size)

    def features(self, pixels: np.ndarray) -> np.ndarray:
        """(B, C, *image) pixels -> (B, D) float32, what the head reads."""
        return in_parts(partial(self.answer, 1), pixels, self.size)

    def answer(self, output: int, pixels: np.ndarray) -> np.ndarray:
        """One of the outputs for exactly these images."""
        return np.array(self.compiled([normalised(pixels, self.card.preprocess)])[output])
