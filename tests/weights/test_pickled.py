"""PyTorch files: tensors are read, and code in pickles is never executed."""

from __future__ import annotations

import argparse
import io
import os
import pickle
import pickletools
import struct
import subprocess
import sys
import types
import zipfile
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path, PosixPath

import numpy as np
import pytest
import torch

from tests.weights.test_files import (
    PickleMarker,
    are_states_equal,
    collect_rejections,
    make_zip,
    patch_zip_entry,
    to_npy_bytes,
)
from vitreous.errors import WeightsError
from vitreous.weights import pickled
from vitreous.weights.entry import TensorInfo
from vitreous.weights.files import open_weights_file

RUN_CHILD = pickled.run_unpickle_child  # tests/conftest.py replaces this function


@pytest.fixture
def use_child_process(monkeypatch):
    """Start the child process as outside the tests."""
    monkeypatch.setattr(pickled, "run_unpickle_child", RUN_CHILD)


def to_torch_bytes(content, zip: bool = True, protocol: int = 2) -> bytes:
    """Return the output of torch.save."""
    file = io.BytesIO()
    torch.save(content, file, _use_new_zipfile_serialization=zip, pickle_protocol=protocol)
    return file.getvalue()


def replace_members(content: bytes, replaced: dict[str, bytes | None], method: int = zipfile.ZIP_STORED) -> bytes:
    """Return a zip with members replaced, added or removed (None); names are relative to the archive's folder."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    folder = next(iter(members)).split("/")[0]
    members |= {f"{folder}/{name}": value for name, value in replaced.items()}
    return make_zip({name: value for name, value in members.items() if value is not None}, method)


def make_call_pickle(name: str, command: str) -> bytes:
    """Return a protocol 0 pickle that calls a function by name, which Python's pickler no longer writes."""
    return f"c{name.replace('.', chr(10))}\n(S'{command}'\ntR.".encode()


def make_malicious_files(marker: Path) -> dict[str, tuple[bytes, str]]:
    """Map file names to (content that creates `marker` if unpickled, text of the message)."""
    evil, weights = PickleMarker(marker), torch.arange(6.0)
    valid_file, zip_file, legacy = (
        to_torch_bytes({"w": weights}),
        to_torch_bytes({"w": weights, "x": evil}),
        to_torch_bytes({"w": weights, "x": evil}, zip=False),
    )
    payload = pickle.dumps({"w": evil}, protocol=2)
    system_name = f"{os.system.__module__}.system"
    text = make_call_pickle("os.system", f"touch {marker}")
    cases = {
        "zip.pt": (zip_file, system_name),
        "legacy.pt": (legacy, system_name),
        "legacy.pth": (legacy, system_name),
        "zip.bin": (zip_file, system_name),
        "renamed-zip.safetensors": (zip_file, system_name),
        "renamed-legacy.safetensors": (legacy, system_name),
        "renamed-raw.safetensors": (payload, system_name),
        "renamed.npz": (zip_file, system_name),
        "no suffix": (zip_file, system_name),
        "text.pkl": (text, "os.system"),
        "text.bin": (text, "os.system"),
        "text.safetensors": (text, "header length does not match the file size"),
        "text without a suffix": (text, "not a weights file"),
        "instance.pkl": (f"(S'touch {marker}'\nios\nsystem\n.".encode(), "instruction STRING"),
        "object.pkl": (b"\x80\2(cos\nsystem\nX\1\0\0\0xo.", "os.system"),
        "extension.pkl": (b"\x80\2\x82\1.", "instruction EXT1"),
        "persistent.pkl": (b"Pxyz\n.", "instruction PERSID"),
        "second.pt": (pickle.dumps(pickled.LEGACY_MAGIC, 2) + payload, system_name),
        "nested in npz.npz": (make_zip({"a.npy": to_npy_bytes(np.zeros(2)), "evil.pkl": payload}), "evil.pkl"),
        "array.npz": (make_zip({"a.npy": payload}), "which is not an array"),
        "two pickles.pt": (replace_members(valid_file, {"sub/data.pkl": payload}), "sub/data.pkl"),
        "the same name twice.pt": (
            replace_members(valid_file, {"data.pkx": payload}).replace(b"data.pkx", b"data.pkl"),
            "twice",
        ),
        "capitals.pt": (replace_members(valid_file, {"data.pkl": None, "DATA.PKL": payload}), "DATA.PKL"),
        "upper case name.pt": (replace_members(valid_file, {"DATA.PKL": payload}), "DATA.PKL"),
        "another folder.pt": (make_zip({"a/data.pkl": payload, "b/data.pkl": payload}), "b/data.pkl"),
        "script.pt": (replace_members(valid_file, {"constants.pkl": payload}), "TorchScript"),
        "code.pt": (replace_members(valid_file, {"code/__torch__.py": b"import os"}), "TorchScript"),
        "extra.pt": (replace_members(valid_file, {"extra": payload}), "extra"),
        "deflated.pt": (replace_members(zip_file, {}, zipfile.ZIP_DEFLATED), "compressed"),
        "wrong checksum.pt": (zip_file.replace(b"touch", b"tOuch", 1), "checksum"),
        "encrypted.pt": (patch_zip_entry(zip_file, 8, b"\1\x08"), "encrypted"),
        "encrypted in the directory.pt": (patch_zip_entry(zip_file, 8, b"\1\x08", local=False), "encrypted"),
        "encrypted in the member.pt": (
            patch_zip_entry(zip_file, 8, b"\1\x08", directory=False),
            "contradicts its directory",
        ),
        "another method.pt": (patch_zip_entry(zip_file, 10, b"\x63\0"), "method 99"),
        "after the pickle.pt": (
            replace_members(valid_file, {"data.pkl": read_zipped_pickle(valid_file) + payload}),
            "after its pickle",
        ),
        "module.pt": (to_torch_bytes(torch.nn.Linear(2, 2)), "torch.nn.modules.linear.Linear"),
        "array alone.pt": (to_torch_bytes({"w": np.zeros(3)}), "no tensors"),
        "settings alone.pt": (to_torch_bytes(argparse.Namespace(w=weights)), "dict"),
        "inert call of a function.pt": (
            to_torch_bytes({"w": weights, "x": evil, "args": argparse.Namespace()}),
            system_name,
        ),
        "function inside.pt": (
            to_torch_bytes({"w": weights, "f": torch.nn.functional.relu}),
            "torch.nn.functional.relu",
        ),
        "code by name.pt": (to_torch_bytes({"w": weights, "f": eval}), "eval"),
    }
    for protocol in (1, 2, 3, 4, 5):
        cases[f"raw {protocol}.pkl"] = (pickle.dumps({"w": evil}, protocol), system_name)
        cases[f"zip {protocol}.pt"] = (
            to_torch_bytes({"w": weights, "x": evil}, protocol=protocol),
            system_name if protocol > 1 else "instruction INT",
        )
    return cases


def read_zipped_pickle(content: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))


class Settings(dict):
    """A dict subclass of another module, like the settings of many training scripts."""


Settings.__module__, Settings.__qualname__, Settings.__name__ = "yacs.config", "CfgNode", "CfgNode"


@pytest.mark.parametrize("zip", [True, False])
def test_other_objects_in_a_checkpoint_are_not_executed(tmp_path, monkeypatch, zip):
    other_objects = {
        "args": argparse.Namespace(arch="vit", lr=5e-4, center=torch.zeros(2), nested=argparse.Namespace(x=[1])),
        "metric": np.float64(71.2),
        "flag": np.bool_(True),
        "epoch": np.int64(3),
        "scores": np.arange(4.0),
        "names": np.array(["a", "b"]),
        "out": PosixPath("/runs/1"),
        "state": defaultdict(dict, {0: {"step": torch.tensor(3.0)}}),
        "seen": {1, 2},
        "device": torch.device("cpu"),
        "counts": Counter("abc"),
        "raw": b"\x00\xff",
    }
    settings = Settings(lr=1e-3)
    settings.immutable = True  # type: ignore[attr-defined]
    module = types.ModuleType("yacs.config")
    module.CfgNode = Settings  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "yacs", types.ModuleType("yacs"))
    monkeypatch.setitem(sys.modules, "yacs.config", module)
    content = to_torch_bytes({**other_objects, "config": settings, "model": {"w": torch.arange(6.0)}}, zip)
    monkeypatch.undo()
    monkeypatch.setattr(pickled, "run_unpickle_child", RUN_CHILD)
    (tmp_path / "a.pth").write_bytes(content)
    tensors_read = open_weights_file(tmp_path / "a.pth").read()
    assert are_states_equal(tensors_read, {"w": torch.arange(6.0)})


def test_code_in_pickles_is_rejected_and_not_executed(tmp_path):
    marker = tmp_path / "marker"
    cases = make_malicious_files(marker)
    for name, (content, _) in cases.items():
        (tmp_path / name).write_bytes(content)
    refusals = collect_rejections([tmp_path / name for name in cases])
    assert {name: refusals[name] for name, (_, word) in cases.items() if word not in refusals[name]} == {}
    assert not marker.exists()


def test_the_attacks_are_real(tmp_path):
    """Python's unpickler executes the payloads, so the rejected files are real attacks."""
    marker = tmp_path / "marker"
    for payload in (make_malicious_files(marker)["raw 2.pkl"][0], make_malicious_files(marker)["text.pkl"][0]):
        pickle.loads(payload)
        assert marker.exists()
        marker.unlink()


STORAGE_PICKLE = b"(X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\0%dX\3\0\0\0cpu%stQ"


def encode_integer(number: int) -> bytes:
    return b"\x8a\x09" + number.to_bytes(9, "little", signed=True)


def make_tensor_pickle(
    shape: tuple[int, ...], stride: tuple[int, ...], elements: int = 4, offset: int = 0, key: int = 0
) -> bytes:
    """Return the pickle instructions that build a float32 tensor from a storage."""
    lists = [b"(" + b"".join(encode_integer(number) for number in numbers) + b"t" for numbers in (shape, stride)]
    storage = STORAGE_PICKLE % (key, encode_integer(elements))
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n("
        + storage
        + encode_integer(offset)
        + lists[0]
        + lists[1]
        + b"\x89ccollections\nOrderedDict\n)RtR"
    )


def make_checkpoint(*tensors: bytes, storage: bytes = bytes(16), method: int = zipfile.ZIP_STORED) -> bytes:
    """Return a PyTorch zip with the tensors a, b, ... in one storage."""
    items = b"".join(b"X\1\0\0\0" + bytes([97 + index]) + tensor_pickle for index, tensor_pickle in enumerate(tensors))
    members = {
        "x/data.pkl": b"\x80\2}(" + items + b"u.",
        "x/byteorder": b"little",
        "x/data/0": storage,
        "x/version": b"3\n",
    }
    return make_zip(members, method)


def make_malformed_files() -> dict[str, tuple[bytes, str]]:
    """Map file names to (malformed content without code, text of the message)."""
    valid_file, legacy = to_torch_bytes({"w": torch.arange(6.0)}), to_torch_bytes({"w": torch.arange(6.0)}, zip=False)
    start = b"".join(
        pickle.dumps(value, 2) for value in (pickled.LEGACY_MAGIC, pickled.LEGACY_PROTOCOL, {"little_endian": True})
    )
    nested_pickle = b"".join(b"q" + bytes([i]) + b"h" + bytes([i]) + b"\x86" for i in range(200))
    return {
        "stride 0": (to_torch_bytes({"a": torch.zeros(1).expand(10**12)}), "shape 1000000000000 that repeats"),
        "stride 0, stored": (make_checkpoint(make_tensor_pickle((10**6, 10**6), (0, 0))), "repeats one number"),
        "beyond its storage": (make_checkpoint(make_tensor_pickle((5,), (1,))), "exceeds its storage of 4 numbers"),
        "beyond its storage by the offset": (
            make_checkpoint(make_tensor_pickle((4,), (1,), offset=1)),
            "exceeds its storage of 4",
        ),
        "beyond its storage by the stride": (
            make_checkpoint(make_tensor_pickle((2, 2), (3, 1))),
            "exceeds its storage of 4",
        ),
        "overlapping itself": (make_checkpoint(make_tensor_pickle((3, 2), (1, 1))), "exceeds its storage of 4"),
        "a huge size": (make_checkpoint(make_tensor_pickle((1 << 62, 1 << 62), (1, 1))), "exceeds its storage of 4"),
        "a negative size": (make_checkpoint(make_tensor_pickle((-1,), (1,))), "damaged pickle"),
        "a negative stride": (make_checkpoint(make_tensor_pickle((2,), (-1,), offset=3)), "damaged pickle"),
        "17 axes": (make_checkpoint(make_tensor_pickle((1,) * 17, (1,) * 17)), "damaged pickle"),
        "storage larger than its member": (
            make_checkpoint(make_tensor_pickle((5,), (1,), 5)),
            "16 bytes for a storage of 5",
        ),
        "storage of 4 TB": (
            make_checkpoint(make_tensor_pickle((1 << 40,), (1,), 1 << 40)),
            "16 bytes for a storage of 1,099,511,627,776",
        ),
        "storage smaller than its member": (
            make_checkpoint(make_tensor_pickle((3,), (1,), 3)),
            "16 bytes for a storage of 3",
        ),
        "no such storage": (make_checkpoint(make_tensor_pickle((4,), (1,), key=7)), "none for a storage"),
        "storage in two sizes": (
            make_checkpoint(make_tensor_pickle((4,), (1,)), make_tensor_pickle((2,), (1,), 2)),
            "two sizes",
        ),
        "highly compressed storage": (
            make_checkpoint(make_tensor_pickle((4,), (1,)), storage=bytes(1 << 20), method=8),
            "compressed",
        ),
        "one storage as a thousand tensors": (
            make_zip({"x/data.pkl": b"\x80\2}(" + repeat_tensor_pickles(500) + b"u.", "x/data/0": bytes(4 << 20)}),
            "its tensors would take 2,097,152,000",
        ),
        "no elements": (make_checkpoint(make_tensor_pickle((0, 3), (3, 1))), "without elements"),
        "no tensors": (
            to_torch_bytes({"epoch": 3, "weights": {"w": torch.zeros(1)}}),
            "it has the keys epoch, weights",
        ),
        "a single tensor": (to_torch_bytes(torch.zeros(3)), "no state dict"),
        "a list of tensors": (to_torch_bytes([torch.zeros(3)]), "no state dict"),
        "tensors with integer names": (to_torch_bytes({1: torch.zeros(3)}), "numbers as keys"),
        "a path as a name": (to_torch_bytes({"../../w": torch.zeros(3)}), "not a valid name"),
        "complex": (to_torch_bytes({"w": torch.zeros(3, dtype=torch.complex64)}), "ComplexFloatStorage"),
        "sparse": (to_torch_bytes({"w": torch.eye(3).to_sparse()}), "_rebuild_sparse_tensor"),
        "negated view": (
            to_torch_bytes({"w": torch.zeros(2, dtype=torch.complex64).conj().imag}),
            "calls torch._utils._rebuild_tensor_v2 with invalid arguments",
        ),
        "protocol 4": (to_torch_bytes({"w": torch.zeros(3)}, protocol=4), "pickle protocol 4"),
        "other byte order": (replace_members(valid_file, {"byteorder": b"big"}), "big-endian"),
        "half": (valid_file[: len(valid_file) // 2], "truncated"),
        "not a pickle": (replace_members(valid_file, {"data.pkl": None}), "neither numpy arrays nor"),
        "a pickle of nothing": (replace_members(valid_file, {"data.pkl": b""}), "damaged pickle"),
        "truncated pickle": (
            replace_members(valid_file, {"data.pkl": read_zipped_pickle(valid_file)[:-9]}),
            "damaged pickle",
        ),
        "a pickle of 5 MB": (
            replace_members(valid_file, {"data.pkl": b"\x80\2" + b"N" * (5 << 20) + b"."}),
            "a pickle over",
        ),
        "a pickle of a million lists": (
            replace_members(valid_file, {"data.pkl": b"\x80\2" + b"]" * 1_000_000 + b"."}),
            "instructions",
        ),
        "an empty stack": (replace_members(valid_file, {"data.pkl": b"\x80\2R."}), "damaged pickle"),
        "missing mark": (replace_members(valid_file, {"data.pkl": b"\x80\2t."}), "damaged pickle"),
        "missing memo": (replace_members(valid_file, {"data.pkl": b"\x80\2h\7."}), "damaged pickle"),
        "endless memo": (replace_members(valid_file, {"data.pkl": b"\x80\2Nr\xff\xff\xff\x7f."}), "no state dict"),
        "a text of 4 GB": (replace_members(valid_file, {"data.pkl": b"\x80\2X\xff\xff\xff\xffabc."}), "damaged pickle"),
        "a key with an expensive hash": (
            replace_members(valid_file, {"data.pkl": b"\x80\2})" + nested_pickle + b"Ns."}),
            "a key that is a tuple",
        ),
        "a dict as key": (replace_members(valid_file, {"data.pkl": b"\x80\2}}Ns."}), "a key that is a dict"),
        "items set on a number": (replace_members(valid_file, {"data.pkl": b"\x80\2K\1K\1K\1s."}), "damaged pickle"),
        "attributes": (
            replace_members(valid_file, {"data.pkl": b"\x80\2}}X\5\0\0\0itemsK\1sb."}),
            "sets the attributes",
        ),
        "a call of a storage": (
            replace_members(valid_file, {"data.pkl": b"\x80\2ctorch\nFloatStorage\n)R."}),
            "calls a function that does not",
        ),
        "a call of a number": (
            replace_members(valid_file, {"data.pkl": b"\x80\2K\1)R."}),
            "calls a function that does not",
        ),
        "legacy, truncated": (legacy[:-1], "tensors need"),
        "legacy, trailing data": (legacy + b"\0", "tensors need"),
        "legacy, other size": (
            legacy[:-32] + struct.pack("<q", 7) + legacy[-24:],
            "size is not that of its 6 float32 numbers",
        ),
        "legacy, no storages": (start + b"\x80\2}." + b"\x80\2]X\1\0\0\0aa.", "lists storages that differ"),
        "legacy, other version": (
            pickle.dumps(pickled.LEGACY_MAGIC, 2) + pickle.dumps(7, 2) + pickle.dumps({}, 2),
            "another version",
        ),
        "legacy, no magic": (pickle.dumps({"w": [1.0, 2.0]}, 2), "not one that torch.save writes"),
        "legacy, cut early": (start, "damaged pickle"),
    }


def repeat_tensor_pickles(count: int) -> bytes:
    """Return `count` tensors, t0, t1, ..., that share one storage of a million values."""
    names = [f"t{index}".encode() for index in range(count)]
    return b"".join(
        b"X" + struct.pack("<I", len(name)) + name + make_tensor_pickle((1 << 20,), (1,), 1 << 20) for name in names
    )


def test_malformed_checkpoints_are_rejected_before_allocation(tmp_path):
    cases = make_malformed_files()
    for name, (content, _) in cases.items():
        (tmp_path / f"{name}.pt").write_bytes(content)
    refusals = collect_rejections([tmp_path / f"{name}.pt" for name in cases])
    assert {
        name: refusals[f"{name}.pt"] for name, (_, word) in cases.items() if word not in refusals[f"{name}.pt"]
    } == {}


def test_fuzzed_pickles_are_rejected_or_give_the_same_tensors(tmp_path):
    import random

    rng, path = random.Random(0), tmp_path / "fuzzed.pt"
    valid_file = to_torch_bytes(
        {"model": {"a": torch.arange(6.0).reshape(2, 3).t(), "b": torch.nn.Parameter(torch.ones(2))}, "epoch": 3}
    )
    text, accepted = read_zipped_pickle(valid_file), 0
    for trial in range(600):
        mutant = bytearray(text)
        if trial < len(text):
            del mutant[trial:]
        else:
            for _ in range(rng.randint(1, 3)):
                mutant[rng.randrange(len(mutant))] = rng.choice([rng.randrange(256), *b"}]()tsub.RQhq"])
        path.write_bytes(replace_members(valid_file, {"data.pkl": bytes(mutant)}))
        try:
            source = open_weights_file(path)
        except WeightsError:
            continue
        accepted += 1
        assert all(entry.nbytes <= 4 * (6 + 2) for entry in source.entries.values())
    assert 0 < accepted < 200


def make_states() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(6, 4, generator=generator)
    return {
        "module.weight": weight,
        "turned": weight.t(),
        "part": weight[1:3, ::2],
        "half": weight.half(),
        "brain": weight.bfloat16(),
        "count": torch.tensor(7),
        "flags": weight > 0,
        "codes": torch.arange(5, dtype=torch.int8),
    }


def test_plain_and_nested_files_are_described_correctly(tmp_path):
    tensors = make_states()
    entries = {name: TensorInfo(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()}
    other_objects = {
        "epoch": 3,
        "args": {"lr": 1e-3, "betas": (0.9, 0.95), "note": None, "list": [True, "a"]},
        "size": torch.Size([2, 3]),
    }
    other_objects |= {
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"params": [0]}]},
        "dtype": torch.float32,
    }
    contents = {"": OrderedDict(tensors), **{key: {key: tensors, **other_objects} for key in pickled.STATE_DICT_KEYS}}
    for section, content in contents.items():
        for zip in (True, False):
            path = tmp_path / "any"
            path.write_bytes(to_torch_bytes(content, zip))
            source = open_weights_file(path)
            assert (source.kind, source.section, source.entries) == ("pickle", section, entries)
    path.write_bytes(
        to_torch_bytes({"student": tensors, "model": {"w": torch.zeros(1)}, "teacher": tensors, "ema": 0.999})
    )
    # the averaged weights are preferred; "ema" is a number here, not a state dict
    assert open_weights_file(path).section == "teacher"
    path.write_bytes(to_torch_bytes({"w": torch.zeros(1), "model": 3}))
    assert open_weights_file(path).section == ""


def count_calls(work) -> int:
    """Return the number of Python and C function calls made by `work`."""
    calls = 0

    def count_event(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count_event)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def test_opening_time_is_linear_in_the_number_of_tensors(tmp_path):
    counts = []
    for tensors in (250, 1000):
        path = tmp_path / f"{tensors}.pt"
        torch.save({"model": {f"blocks.{i}.weight": torch.zeros(2, 3) for i in range(tensors)}}, path)
        counts.append(count_calls(lambda path=path: open_weights_file(path)))
        assert len(open_weights_file(path).entries) == tensors
    assert counts[1] < 4.5 * counts[0]


# The four reads below start the child process, which imports torch.


def test_state_dicts_are_read_bit_identically(tmp_path):
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    path = tmp_path / "plain.pt"
    torch.save(module.state_dict(), path)
    assert are_states_equal(open_weights_file(path).read(), dict(module.state_dict()))


def test_nested_files_are_read_bit_identically_without_leftovers(tmp_path, monkeypatch, use_child_process):
    tensors = make_states()
    path, scratch = tmp_path / "a checkpoint.bin", tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", os.fspath(scratch))
    torch.save(
        {"model": tensors | {"p": torch.nn.Parameter(tensors["brain"]), "bad": torch.tensor(float("nan"))}, "epoch": 3},
        path,
    )
    (tmp_path / "torch.py").write_text("raise SystemExit('the torch of the working folder')")
    monkeypatch.chdir(tmp_path)
    source = open_weights_file(path.name)
    tensors_read = source.read([name for name in source.entries if name != "bad"])
    assert are_states_equal(tensors_read, tensors | {"p": tensors["brain"]})
    assert all(value.is_contiguous() and not value.requires_grad for value in tensors_read.values())
    assert list(scratch.iterdir()) == []


def test_legacy_files_are_read_bit_identically_and_nan_is_rejected(tmp_path):
    path = tmp_path / "legacy.pth"
    torch.save(
        {"teacher": make_states() | {"bad": torch.tensor([1.0, float("nan")])}},
        path,
        _use_new_zipfile_serialization=False,
    )
    source, read_tensors = open_weights_file(path), pickled.read_pickled_tensors
    tensors_read = {}

    def read_once(*arguments):
        tensors_read.update(read_tensors(*arguments))
        return dict(tensors_read)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pickled, "read_pickled_tensors", read_once)
        with pytest.raises(WeightsError, match="a value in bad that is NaN or infinite"):
            source.read()
    del tensors_read["bad"]
    assert are_states_equal(tensors_read, make_states())


def test_a_flipped_bit_in_a_storage_is_noticed(tmp_path):
    """torch itself does not verify the checksums of a zip."""
    path = tmp_path / "damaged.pt"
    content = bytearray(to_torch_bytes({"w": torch.full((1000,), 1.5)}))
    at = content.index(struct.pack("<f", 1.5) * 1000) + 2003
    content[at] ^= 64
    path.write_bytes(content)
    source = open_weights_file(path)
    with pytest.raises(WeightsError, match=r"checksum of \w+/data/0 is wrong"):
        source.read()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux enforces RLIMIT_AS")
def test_the_child_process_has_memory_and_time_limits(tmp_path, monkeypatch, use_child_process):
    path, script = tmp_path / "plain.pt", tmp_path / "child.py"
    torch.save({"w": torch.zeros(3)}, path)
    monkeypatch.setattr(pickled, "UNPICKLE_SCRIPT", script)
    script.write_text(f"import sys; sys.path.insert(0, {os.fspath(Path(pickled.__file__).parent)!r})\n" + GREEDY_SCRIPT)
    with pytest.raises(WeightsError, match="MemoryError"):
        open_weights_file(path).read()
    monkeypatch.setattr(pickled, "CHILD_TIMEOUT_SECONDS", 1)
    script.write_text("import time; time.sleep(60)")
    with pytest.raises(WeightsError, match="not read within 1 s"):
        open_weights_file(path).read()
    script.write_text("import os; os.kill(os.getpid(), 9)")
    with pytest.raises(WeightsError, match="ended with code -9"):
        open_weights_file(path).read()


GREEDY_SCRIPT = """
import json, unpickle
unpickle.extract_tensors = lambda order: bytearray(12 << 30)
raise SystemExit(unpickle.main())
"""


def test_the_child_process_rejects_objects_other_than_tensors(tmp_path, use_child_process):
    """torch rejects code as well, should the scan of the pickle miss it."""
    marker, path = tmp_path / "marker", tmp_path / "evil.pt"
    path.write_bytes(to_torch_bytes({"x": PickleMarker(marker)}))
    with pytest.raises(WeightsError, match="cannot be read"):
        pickled.read_pickled_tensors(path, "", {"x": TensorInfo((1,), "float32")})
    assert not marker.exists()


def test_all_opcodes_of_torch_save_are_allowed():
    text = read_zipped_pickle(to_torch_bytes({"model": make_states(), "l": [1, 2.5, None, {}, []]}))
    assert not {
        code.name for code, _, _ in pickletools.genops(text) if not pickled.ALLOWED_OPCODES.fullmatch(code.name)
    }


def test_the_describer_rejects_calls_and_attribute_changes(tmp_path):
    """Second line of defence: names become descriptions, which cannot be called and have no attributes to set."""
    path = tmp_path / "evil.pt"
    for text in (b"cos\nsystem\n(X\1\0\0\0xtR.", b"(X\1\0\0\0xios\nsystem\n.", b"\x80\2}}X\5\0\0\0itemsK\1sb."):
        with pytest.raises((WeightsError, TypeError, AttributeError)):
            pickled.PickleDescriber(path, io.BytesIO(text), {}).load()


def test_describing_a_file_starts_no_process(tmp_path):
    path = tmp_path / "plain.pt"
    torch.save({"w": torch.zeros(3)}, path)
    script = (
        "import sys; from vitreous.weights.files import open_weights_file as o; o(sys.argv[1]); print('torch' in "
        "sys.modules)"
    )
    process = subprocess.run(
        [sys.executable, "-c", script, os.fspath(path)], capture_output=True, text=True, timeout=280
    )
    assert process.stdout == "False\n"
