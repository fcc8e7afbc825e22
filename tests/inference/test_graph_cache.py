"""Cached OpenVINO graphs: keyed by all their inputs, rebuilt if damaged, and optional where the cache cannot be
written."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.models.test_contracts import build_random_vit
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.inference import graph_cache as module
from vitreous.inference.engine import InferenceOptions, make_engine
from vitreous.inference.graph_cache import graph_cache_fields, hash_cache_fields, load_graph, load_or_build_graph

ov = pytest.importorskip("openvino")
PREPROCESS = ImagePreprocess((16, 16))
CACHE_FIELDS = {"format": 1, "sample_images": ["a", "b"]}


@pytest.fixture(autouse=True)
def graph_cache(tmp_path, monkeypatch):
    """An empty cache for one test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "vitreous" / "graphs"


def make_noise_batch(count=8, seed=0):
    return torch.randint(0, 256, (count, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


class GraphFactory:
    """Builds graphs that multiply by a factor, and counts the builds."""

    def __init__(self, factor=3.0):
        self.times, self.factor = 0, factor

    def __call__(self):
        self.times += 1
        parameter = ov.opset13.parameter([-1, 4], ov.Type.f32)
        return ov.Model([ov.opset13.multiply(parameter, np.full((1, 4), self.factor, np.float32))], [parameter])


def run_graph(graph):
    return ov.Core().compile_model(graph, "CPU")([np.ones((2, 4), np.float32)])[0]


def test_second_start_reuses_the_graph_with_bit_identical_outputs(graph_cache, monkeypatch):
    nncf = pytest.importorskip("nncf")
    times, original = [], nncf.quantize

    def count_call(*arguments, **named):
        times.append(1)
        return original(*arguments, **named)

    monkeypatch.setattr(nncf, "quantize", count_call)
    model = build_random_vit({}).eval()

    def started():
        return make_engine(
            model, PREPROCESS, InferenceOptions("cpu", "int8", "openvino"), lambda: make_noise_batch(seed=1)
        )(make_noise_batch())

    expected = started()
    assert len(times) == 1 and len(list(graph_cache.iterdir())) == 1
    assert torch.equal(started(), expected) and len(times) == 1


def test_graph_cache_key_covers_all_inputs(monkeypatch):
    monkeypatch.setenv("VITREOUS_CPU_ISA", "AVX512_CORE_BF16")
    model, images = build_random_vit({}), [sample[None].numpy() for sample in make_noise_batch()]
    keys = {hash_cache_fields(graph_cache_fields(model, PREPROCESS, images))}
    assert (
        hash_cache_fields(graph_cache_fields(build_random_vit({}), PREPROCESS, [image.copy() for image in images]))
        in keys
    )
    with torch.no_grad():
        model.head.bias[0] += 1
    keys.add(hash_cache_fields(graph_cache_fields(model, PREPROCESS, images)))
    keys.add(hash_cache_fields(graph_cache_fields(model, replace(PREPROCESS, std=(0.4, 0.5, 0.5)), images)))
    keys.add(hash_cache_fields(graph_cache_fields(model, PREPROCESS, images[1:])))
    keys.add(hash_cache_fields(graph_cache_fields(model, PREPROCESS, [images[0] ^ 1, *images[1:]])))
    for name in ("openvino", "nncf", "torch"):
        with monkeypatch.context() as patch:
            patch.setattr(module, "version", lambda package, name=name: "0.0" if package == name else "1.0")
            keys.add(hash_cache_fields(graph_cache_fields(model, PREPROCESS, images)))
    for level in ("AVX2", "AVX512_CORE_VNNI"):
        monkeypatch.setenv("VITREOUS_CPU_ISA", level)
        keys.add(hash_cache_fields(graph_cache_fields(model, PREPROCESS, images)))
    assert len(keys) == 10


def test_cached_graph_is_found_by_its_fields(graph_cache):
    make, other_factory = GraphFactory(), GraphFactory(5.0)
    assert (
        (run_graph(load_or_build_graph(ov, CACHE_FIELDS, make)) == 3).all()
        and (run_graph(load_or_build_graph(ov, CACHE_FIELDS, make)) == 3).all()
        and make.times == 1
    )
    assert (
        run_graph(load_or_build_graph(ov, CACHE_FIELDS | {"format": 2}, other_factory)) == 5
    ).all() and other_factory.times == 1
    assert len(list(graph_cache.iterdir())) == 2


@pytest.mark.parametrize(
    "harm",
    [
        lambda content: b"",
        lambda content: content[:-1],
        lambda content: content[: len(content) // 2],
        lambda content: content.replace(b"PK\x03\x04", b"PK\x03\x05", 1),
        lambda content: content[:-22],
        lambda content: content.replace(b"xml.npy", b"lmx.npy"),
        lambda content: content[:-20] + bytes([content[-20] ^ 1]) + content[-19:],
        lambda content: content.replace(b"Multiply", b"Additive"),
        lambda content: b"[]\n" + content,
        lambda content: b"\xff\xfe" + content,
    ],
)
def test_damaged_graph_file_is_rebuilt(graph_cache, harm):
    load_or_build_graph(ov, CACHE_FIELDS, GraphFactory())
    (path,) = graph_cache.iterdir()
    content_before = path.read_bytes()
    path.write_bytes(harm(content_before))
    make = GraphFactory()
    assert load_graph(path, CACHE_FIELDS) is None
    assert (run_graph(load_or_build_graph(ov, CACHE_FIELDS, make)) == 3).all() and make.times == 1
    assert (
        load_graph(path, CACHE_FIELDS) is not None
        and (run_graph(load_or_build_graph(ov, CACHE_FIELDS, make)) == 3).all()
        and make.times == 1
    )


def test_graph_file_of_another_key_is_not_used(graph_cache):
    load_or_build_graph(ov, CACHE_FIELDS, GraphFactory())
    load_or_build_graph(ov, CACHE_FIELDS | {"format": 2}, GraphFactory(5.0))
    path, other_path = (
        graph_cache / f"{hash_cache_fields(CACHE_FIELDS)}.graph",
        graph_cache / f"{hash_cache_fields(CACHE_FIELDS | {'format': 2})}.graph",
    )
    other_path.replace(path)
    assert (run_graph(load_or_build_graph(ov, CACHE_FIELDS, GraphFactory())) == 3).all()


def test_graph_that_openvino_fails_to_read_is_rebuilt(graph_cache):
    load_or_build_graph(ov, CACHE_FIELDS, GraphFactory())
    (path,) = graph_cache.iterdir()
    module.write_graph(path, CACHE_FIELDS, b"<net>", b"whole, and no graph")
    make = GraphFactory()
    assert (run_graph(load_or_build_graph(ov, CACHE_FIELDS, make)) == 3).all() and make.times == 1


@pytest.mark.parametrize("obstacle", ["a file for a folder", "a folder for a file", "no room to write the parts"])
def test_unwritable_cache_does_not_prevent_inference(graph_cache, obstacle, monkeypatch, tmp_path):
    if obstacle == "a file for a folder":
        graph_cache.parent.mkdir(parents=True)
        graph_cache.write_text("")
    elif obstacle == "a folder for a file":
        (graph_cache / f"{hash_cache_fields(CACHE_FIELDS)}.graph").mkdir(parents=True)
    else:
        monkeypatch.setattr(module, "TemporaryDirectory", lambda: (_ for _ in ()).throw(OSError("no room")))
    make = GraphFactory()
    assert (
        (run_graph(load_or_build_graph(ov, CACHE_FIELDS, make)) == 3).all()
        and (run_graph(load_or_build_graph(ov, CACHE_FIELDS, make)) == 3).all()
        and make.times == 2
    )
    assert not list(tmp_path.rglob("*.tmp"))


def test_the_least_recently_used_graphs_are_removed(graph_cache, monkeypatch):
    paths = [graph_cache / f"{hash_cache_fields(CACHE_FIELDS | {'format': index})}.graph" for index in range(4)]
    for index in range(3):
        load_or_build_graph(ov, CACHE_FIELDS | {"format": index}, GraphFactory())
        os.utime(paths[index], (index, index))
    monkeypatch.setattr(module, "MAX_GRAPH_BYTES", int(3.5 * paths[0].stat().st_size))
    # used again, so graph 1 is the least recently used
    load_or_build_graph(ov, CACHE_FIELDS | {"format": 0}, GraphFactory())
    load_or_build_graph(ov, CACHE_FIELDS | {"format": 3}, GraphFactory())
    assert [path.is_file() for path in paths] == [True, False, True, True]
