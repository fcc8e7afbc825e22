"""Generate docs/reference/published-weights.md, the table of all published weights.

python docs/site/weights_page.py
"""

from __future__ import annotations

from pathlib import Path

from vitreous.cli.models import Options, describe_model
from vitreous.weights.published import PUBLISHED_WEIGHTS
from vitreous.weights.published_speed import SPEED_HARDWARE

PAGE = Path(__file__).parent.parent / "reference" / "published-weights.md"
INTRODUCTION = """\
# Published weights by name

These names work wherever weights are named: `train --init`, `predict`, `embed`, `evaluate`, `inspect`, `export`,
`convert` and `vitreous.load`. [Pre-trained weights](../guides/pretrained.md) explains which to take, and how they are
downloaded. `vitreous models --weights --max-parameters 30` prints a part of this table.

- **Parameters** are those of the model with the head of its name; **GFLOPs** are of one image of this size, with two
  operations per multiply-add.
- **CPU ms** is the CPU time of one image (of SigLIP and CLIP: without the text) in milliseconds, measured with random
  weights on {hardware}. – means that the model did not fit into 24 GiB of memory.
- **ImageNet** is the accuracy that the authors published, on the validation images. It was not measured here.
- **Checksum** is what the authors published of the file's checksum. Without one, only the size is verified.

Licences are those of the authors' repositories. Read them before you publish a model. **Gated** weights require an
account on the Hugging Face Hub that accepted the licence, and its token in `HF_TOKEN`.
"""


def make_weights_page() -> str:
    """Return the page: the introduction, and a table of weights."""
    rows = []
    for weights in PUBLISHED_WEIGHTS:
        model = describe_model(weights.model, Options(image_size=weights.image_size))
        accuracy = "–" if weights.accuracy is None else f"{100 * weights.accuracy:.1f} %"
        if weights.accuracy is not None and weights.accuracy_note != "top-1":
            accuracy += f" {weights.accuracy_note.removeprefix('top-1 of a ').removeprefix('top-1 ')}"
        checksum = weights.digest.partition(":")[0].upper().replace("SHA256", "SHA-256") or "–"
        milliseconds = weights.cpu_milliseconds
        speed = "–" if milliseconds is None else f"{milliseconds:,g}"
        size = f"{model['parameters'] / 1e6:.1f} M | {model['gflops']:.1f} | {speed}"
        licence = weights.licence + " (gated)" * weights.gated
        cells = (f"`{weights.name}`", weights.model, weights.image_size, size, accuracy, licence, checksum)
        rows.append(f"| {' | '.join(map(str, cells))} |")
    header = ("name", "model", "pixels", "parameters", "GFLOPs", "CPU ms", "ImageNet", "licence", "checksum")
    table = [f"| {' | '.join(header)} |", "|---|---|--:|--:|--:|--:|---|---|---|", *rows]
    return (
        f"{INTRODUCTION.format(hardware=SPEED_HARDWARE)}\n{len(PUBLISHED_WEIGHTS)} names:\n\n" + "\n".join(table) + "\n"
    )


if __name__ == "__main__":
    PAGE.write_text(make_weights_page(), "utf-8")
