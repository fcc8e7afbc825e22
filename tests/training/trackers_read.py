"""Histories written by trackers, read with their libraries or from the file format: {metric: [(step, value), …]}."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vitreous.training.folder import RunFolder, read_json_lines

MetricHistory = dict[str, list[tuple[int, float]]]


def read_metrics(folder: Path) -> MetricHistory:
    """The metrics of metrics.jsonl."""
    history: MetricHistory = {}
    for line in read_json_lines(RunFolder(folder).metrics):
        for name, value in line.items():
            if value is not None and name != "step":
                history.setdefault(name, []).append((line["step"], value))
    return history


def read_tensorboard(folder: Path) -> MetricHistory:
    """The scalars of RUN/tensorboard, read by TensorBoard."""
    events = load_events(folder)
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def load_events(folder: Path) -> Any:
    """Load all event files of a run with TensorBoard's reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "images": 0})
    events.Reload()
    return events


def iterate_wandb_records(path: Path) -> Iterator[Any]:
    """The records of an offline wandb file: a LevelDB log after a header of seven bytes; each item is a Record."""
    from wandb.proto import wandb_internal_pb2 as proto

    content, offset, record_bytes = path.read_bytes(), 7, b""
    while offset + 7 <= len(content):
        block_left = 32_768 - offset % 32_768
        if block_left < 7:
            offset += block_left
            continue
        _, length, chunk_type = struct.unpack("<IHB", content[offset : offset + 7])
        record_bytes += content[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if chunk_type in (1, 4):  # complete, or the last chunk of a record
            record = proto.Record()
            record.ParseFromString(record_bytes)
            record_bytes = b""
            yield record


def read_wandb(folder: Path) -> tuple[MetricHistory, list[Any]]:
    """The history of all offline files of a run, ordered by creation time, and all records."""
    history: MetricHistory = {}
    paths = sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    records = [record for path in paths for record in iterate_wandb_records(path)]
    for record in records:
        if record.WhichOneof("record_type") != "history":
            continue
        items = [(item.key or item.nested_key[0], item) for item in record.history.item if len(item.nested_key) < 2]
        line = {name: json.loads(item.value_json) for name, item in items}  # images have nested keys
        for name, value in line.items():
            if isinstance(value, (int, float)) and not name.startswith("_") and name != "step":
                history.setdefault(name, []).append((line["step"], value))
    return history, records


def read_mlflow(identity: str) -> MetricHistory:
    """The metrics of a run in the store at MLFLOW_TRACKING_URI."""
    from mlflow import MlflowClient

    client = MlflowClient()
    names = client.get_run(identity).data.metrics
    return {name: sorted((m.step, m.value) for m in client.get_metric_history(identity, name)) for name in names}
