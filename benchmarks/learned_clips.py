"""What video models learn in a few minutes: joint and factorised, from scratch and from pictures, and what VideoMAE adds.

    python benchmarks/learned_clips.py digits --work DIR --rows ROWS.jsonl
    python benchmarks/learned_clips.py videomae --work DIR --rows ROWS.jsonl
    python benchmarks/learned_clips.py ultrasound FOLDER --work DIR --rows ROWS.jsonl
    python benchmarks/learned_clips.py page --rows ROWS.jsonl --out benchmarks/results/DATE-learned-clips-HARDWARE.md

digits: one of scikit-learn's handwritten digits moves left, right, up or down through 32 x 32 pixels for 16 frames: 40
classes, of which no single frame tells the direction. Test clips have digits that no training clip has.

ultrasound: FOLDER has the clips of POCUS-lung and their manifest.csv (`path`, `class`, `patient`). They are scaled once to
folders of at most 32 frames whose shorter side has 80 pixels, and split three times so that no patient is on both sides
(scikit-learn's StratifiedGroupKFold); accuracies are of all clips, each answered by the run that has not seen its
patient. Figures say what a model learns from 50 clips, and nothing about medicine.

Each run has --minutes of one core by processor time (benchmarks/pretraining.py; an ultrasound fold has a third of them),
with OMP_NUM_THREADS=1. A model from pictures has half of them, and the other half went into its pictures: the model of
the same width on the middle frames of the training clips, with the digits or the classes as labels; central inflation.

videomae: an encoder learns --minutes from the training clips of `digits` without labels, and then from 1, 2, 5 and 20
clips of each class, beside one from scratch in as many steps; a fifth of what a run is given, but at least one clip of
each class, is not given to any run and chooses nothing. Three seeds.
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
SPEEDS = (0.5, 1.25)  # pixels a frame
CLIPS_PER_CLASS = {"train": 60, "test": 10}  # of each of 40 classes
ULTRASOUND_SETTINGS = {"side": 80, "frames": 32, "folds": 3}
RATE_STEPS = 48  # steps that count the clips of a processor second
MODELS = {
    "digits": {"joint": "ViViT-64x6/4x2", "factorised": "ViViT-64x6/4x2-factorised-encoder", "picture": "ViT-64x6/4"},
    "ultrasound": {
        "joint": "ViViT-128x6/8x2",
        "factorised": "ViViT-128x6/8x2-factorised-encoder",
        "picture": "ViT-128x6/8",
    },
}
STEPS_BY_LABELS = {1: 150, 2: 150, 5: 300, 20: 600}  # clips of each class -> steps of 32
SEEDS = range(3)
#: the ways of learning from few labels that are compared, by options of `train`
FEW_LABEL_OPTIONS: dict[str, dict[str, Any]] = {
    "from scratch": {"recipe": "small", "model": MODELS["digits"]["joint"]},
    "after VideoMAE": {"recipe": "finetune-encoder"},
}


def moving_digit(rng: np.random.Generator, digit: np.ndarray, direction: str) -> np.ndarray:
    """Image (DIGIT, DIGIT) in 0..255 -> a clip (FRAMES, SIDE, SIDE) uint8 in which it moves without touching an edge."""
    way, room = np.array(DIRECTIONS[direction]), FRAME_SIZE - DIGIT_SIZE
    path = way * rng.uniform(*SPEEDS) * np.arange(NUM_FRAMES)[:, None]
    low, high = -path.min(0), room - path.max(0)
    places = rng.uniform(low, high) + path
    still = np.pad(digit.astype(np.float32), (0, room))
    return np.stack([shift(still, place, order=1) for place in places]).round().clip(0, 255).astype(np.uint8)


def write_digits(home: Path) -> Path:
    """Write the clips home/clips/SPLIT/DIGIT-DIRECTION/NUMBER.gif, and middle frames home/pictures/SPLIT/DIGIT/*.png,
    unless they are there."""
    if (home / "complete").is_file():
        return home
    images, labels = load_digits(return_X_y=True)
    sized = [
        Image.fromarray((one.reshape(8, 8) * 255 / 16).astype(np.uint8)).resize((DIGIT_SIZE, DIGIT_SIZE))
        for one in images
    ]
    digits, rng = np.stack([np.asarray(one) for one in sized]), np.random.default_rng(0)
    own = {"test": np.arange(len(labels)) % 5 == 0, "train": np.arange(len(labels)) % 5 != 0}
    for split, count in CLIPS_PER_CLASS.items():
        for label in range(10):
            known = digits[own[split] & (labels == label)]
            for direction in DIRECTIONS:
                for number in range(count):
                    clip = moving_digit(rng, known[rng.integers(len(known))], direction)
                    place = home / "clips" / split / f"{label}-{direction}" / f"{number:03d}.gif"
                    place.parent.mkdir(parents=True, exist_ok=True)
                    write_gif(place, [Image.fromarray(frame) for frame in clip], milliseconds=100)
                    picture = home / "pictures" / split / str(label) / f"{direction}-{number:03d}.png"
                    picture.parent.mkdir(parents=True, exist_ok=True)
                    Image.fromarray(clip[NUM_FRAMES // 2]).save(picture)
    (home / "complete").touch()
    return home


def write_ultrasound(folder: Path, home: Path) -> Path:
    """Scale the clips, and write home/FOLD/clips and home/FOLD/pictures, each {train,test}/CLASS, unless they are there."""
    if (home / "complete").is_file():
        return home
    with (folder / "manifest.csv").open(encoding="utf-8") as file:
        listed = list(csv.DictReader(file))
    labels, patients = ([row[name] for row in listed] for name in ("class", "patient"))
    folds = StratifiedGroupKFold(ULTRASOUND_SETTINGS["folds"], shuffle=True, random_state=0).split(
        labels, labels, patients
    )
    tests = [set(test.tolist()) for _, test in folds]
    for number, row in enumerate(listed):
        clip = open_clip(folder / row["path"])
        seen = np.linspace(0, len(clip) - 1, min(len(clip), ULTRASOUND_SETTINGS["frames"])).round().astype(int)
        frames = []
        for pixels in clip.read_frames(seen):
            frame = Image.fromarray(np.atleast_3d(pixels).squeeze())
            scale = ULTRASOUND_SETTINGS["side"] / min(frame.size)
            frames.append(frame.convert("L").resize([round(side * scale) for side in frame.size], Image.Resampling.BOX))
        for fold, test in enumerate(tests):
            split, name = "test" if number in test else "train", f"{number:02d}"
            place = home / str(fold) / "clips" / split / row["class"] / name
            place.mkdir(parents=True, exist_ok=True)
            for index, frame in enumerate(frames):
                frame.save(place / f"{index:03d}.png")
            picture = home / str(fold) / "pictures" / split / row["class"] / f"{name}.png"
            picture.parent.mkdir(parents=True, exist_ok=True)
            frames[len(frames) // 2].save(picture)
    (home / "complete").touch()
    return home


def timed_run(home: Path, data: Path, minutes: float, **options: Any) -> Path:
    """Train for the clips or pictures of so many minutes of one core, unless it is done -> the run folder.

    How many these are is measured once for a model.
    """
    ways: dict[str, Any] = {"progress": False, "device": "cpu", **options}
    measured = {name: value for name, value in ways.items() if name not in ("init", "seed")}
    rate = measure_processor_rate(
        home.parent / f"rate-{options['model'].replace('/', '-')}", RATE_STEPS, str(data), **measured
    )
    count = sum(1 for _ in (data / "train").glob("*/*"))
    epochs = round(rate * 60 * minutes / count, 2)
    train_or_load(home / "run", data, epochs=epochs, save_every=200, evaluate_every=NEVER, keep=1, **ways)
    return home / "run"


def predict_test_clips(run: Path, data: Path) -> tuple[list[str], list[str]]:
    """Classes that a run gives the test clips, and those that they have."""
    files = sorted((data / "test").glob("*/*"))
    predictions = vitreous.load(run, device="cpu").predict([str(file) for file in files])
    return [one.names[0] for one in predictions], [file.parent.name for file in files]


def append_row(rows: Path, row: dict[str, Any]) -> None:
    """One row more, at once."""
    with rows.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    print(row, flush=True)


def has_row(rows: Path, **wanted: Any) -> bool:
    """Whether there is a row with these values."""
    return any(wanted.items() <= row.items() for row in read_rows(rows))


def prepare_start(home: Path, data: Path, set_name: str, start: str, minutes: float, seed: int) -> tuple[float, dict]:
    """Minutes that are left for clips, and options: from pictures, after these were trained."""
    if start == "scratch":
        return minutes, {}
    picture = timed_run(
        home, data / "pictures", minutes / 2, recipe="small", model=MODELS[set_name]["picture"], seed=seed
    )
    return minutes / 2, {"init": str(picture)}


def learn_digits(given: argparse.Namespace) -> None:
    """Train each way, and append its row."""
    data = write_digits(given.work / "digits")
    for start in given.starts:
        for arrangement in ("joint", "factorised"):
            asked = {"set": "digits", "arrangement": arrangement, "start": start, "minutes": given.minutes}
            if has_row(given.rows, **asked):
                continue
            home = given.work / f"digits-{arrangement}-{start}"
            minutes, options = prepare_start(given.work / "digits-pictures", data, "digits", start, given.minutes, 0)
            options |= {"recipe": "small", "model": MODELS["digits"][arrangement], "frames": 8}
            run = timed_run(home, data / "clips", minutes, **options)
            append_row(given.rows, asked | compute_digit_metrics(run, data / "clips") | read_run_length(run))


def read_run_length(run: Path) -> dict[str, float]:
    """How long a run was."""
    summary = json.loads((run / "summary.json").read_text("utf-8"))
    return {"epochs": summary["epochs"], "steps": summary["steps"]}


def compute_digit_metrics(run: Path, data: Path) -> dict[str, float]:
    """Shares of the test clips of which the class is right, the digit, and the direction."""
    given, wanted = (np.array([name.split("-") for name in names]) for names in predict_test_clips(run, data))
    right = given == wanted
    return {
        "number": len(right),
        "right": float(right.all(1).mean()),
        "digit": float(right[:, 0].mean()),
        "direction": float(right[:, 1].mean()),
    }


def learn_ultrasound(given: argparse.Namespace) -> None:
    """Train each way on each fold, and append the row of all clips."""
    data, folds = write_ultrasound(given.folder, given.work / "ultrasound"), range(ULTRASOUND_SETTINGS["folds"])
    for start in given.starts:
        for arrangement in ("joint", "factorised"):
            asked = {"set": "ultrasound", "arrangement": arrangement, "start": start, "minutes": given.minutes}
            if has_row(given.rows, **asked):
                continue
            answers: list[str] = []
            wanted: list[str] = []
            epochs = 0.0
            for fold in folds:
                home, part = given.work / f"ultrasound-{arrangement}-{start}-{fold}", data / str(fold)
                pictures = given.work / f"ultrasound-pictures-{fold}"
                minutes, options = prepare_start(pictures, part, "ultrasound", start, given.minutes / len(folds), fold)
                options |= {"recipe": "small", "model": MODELS["ultrasound"][arrangement], "batch_size": 16}
                run = timed_run(home, part / "clips", minutes, image_size=64, seed=fold, **options)
                names, own = predict_test_clips(run, part / "clips")
                answers, wanted, epochs = (
                    answers + names,
                    wanted + own,
                    epochs + read_run_length(run)["epochs"] / len(folds),
                )
            append_row(given.rows, asked | compute_ultrasound_metrics(answers, wanted) | {"epochs": epochs})
    if not has_row(given.rows, set="ultrasound", arrangement="picture"):
        both = [
            predict_test_clips(given.work / f"ultrasound-pictures-{fold}" / "run", data / str(fold) / "pictures")
            for fold in folds
        ]
        answers, wanted = ([name for names in part for name in names] for part in zip(*both, strict=True))
        row = {"set": "ultrasound", "arrangement": "picture", "start": "scratch", "minutes": given.minutes / 2}
        append_row(given.rows, row | compute_ultrasound_metrics(answers, wanted))


def compute_ultrasound_metrics(answers: Sequence[str], wanted: Sequence[str]) -> dict[str, Any]:
    """Share that is right with its 95 % interval (Wilson), mean over classes, and the share of the largest class."""
    right = int(sum(a == b for a, b in zip(answers, wanted, strict=True)))
    interval = binomtest(right, len(wanted)).proportion_ci(method="wilson")
    return {
        "number": len(wanted),
        "right": right / len(wanted),
        "low": float(interval.low),
        "high": float(interval.high),
        "balanced": float(balanced_accuracy_score(wanted, answers)),
        "largest": Counter(wanted).most_common(1)[0][1] / len(wanted),
    }


def copy_few(data: Path, home: Path, count: int, seed: int) -> Path:
    """A dataset with `count` training clips of each class, and the test clips."""
    if not home.is_dir():
        rng = np.random.default_rng(seed)
        for folder in sorted((data / "train").iterdir()):
            (home / "train" / folder.name).mkdir(parents=True)
            files = sorted(folder.iterdir())
            for index in rng.choice(len(files), count, replace=False):
                shutil.copy(files[index], home / "train" / folder.name)
        shutil.copytree(data / "test", home / "test")
        shutil.copytree(data / "test", home / "val")  # judged once, at the end: chooses nothing
    return home


def learn_from_few(given: argparse.Namespace) -> None:
    """Train an encoder without labels, then both ways on few labels, and append a row for each seed."""
    data = write_digits(given.work / "digits") / "clips"
    objective = {"recipe": "videomae", "model": "VideoMAE-64x6/4x2", "frames": 8}
    encoder = timed_run(given.work / "videomae", data, given.minutes, **objective)
    for count, steps in STEPS_BY_LABELS.items():
        for seed in SEEDS:
            part = copy_few(data, given.work / "few" / f"{count}-{seed}", count, seed)
            for way, options in FEW_LABEL_OPTIONS.items():
                asked = {"set": "few", "way": way, "count": count, "seed": seed}
                if has_row(given.rows, **asked):
                    continue
                home = given.work / "few" / f"{count}-{seed}-{way.replace(' ', '-')}"
                start = {"init": str(encoder)} if way == "after VideoMAE" else {}
                shared: dict[str, Any] = {"steps": steps, "batch_size": 32, "frames": 8, "seed": seed}
                shared |= {"progress": False, "device": "cpu", "evaluate_every": NEVER, "save_every": NEVER}
                train_or_load(home, part, **options, **start, **shared)
                append_row(
                    given.rows, asked | {"steps": steps, "minutes": given.minutes} | compute_digit_metrics(home, data)
                )


def build_page(rows: list[dict[str, Any]]) -> str:
    """The tables."""
    lines = [
        f"# Clips that were learned, {time.strftime('%Y-%m-%d')}",
        "",
        f"{get_processor_name()}, 1 thread, torch {torch.__version__}. What is compared, and the commands: benchmarks/learned_clips.py.",
    ]
    digits = [row for row in rows if row["set"] == "digits"]
    if digits:
        lines += [
            "",
            "## Moving digits",
            "",
            f"40 classes, digit and direction; {digits[0]['number']} test clips of digits that were not trained on, one run each.",
            "",
            "| arrangement | start | minutes of one core | epochs of clips | class right | digit | direction |",
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
            f"The same test clips; the mean of {len(SEEDS)} seeds, lowest and highest. VideoMAE had {few[0]['minutes']:g} minutes of one core.",
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
        first = ultrasound[0]
        lines += [
            "",
            "## Ultrasound clips of lungs",
            "",
            f"{first['number']} clips of three classes, split by patient, each answered by a run that has not seen its patient. The largest class has {first['largest']:.1%}.",
            "",
            "| arrangement | start | minutes of one core | right | 95 % interval | mean over classes |",
            "|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {row['arrangement']} | {row['start']} | {row['minutes']:g} | {row['right']:.1%} | {row['low']:.1%} to {row['high']:.1%} | {row['balanced']:.1%} |"
            for row in ultrasound
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Make the rows that lack, or print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("digits", "videomae", "ultrasound", "page"))
    parser.add_argument("folder", type=Path, nargs="?", help="of the ultrasound clips")
    parser.add_argument("--work", type=Path, help="where clips and runs are kept")
    parser.add_argument("--rows", type=Path, required=True, help="a file that rows are appended to")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--starts", nargs="+", default=["scratch", "pictures"], choices=("scratch", "pictures"))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.what == "page":
        text = build_page(read_rows(given.rows))
        print(text)
        if given.out:
            given.out.write_text(text)
        return
    given.work.mkdir(parents=True, exist_ok=True)
    {"digits": learn_digits, "videomae": learn_from_few, "ultrasound": learn_ultrasound}[given.what](given)


if __name__ == "__main__":
    main()
