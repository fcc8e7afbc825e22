"""Video models trained for a few minutes: joint and factorised, from scratch and from image models, and with VideoMAE.

    python benchmarks/learned_clips.py digits --work DIR --rows ROWS.jsonl
    python benchmarks/learned_clips.py videomae --work DIR --rows ROWS.jsonl
    python benchmarks/learned_clips.py ultrasound FOLDER --work DIR --rows ROWS.jsonl
    python benchmarks/learned_clips.py page --rows ROWS.jsonl --out benchmarks/results/DATE-learned-clips-HARDWARE.md

digits: one of scikit-learn's handwritten digits moves left, right, up or down through 32 x 32 pixels for 16 frames.
There are 40 classes, whose direction is invisible in single frames. Test clips have digits that no training clip has.

ultrasound: FOLDER has the clips of POCUS-lung and their manifest.csv (`path`, `class`, `patient`). They are scaled once
to folders of at most 32 frames whose shorter side has 80 pixels, and split three times by patient (scikit-learn's
StratifiedGroupKFold). Accuracies are over all clips; each clip is predicted by the run that did not train on its
patient. The results compare models trained on 50 clips, and have no medical meaning.

Each run has --minutes of one core by processor time (benchmarks/pretraining.py; an ultrasound fold has a third of
them), with OMP_NUM_THREADS=1. A model initialised from an image model has half of them; the other half trains the image
model of the same width on the middle frames of the training clips, with the digits or the classes as labels; central
inflation.

videomae: an encoder trains for --minutes on the training clips of `digits` without labels, and then on 1, 2, 5 and 20
clips of each class, compared with training from scratch for as many steps. The validation clips of a run, a fifth but
at least one clip of each class, are not used for any selection. Three seeds.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from moving_digits import DIGIT_SIZE, FRAME_SIZE, NUM_FRAMES, read_rows
from PIL import Image
from pretraining import NEVER, measure_processor_rate, train_or_load
from scipy.ndimage import shift
from scipy.stats import binomtest
from sklearn.datasets import load_digits
from sklearn.metrics import balanced_accuracy_score
from sklearn.model_selection import StratifiedGroupKFold

import vitreous
from vitreous.data.decoding.clips import open_clip
from vitreous.inference.image_grid import write_gif
from vitreous.system.machine import get_processor_name

DIRECTIONS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}
SPEEDS = (0.5, 1.25)  # pixels per frame
CLIPS_PER_CLASS = {"train": 60, "test": 10}  # clips per class, for 40 classes
ULTRASOUND_SETTINGS = {"side": 80, "frames": 32, "folds": 3}
RATE_STEPS = 48  # steps of the run that measures clips per processor second
MODELS = {
    "digits": {"joint": "ViViT-64x6/4x2", "factorised": "ViViT-64x6/4x2-factorised-encoder", "picture": "ViT-64x6/4"},
    "ultrasound": {
        "joint": "ViViT-128x6/8x2",
        "factorised": "ViViT-128x6/8x2-factorised-encoder",
        "picture": "ViT-128x6/8",
    },
}
STEPS_BY_LABELS = {1: 150, 2: 150, 5: 300, 20: 600}  # clips of each class -> steps of 32 clips
SEEDS = range(3)
#: the compared ways of training on few labels, as options of `train`
FEW_LABEL_OPTIONS: dict[str, dict[str, Any]] = {
    "from scratch": {"recipe": "small", "model": MODELS["digits"]["joint"]},
    "after VideoMAE": {"recipe": "finetune-encoder"},
}


def draw_moving_digit(rng: np.random.Generator, digit: np.ndarray, direction: str) -> np.ndarray:
    """Image (DIGIT, DIGIT) in 0..255 -> a clip (FRAMES, SIDE, SIDE) uint8 in which it moves without touching an
    edge."""
    way, room = np.array(DIRECTIONS[direction]), FRAME_SIZE - DIGIT_SIZE
    path = way * rng.uniform(*SPEEDS) * np.arange(NUM_FRAMES)[:, None]
    low, high = -path.min(0), room - path.max(0)
    positions = rng.uniform(low, high) + path
    still = np.pad(digit.astype(np.float32), (0, room))
    return np.stack([shift(still, position, order=1) for position in positions]).round().clip(0, 255).astype(np.uint8)


def write_digits(folder: Path) -> Path:
    """Write the clips folder/clips/SPLIT/DIGIT-DIRECTION/NUMBER.gif, and middle frames
    folder/pictures/SPLIT/DIGIT/*.png, unless they exist."""
    if (folder / "complete").is_file():
        return folder
    images, labels = load_digits(return_X_y=True)
    sized = [
        Image.fromarray((digit.reshape(8, 8) * 255 / 16).astype(np.uint8)).resize((DIGIT_SIZE, DIGIT_SIZE))
        for digit in images
    ]
    digits, rng = np.stack([np.asarray(digit) for digit in sized]), np.random.default_rng(0)
    split_masks = {"test": np.arange(len(labels)) % 5 == 0, "train": np.arange(len(labels)) % 5 != 0}
    for split, count in CLIPS_PER_CLASS.items():
        for label in range(10):
            class_digits = digits[split_masks[split] & (labels == label)]
            for direction in DIRECTIONS:
                for index in range(count):
                    clip = draw_moving_digit(rng, class_digits[rng.integers(len(class_digits))], direction)
                    clip_path = folder / "clips" / split / f"{label}-{direction}" / f"{index:03d}.gif"
                    clip_path.parent.mkdir(parents=True, exist_ok=True)
                    write_gif(clip_path, [Image.fromarray(frame) for frame in clip], milliseconds=100)
                    image_path = folder / "pictures" / split / str(label) / f"{direction}-{index:03d}.png"
                    image_path.parent.mkdir(parents=True, exist_ok=True)
                    Image.fromarray(clip[NUM_FRAMES // 2]).save(image_path)
    (folder / "complete").touch()
    return folder


def write_ultrasound(folder: Path, output: Path) -> Path:
    """Scale the clips, and write output/FOLD/clips and output/FOLD/pictures, each {train,test}/CLASS, unless they
    exist."""
    if (output / "complete").is_file():
        return output
    with (folder / "manifest.csv").open(encoding="utf-8") as file:
        listed = list(csv.DictReader(file))
    labels, patients = ([entry[name] for entry in listed] for name in ("class", "patient"))
    folds = StratifiedGroupKFold(ULTRASOUND_SETTINGS["folds"], shuffle=True, random_state=0).split(
        labels, labels, patients
    )
    tests = [set(test.tolist()) for _, test in folds]
    for clip_index, entry in enumerate(listed):
        clip = open_clip(folder / entry["path"])
        frame_indices = np.linspace(0, len(clip) - 1, min(len(clip), ULTRASOUND_SETTINGS["frames"])).round().astype(int)
        frames = []
        for pixels in clip.read_frames(frame_indices):
            frame = Image.fromarray(np.atleast_3d(pixels).squeeze())
            scale = ULTRASOUND_SETTINGS["side"] / min(frame.size)
            frames.append(frame.convert("L").resize([round(side * scale) for side in frame.size], Image.Resampling.BOX))
        for fold, test in enumerate(tests):
            split, name = "test" if clip_index in test else "train", f"{clip_index:02d}"
            clip_path = output / str(fold) / "clips" / split / entry["class"] / name
            clip_path.mkdir(parents=True, exist_ok=True)
            for index, frame in enumerate(frames):
                frame.save(clip_path / f"{index:03d}.png")
            image_path = output / str(fold) / "pictures" / split / entry["class"] / f"{name}.png"
            image_path.parent.mkdir(parents=True, exist_ok=True)
            frames[len(frames) // 2].save(image_path)
    (output / "complete").touch()
    return output


def train_timed_run(folder: Path, data: Path, minutes: float, **options: Any) -> Path:
    """Train on the clips or images that fit into `minutes` of one core, unless the run is complete; returns the run
    folder.

    The rate of each model is measured once.
    """
    ways: dict[str, Any] = {"progress": False, "device": "cpu", **options}
    measured = {name: value for name, value in ways.items() if name not in ("init", "seed")}
    rate = measure_processor_rate(
        folder.parent / f"rate-{options['model'].replace('/', '-')}", RATE_STEPS, str(data), **measured
    )
    count = sum(1 for _ in (data / "train").glob("*/*"))
    epochs = round(rate * 60 * minutes / count, 2)
    train_or_load(folder / "run", data, epochs=epochs, save_every=200, evaluate_every=NEVER, keep=1, **ways)
    return folder / "run"


def predict_test_clips(run: Path, data: Path) -> tuple[list[str], list[str]]:
    """The predicted and the true classes of the test clips."""
    files = sorted((data / "test").glob("*/*"))
    predictions = vitreous.load(run, device="cpu").predict([str(file) for file in files])
    return [prediction.names[0] for prediction in predictions], [file.parent.name for file in files]


def append_row(rows: Path, row: dict[str, Any]) -> None:
    """Append a row and print it."""
    with rows.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    print(row, flush=True)


def has_row(rows: Path, **values: Any) -> bool:
    """Whether there is a row with these values."""
    return any(values.items() <= row.items() for row in read_rows(rows))


def prepare_start(
    image_folder: Path, data: Path, set_name: str, start: str, minutes: float, seed: int
) -> tuple[float, dict]:
    """The minutes left for clips, and options; for `pictures`, the image model is trained first."""
    if start == "scratch":
        return minutes, {}
    image_run = train_timed_run(
        image_folder, data / "pictures", minutes / 2, recipe="small", model=MODELS[set_name]["picture"], seed=seed
    )
    return minutes / 2, {"init": str(image_run)}


def learn_digits(args: argparse.Namespace) -> None:
    """Train each way, and append its row."""
    data = write_digits(args.work / "digits")
    for start in args.starts:
        for arrangement in ("joint", "factorised"):
            row_key = {"set": "digits", "arrangement": arrangement, "start": start, "minutes": args.minutes}
            if has_row(args.rows, **row_key):
                continue
            folder = args.work / f"digits-{arrangement}-{start}"
            minutes, options = prepare_start(args.work / "digits-pictures", data, "digits", start, args.minutes, 0)
            options |= {"recipe": "small", "model": MODELS["digits"][arrangement], "frames": 8}
            run = train_timed_run(folder, data / "clips", minutes, **options)
            append_row(args.rows, row_key | compute_digit_metrics(run, data / "clips") | read_run_length(run))


def read_run_length(run: Path) -> dict[str, float]:
    """The epochs and steps of a run."""
    summary = json.loads((run / "summary.json").read_text("utf-8"))
    return {"epochs": summary["epochs"], "steps": summary["steps"]}


def compute_digit_metrics(run: Path, data: Path) -> dict[str, float]:
    """The share of the test clips with the correct class, digit and direction."""
    args, wanted = (np.array([name.split("-") for name in names]) for names in predict_test_clips(run, data))
    right = args == wanted
    return {
        "number": len(right),
        "right": float(right.all(1).mean()),
        "digit": float(right[:, 0].mean()),
        "direction": float(right[:, 1].mean()),
    }


def learn_ultrasound(args: argparse.Namespace) -> None:
    """Train each way on each fold, and append the row for all clips."""
    data, folds = write_ultrasound(args.folder, args.work / "ultrasound"), range(ULTRASOUND_SETTINGS["folds"])
    for start in args.starts:
        for arrangement in ("joint", "factorised"):
            row_key = {"set": "ultrasound", "arrangement": arrangement, "start": start, "minutes": args.minutes}
            if has_row(args.rows, **row_key):
                continue
            predicted: list[str] = []
            true: list[str] = []
            epochs = 0.0
            for fold in folds:
                folder, fold_data = args.work / f"ultrasound-{arrangement}-{start}-{fold}", data / str(fold)
                image_folder = args.work / f"ultrasound-pictures-{fold}"
                minutes, options = prepare_start(
                    image_folder, fold_data, "ultrasound", start, args.minutes / len(folds), fold
                )
                options |= {"recipe": "small", "model": MODELS["ultrasound"][arrangement], "batch_size": 16}
                run = train_timed_run(folder, fold_data / "clips", minutes, image_size=64, seed=fold, **options)
                names, fold_true = predict_test_clips(run, fold_data / "clips")
                predicted, true, epochs = (
                    predicted + names,
                    true + fold_true,
                    epochs + read_run_length(run)["epochs"] / len(folds),
                )
            append_row(args.rows, row_key | compute_ultrasound_metrics(predicted, true) | {"epochs": epochs})
    if not has_row(args.rows, set="ultrasound", arrangement="picture"):
        both = [
            predict_test_clips(args.work / f"ultrasound-pictures-{fold}" / "run", data / str(fold) / "pictures")
            for fold in folds
        ]
        predicted, true = ([name for names in fold_data for name in names] for fold_data in zip(*both, strict=True))
        row = {"set": "ultrasound", "arrangement": "picture", "start": "scratch", "minutes": args.minutes / 2}
        append_row(args.rows, row | compute_ultrasound_metrics(predicted, true))


def compute_ultrasound_metrics(predicted: Sequence[str], true: Sequence[str]) -> dict[str, Any]:
    """Accuracy with its 95 % interval (Wilson), mean over classes, and the share of the largest class."""
    right = int(sum(a == b for a, b in zip(predicted, true, strict=True)))
    interval = binomtest(right, len(true)).proportion_ci(method="wilson")
    return {
        "number": len(true),
        "right": right / len(true),
        "low": float(interval.low),
        "high": float(interval.high),
        "balanced": float(balanced_accuracy_score(true, predicted)),
        "largest": Counter(true).most_common(1)[0][1] / len(true),
    }


def copy_few(data: Path, output: Path, count: int, seed: int) -> Path:
    """Create a dataset with `count` training clips of each class, and the test clips."""
    if not output.is_dir():
        rng = np.random.default_rng(seed)
        for folder in sorted((data / "train").iterdir()):
            (output / "train" / folder.name).mkdir(parents=True)
            files = sorted(folder.iterdir())
            for index in rng.choice(len(files), count, replace=False):
                shutil.copy(files[index], output / "train" / folder.name)
        shutil.copytree(data / "test", output / "test")
        shutil.copytree(data / "test", output / "val")  # evaluated once at the end, without any selection
    return output


def learn_from_few(args: argparse.Namespace) -> None:
    """Train an encoder without labels, then both ways on few labels, and append a row for each seed."""
    data = write_digits(args.work / "digits") / "clips"
    objective = {"recipe": "videomae", "model": "VideoMAE-64x6/4x2", "frames": 8}
    encoder = train_timed_run(args.work / "videomae", data, args.minutes, **objective)
    for count, steps in STEPS_BY_LABELS.items():
        for seed in SEEDS:
            subset = copy_few(data, args.work / "few" / f"{count}-{seed}", count, seed)
            for way, options in FEW_LABEL_OPTIONS.items():
                row_key = {"set": "few", "way": way, "count": count, "seed": seed}
                if has_row(args.rows, **row_key):
                    continue
                run_folder = args.work / "few" / f"{count}-{seed}-{way.replace(' ', '-')}"
                start = {"init": str(encoder)} if way == "after VideoMAE" else {}
                shared: dict[str, Any] = {"steps": steps, "batch_size": 32, "frames": 8, "seed": seed}
                shared |= {"progress": False, "device": "cpu", "evaluate_every": NEVER, "save_every": NEVER}
                train_or_load(run_folder, subset, **options, **start, **shared)
                append_row(
                    args.rows,
                    row_key | {"steps": steps, "minutes": args.minutes} | compute_digit_metrics(run_folder, data),
                )


def build_page(rows: list[dict[str, Any]]) -> str:
    """Build the tables."""
    lines = [
        f"# Training on clips, {time.strftime('%Y-%m-%d')}",
        "",
        f"{get_processor_name()}, 1 thread, torch {torch.__version__}. The comparison and the commands are described in benchmarks/learned_clips.py.",
    ]
    digits = [row for row in rows if row["set"] == "digits"]
    if digits:
        lines += [
            "",
            "## Moving digits",
            "",
            f"40 classes, digit and direction; {digits[0]['number']} test clips of unseen digits, one run each.",
            "",
            "| arrangement | start | minutes of one core | epochs of clips | class accuracy | digit accuracy | direction accuracy |",
            "|---|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {row['arrangement']} | {row['start']} | {row['minutes']:g} | {row['epochs']:.1f} | {row['right']:.1%} | {row['digit']:.1%} | {row['direction']:.1%} |"
            for row in digits
        ]
    few = [row for row in rows if row["set"] == "few"]
    if few:
        lines += [
            "",
            "## Few labels",
            "",
            f"The same test clips; mean (minimum to maximum) of {len(SEEDS)} seeds. VideoMAE trained for {few[0]['minutes']:g} minutes of one core.",
            "",
            "| clips of each class | steps of 32 | " + " | ".join(FEW_LABEL_OPTIONS) + " |",
            "|---|---|" + "---|" * len(FEW_LABEL_OPTIONS),
        ]
        for count, steps in STEPS_BY_LABELS.items():
            cells = []
            for way in FEW_LABEL_OPTIONS:
                shares = [row["right"] for row in few if (row["way"], row["count"]) == (way, count)]
                span = f"{min(shares):.1%} to {max(shares):.1%}" if shares else ""
                cells.append(f"{statistics.mean(shares):.1%} ({span})" if shares else "")
            lines.append(f"| {count} | {steps} | " + " | ".join(cells) + " |")
    ultrasound = [row for row in rows if row["set"] == "ultrasound"]
    if ultrasound:
        first_row = ultrasound[0]
        lines += [
            "",
            "## Ultrasound clips of lungs",
            "",
            f"{first_row['number']} clips of three classes, split by patient, each predicted by a run that did not train on its patient. The largest class has {first_row['largest']:.1%}.",
            "",
            "| arrangement | start | minutes of one core | accuracy | 95 % interval | mean over classes |",
            "|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {row['arrangement']} | {row['start']} | {row['minutes']:g} | {row['right']:.1%} | {row['low']:.1%} to {row['high']:.1%} | {row['balanced']:.1%} |"
            for row in ultrasound
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure the missing rows, or print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("digits", "videomae", "ultrasound", "page"))
    parser.add_argument("folder", type=Path, nargs="?", help="folder of the ultrasound clips")
    parser.add_argument("--work", type=Path, help="folder of the clips and runs")
    parser.add_argument("--rows", type=Path, required=True, help="JSON lines file to which rows are appended")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--starts", nargs="+", default=["scratch", "pictures"], choices=("scratch", "pictures"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.what == "page":
        text = build_page(read_rows(args.rows))
        print(text)
        if args.out:
            args.out.write_text(text)
        return
    args.work.mkdir(parents=True, exist_ok=True)
    {"digits": learn_digits, "videomae": learn_from_few, "ultrasound": learn_ultrasound}[args.what](args)


if __name__ == "__main__":
    main()
