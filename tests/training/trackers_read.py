"""What trackers wrote, read back by their own libraries, or by the format of their files: {figure: [(step, value), …]}."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vitreous.training.folder import RunFolder, read_json_lines

MetricHistory = dict[str, list[tuple[int, float]]]


def read_metrics(folder: Path) -> MetricHistory:
    """The figures of metrics.jsonl."""
    figures: MetricHistory = {}
    for line in read_json_lines(RunFolder(folder).metrics):
        for name, value in line.items():
            if value is not None and name != "step":
                figures.setdefault(name, []).append((line["step"], value))
    return figures


def read_tensorboard(folder: Path) -> MetricHistory:
    """The scalars of RUN/tensorboard, as TensorBoard shows them."""
    events = load_events(folder)
    return {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def load_events(folder: Path) -> Any:
    """TensorBoard's reader of all event files of a run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "images": 0})
    events.Reload()
    return events


def iterate_wandb_records(path: Path) -> Iterator[Any]:
    """The records of an off-line file of wandb: a LevelDB log after a header of seven bytes, each a Record."""
    from wandb.proto import wandb_internal_pb2 as proto

    content, place, whole = path.read_bytes(), 7, b""
    while place + 7 <= len(content):
        left = 32_768 - place % 32_768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", content[place : place + 7])
        whole += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = proto.Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def read_wandb(folder: Path) -> tuple[MetricHistory, list[Any]]:
    """The history of all off-line files of a run in the order in which they were made, and all records."""
    figures: MetricHistory = {}
    paths = sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    records = [record for path in paths for record in iterate_wandb_records(path)]
    for record in records:
        if record.WhichOneof("record_type") != "history":
            continue
        items = [(item.key or item.nested_key[0], item) for item in record.history.item if len(item.nested_key) < 2]
        line = {name: json.loads(item.value_json) for name, item in items}  # pictures have nested keys
        for name, value in line.items():
            if isinstance(value, (int, float)) and not name.startswith("_") and name != "step":
                figures.setdefault(name, []).append((line["step"], value))
    return figures, records


def read_mlflow(identity: str) -> MetricHistory:
    """The metrics of a run in the store that MLFLOW_TRACKING_URI names."""
    from mlflow import MlflowClient

    client = MlflowClient()
    names = client.get_run(identity).data.metrics
    return {name: sorted((m.step, m.value) for m in client.get_metric_history(identity, name)) for name in names}
