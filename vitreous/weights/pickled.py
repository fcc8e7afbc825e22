"""Read files of `torch.save` (.pt, .pth, .bin): scan them without executing them, then read tensors in a child process.

A pickle is a program. Its instructions and names are compared with those that torch.save writes (`scan_pickle`).
Python's unpickler then runs it with descriptions in place of tensors (`PickleDescriber`), so the content is known
before any tensor is read. torch reads the tensors with `weights_only`, in a child process with limits on memory and
time (`unpickle.py`).
"""

from __future__ import annotations

import io
import json
import os
import pickle
import pickletools
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, NoReturn

from vitreous.errors import WeightsError
from vitreous.system.children import run_shielded_process
from vitreous.weights.entry import (
    DOWNLOAD_AGAIN_HINT,
    DTYPE_BYTES,
    SAVE_AGAIN_HINT,
    SAVE_WITHOUT_OPTIMIZER_HINT,
    SUPPORTED_FILES_HINT,
    TensorInfo,
    reject_weights_file,
    sanitise_name,
)
from vitreous.weights.npz import UNPACK_ALLOWANCE_BYTES, CheckedZip
from vitreous.weights.pickle_names import (
    ALLOWED_NAMES,
    INERT_MAPPINGS,
    INERT_OBJECTS,
    STORAGE_DTYPES,
    InertMapping,
    InertObject,
    Storage,
    StorageClass,
    TensorStub,
)
from vitreous.weights.safetensors_file import read_safetensors

if TYPE_CHECKING:
    from torch import Tensor

MAX_PICKLE_BYTES = 4 << 20  # bytes; ten thousand tensors take less than half
MAX_PICKLE_OPCODES = 80_000  # instructions; a tensor takes about thirty
MAX_TENSOR_AXES = 16
MAX_SHARING_RATIO = 4  # maximum total size of the tensors relative to the file; tied weights are stored once
ALL_SECTIONS = "*"  # selects the state dicts under all keys: names are then KEY/NAME
#: keys of the state dicts of a model, preferred weights first
STATE_DICT_KEYS = ("model_ema", "ema", "teacher", "model", "state_dict", "student", "net", "module")
LEGACY_MAGIC, LEGACY_PROTOCOL = 0x1950A86A20F9469CFC6C, 1001  # start of a file in the format before zip
SAVE_SAFETENSORS_HINT = (
    "if you trust it, save only its tensors: safetensors.torch.save_file(model.state_dict(), 'model.safetensors')"
)
UNPICKLE_SCRIPT = Path(__file__).with_name("unpickle.py")
CHILD_MEMORY_BYTES = 8 << 30  # address space in bytes for torch's libraries and their working memory, doubled
CHILD_TIMEOUT_SECONDS, MIN_READ_BYTES_PER_SECOND = 120, 20 << 20

#: members that torch.save writes into a zip, under one folder
TORCH_ZIP_MEMBER = re.compile(
    r"data\.pkl|data/\d+|version|byteorder|\.format_version|\.storage_alignment|\.data/serialization_id"
)

#: instructions that torch.save writes; later protocols are parsed for their names, and then rejected
ALLOWED_OPCODES = re.compile(
    "PROTO|STOP|MARK|NONE|NEWTRUE|NEWFALSE|BININT[12]?|LONG1|BINFLOAT|(SHORT_)?BINUNICODE|SHORT_BINSTRING|EMPTY_TUPLE|"
    "EMPTY_LIST|EMPTY_DICT|TUPLE[123]?|APPENDS?|SETITEMS?|(LONG_)?BINPUT|(LONG_)?BINGET|GLOBAL|REDUCE|BUILD|NEWOBJ|BINPERSID|"
    "FRAME|MEMOIZE|STACK_GLOBAL"
)
TEXT_OPCODES = {"BINUNICODE", "SHORT_BINUNICODE"}


def scan_pickle(path: Path, file: BinaryIO) -> None:
    """Check the instructions of one pickle without executing them, and return to its start. Raises WeightsError for a
    damaged pickle, an instruction or a name that tensors do not need, too many instructions, and a protocol that
    torch.load with `weights_only` does not support."""
    start, protocol, previous_code = file.tell(), 0, ""
    texts: list[str] = []  # in order, for the names that STACK_GLOBAL takes from the stack
    memo: dict[int, str | None] = {}
    argument: Any
    for count, (opcode, argument, _) in enumerate(pickletools.genops(file)):
        code, name = opcode.name, None
        if count > MAX_PICKLE_OPCODES:
            hint = SAVE_WITHOUT_OPTIMIZER_HINT
            reject_weights_file(path, f"has a pickle of more than {MAX_PICKLE_OPCODES:,} instructions", hint)
        if code in ("GLOBAL", "INST"):
            name = argument
        elif code == "STACK_GLOBAL":
            name, protocol = " ".join(texts[-2:]), max(protocol, 4)
        elif code == "PROTO":
            protocol = max(protocol, argument)
        elif code in TEXT_OPCODES:
            texts.append(argument)
        elif code in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            memo[len(memo) if argument is None else argument] = texts[-1] if previous_code in TEXT_OPCODES else None
        elif code in ("BINGET", "LONG_BINGET") and (text := memo.get(argument)):
            texts.append(text)
        if name is not None and name not in ALLOWED_NAMES:
            reject_weights_file(
                path, f"holds {sanitise_name(name.replace(' ', '.', 1))}, which is not a tensor", SAVE_SAFETENSORS_HINT
            )
        if not ALLOWED_OPCODES.fullmatch(code):
            reject_weights_file(
                path, f"has the pickle instruction {code}, which tensors do not use", SAVE_SAFETENSORS_HINT
            )
        previous_code = code
    if protocol > 2:
        reject_weights_file(
            path, f"was saved with pickle protocol {protocol}", "save it again with torch.save's default protocol"
        )
    file.seek(start)


class PickleDescriber(pickle._Unpickler):
    """Python's unpickler for a pickle checked by `scan_pickle`, with a stand-in for every class and function.

    It imports, calls and allocates nothing but numbers, texts, containers and tensor descriptions. Keys of dicts may
    only be texts and integers, because hashing deeply nested tuples never ends. Raises WeightsError for a pickle that
    torch.save would not write.
    """

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, path: Path, file: BinaryIO, storages: dict[str, Storage]) -> None:
        super().__init__(file)
        self.path, self.storages = path, storages
        self.makers: dict[str, Callable[..., Any]] = {
            "collections OrderedDict": lambda: {},
            "torch Size": self.make_size,
            "torch._utils _rebuild_tensor_v2": self.make_tensor,
            "torch._utils _rebuild_parameter": self.make_parameter,
            **dict.fromkeys(INERT_OBJECTS, InertObject),
            **dict.fromkeys(INERT_MAPPINGS, InertMapping),
        }

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for a class or function of the pickle."""
        name = f"{module} {name}"
        return StorageClass(STORAGE_DTYPES[name]) if name in STORAGE_DTYPES else self.makers.get(name, name)

    def persistent_load(self, pid: Any) -> Storage:
        """Return the storage of a persistent id ("storage", class, key, device, elements); the older format adds None.
        Raises WeightsError if two ids of one key differ, ValueError for another layout."""
        if type(pid) is not tuple or len(pid) not in (5, 6) or pid[5:] not in ((), (None,)):
            raise ValueError("a storage with an unknown layout")
        tag, storage_class, key, _, elements = pid[:5]
        if tag != "storage" or type(storage_class) is not StorageClass or type(key) is not str:
            raise ValueError("a storage with an unknown layout")
        if type(elements) is not int or elements < 0:
            raise ValueError("a storage without a size")
        storage = Storage(key, storage_class.dtype, elements)
        if self.storages.setdefault(key, storage) != storage:
            reject_weights_file(
                self.path, f"has the storage {sanitise_name(key)} with two sizes or dtypes", SAVE_AGAIN_HINT
            )
        return storage

    def make_size(self, value: Any) -> tuple[int, ...]:
        """Describe a torch.Size as a tuple. Raises WeightsError for a tuple that is not a shape."""
        return value if is_shape_tuple(value) else self.refuse_call("torch.Size")

    def make_parameter(self, tensor: Any, requires_grad: Any, hooks: Any) -> TensorStub:
        """Describe a parameter as its tensor. Raises WeightsError for anything but a tensor."""
        return tensor if type(tensor) is TensorStub else self.refuse_call("torch._utils._rebuild_parameter")

    def make_tensor(self, storage: Any, offset: Any, shape: Any, stride: Any, *options: Any) -> TensorStub:
        """Describe a tensor in a storage, whose first element is at `offset`. Raises WeightsError if it exceeds the
        storage or repeats elements, ValueError for an invalid shape."""
        if type(storage) is not Storage or len(options) not in (2, 3) or any(options[1:]):
            self.refuse_call("torch._utils._rebuild_tensor_v2")
        if not (
            is_shape_tuple(shape)
            and is_shape_tuple(stride)
            and is_shape_tuple((offset,))
            and len(shape) == len(stride) <= MAX_TENSOR_AXES
        ):
            raise ValueError("a tensor with an invalid shape")
        reason = f"has a tensor of shape {' x '.join(map(str, shape)) or '()'}"
        if any(step == 0 and size > 1 for size, step in zip(shape, stride, strict=True)):
            reject_weights_file(self.path, f"{reason} that repeats one number (stride 0)", "save it contiguous")
        entry = TensorInfo(shape, storage.dtype)
        last_index = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        if entry.elements and (last_index >= storage.elements or entry.elements > storage.elements):
            reject_weights_file(
                self.path, f"{reason} that exceeds its storage of {storage.elements:,} numbers", SAVE_AGAIN_HINT
            )
        return TensorStub(entry)

    def refuse_call(self, name: str) -> NoReturn:
        """Raise WeightsError for a call with arguments that torch.save does not write."""
        reject_weights_file(self.path, f"calls {name} with invalid arguments", SAVE_AGAIN_HINT)

    def load_build(self) -> None:
        """Handle the instruction BUILD: drop the state of an inert object, or `_metadata`, the module versions of a
        state dict. Raises WeightsError for any other object."""
        state = self.stack.pop()
        if isinstance(self.stack[-1], InertObject):
            return
        if type(self.stack[-1]) is not dict or type(state) is not dict or list(state) != ["_metadata"]:
            reject_weights_file(
                self.path, "sets the attributes of an object that is not a tensor", SAVE_SAFETENSORS_HINT
            )

    def load_reduce(self) -> None:
        """Handle the instruction REDUCE: call the stand-in of a tensor constructor. Raises WeightsError for any other
        function."""
        arguments, constructor = self.stack.pop(), self.stack[-1]
        if type(arguments) is not tuple or constructor not in self.makers.values():
            reject_weights_file(self.path, "calls a function that does not create tensors", SAVE_SAFETENSORS_HINT)
        self.stack[-1] = constructor(*arguments)

    def load_newobj(self) -> None:
        """Handle the instruction NEWOBJ: create an inert object without calling its constructor. Raises WeightsError
        for any other class."""
        _, constructor = self.stack.pop(), self.stack[-1]
        if constructor is not InertObject and constructor is not InertMapping:
            reject_weights_file(self.path, "creates an object that is not a tensor", SAVE_SAFETENSORS_HINT)
        self.stack[-1] = constructor()

    def load_setitem(self) -> None:
        """Handle the instruction SETITEM: set one item of a dict."""
        value, key = self.stack.pop(), self.stack.pop()
        self.set_items([key, value])

    def load_setitems(self) -> None:
        """Handle the instruction SETITEMS: set the items above the stack mark in a dict."""
        items = self.pop_mark()
        self.set_items(items)

    def set_items(self, items: list[Any]) -> None:
        """Set the items [key, value, key, value, ...] in the dict on top of the stack. Raises WeightsError for keys
        that are neither texts nor integers."""
        target = self.stack[-1]
        if type(target) not in (dict, InertMapping):
            raise TypeError("items for an object that is not a dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) not in (str, int):
                reject_weights_file(
                    self.path, f"has a dict with a key that is a {type(key).__name__.lower()}", SAVE_SAFETENSORS_HINT
                )
            if type(target) is dict:
                target[key] = value

    dispatch: ClassVar[dict[int, Any]] = {
        **pickle._Unpickler.dispatch,
        pickle.BUILD[0]: load_build,
        pickle.REDUCE[0]: load_reduce,
        pickle.NEWOBJ[0]: load_newobj,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
    }


def describe_pickle(path: Path, file: BinaryIO, storages: dict[str, Storage]) -> Any:
    """Describe the content of the pickle at the current position: tensors as `TensorStub`, and their storages are added
    to `storages`. The file is left at the end of the pickle. Raises WeightsError for content that torch.save would not
    write."""
    try:
        scan_pickle(path, file)
        return PickleDescriber(path, file, storages).load()
    except (ValueError, LookupError, TypeError, AttributeError, EOFError, pickle.UnpicklingError) as error:
        reason = f"has a damaged pickle ({type(error).__name__}: {sanitise_name(str(error))})"
        reject_weights_file(path, reason, DOWNLOAD_AGAIN_HINT)


def is_shape_tuple(value: Any) -> bool:
    """Return whether a value is a tuple of nonnegative integers below 2^63."""
    return type(value) is tuple and all(type(item) is int and 0 <= item < 1 << 63 for item in value)


def describe_torch_zip(archive: CheckedZip) -> tuple[Any, int]:
    """Describe the content of a PyTorch zip file, with tensors as `TensorStub`; also return the total bytes of its
    members. Raises WeightsError for any other content."""
    path = archive.path
    pickles = [name for name in archive.members if name.casefold().endswith("data.pkl")]
    if not pickles:
        reject_weights_file(path, "is a zip with neither numpy arrays nor a PyTorch checkpoint", SUPPORTED_FILES_HINT)
    folder = pickles[0].rpartition("/")[0] + "/"
    for name, info in archive.members.items():
        member_name = name.removeprefix(folder)
        if member_name.startswith(("code/", "constants.pkl")):
            reject_weights_file(path, "is TorchScript: a program, not weights", SAVE_SAFETENSORS_HINT)
        if member_name == name or not TORCH_ZIP_MEMBER.fullmatch(member_name):
            reject_weights_file(
                path, f"has the member '{sanitise_name(name)}', which torch.save does not write", SAVE_SAFETENSORS_HINT
            )
        if info.compress_type != zipfile.ZIP_STORED:
            reject_weights_file(
                path,
                f"has the member '{sanitise_name(name)}' compressed, which torch.save does not do",
                "save it again with torch.save",
            )
    if f"{folder}byteorder" in archive.members and archive.read_start(f"{folder}byteorder", 16) != b"little":
        reject_weights_file(path, "was written on a big-endian machine", SAVE_SAFETENSORS_HINT)
    if archive.members[pickles[0]].file_size > MAX_PICKLE_BYTES:
        reject_weights_file(path, f"has a pickle over {MAX_PICKLE_BYTES:,} bytes", SAVE_WITHOUT_OPTIMIZER_HINT)
    storages: dict[str, Storage] = {}
    stream = io.BytesIO(archive.read(pickles[0]))
    content = describe_pickle(path, stream, storages)
    if stream.read(1):
        reject_weights_file(path, "has data after its pickle", DOWNLOAD_AGAIN_HINT)
    for storage in storages.values():
        info = archive.members.get(f"{folder}data/{storage.key}")
        if info is None or info.file_size != storage.elements * DTYPE_BYTES[storage.dtype]:
            actual = f"{info.file_size:,} bytes" if info else "none"
            reject_weights_file(
                path, f"has {actual} for a storage of {storage.elements:,} {storage.dtype}", DOWNLOAD_AGAIN_HINT
            )
    return content, sum(info.file_size for info in archive.members.values())


def describe_legacy_file(path: Path, file: BinaryIO, size: int) -> tuple[Any, int]:
    """Describe the content of a PyTorch file in the older format without zip (five pickles, then each storage), with
    tensors as `TensorStub`; also return its size in bytes."""
    file.seek(0)
    stream, storages = io.BytesIO(file.read(MAX_PICKLE_BYTES)), {}
    magic = describe_pickle(path, stream, storages)
    if type(magic) is not int or magic != LEGACY_MAGIC:
        reject_weights_file(path, "is a pickle, but not one that torch.save writes", SAVE_SAFETENSORS_HINT)
    protocol, system = describe_pickle(path, stream, storages), describe_pickle(path, stream, storages)
    if (
        type(protocol) is not int
        or protocol != LEGACY_PROTOCOL
        or type(system) is not dict
        or system.get("little_endian") is not True
    ):
        reject_weights_file(
            path, "was written by another version of PyTorch, or on a big-endian machine", SAVE_SAFETENSORS_HINT
        )
    content, keys = describe_pickle(path, stream, storages), describe_pickle(path, stream, storages)
    if type(keys) is not list or not all(type(key) is str for key in keys) or sorted(keys) != sorted(storages):
        reject_weights_file(path, "lists storages that differ from those of its tensors", DOWNLOAD_AGAIN_HINT)
    position = stream.tell()
    for key in keys:
        storage = storages[key]
        file.seek(position)
        if int.from_bytes(file.read(8), "little") != storage.elements:
            reject_weights_file(
                path,
                f"has a storage whose size is not that of its {storage.elements:,} {storage.dtype} numbers",
                DOWNLOAD_AGAIN_HINT,
            )
        position += 8 + storage.elements * DTYPE_BYTES[storage.dtype]
    if position != size:
        reject_weights_file(path, f"has {size:,} bytes, but its tensors need {position:,}", DOWNLOAD_AGAIN_HINT)
    return content, size


def select_state_dict(
    path: Path, content: Any, size: int, requested_key: str = ""
) -> tuple[dict[str, TensorInfo], str, tuple[str, ...]]:
    """Select a state dict in the described content of a file of `size` bytes: the one under `requested_key`, by default
    that of a model, or all for `ALL_SECTIONS`. Returns its tensors, its key ("" for the top level), and the keys of
    other state dicts. Raises WeightsError if there is none."""
    if type(content) is not dict:
        reject_weights_file(path, "contains no state dict (tensors by name)", SAVE_SAFETENSORS_HINT)
    dicts = [
        key for key, value in content.items() if type(key) is str and type(value) is dict and get_stubbed_tensors(value)
    ]
    section = next(
        (key for key in ([requested_key] if requested_key else STATE_DICT_KEYS) if key in dicts), requested_key
    )
    state = get_stubbed_tensors(content[section] if section in dicts else {} if requested_key else content)
    if requested_key == ALL_SECTIONS:
        state = {f"{key}/{name}": entry for key in dicts for name, entry in get_stubbed_tensors(content[key]).items()}
    if not state:
        keys = ", ".join(sanitise_name(str(key)) for key in list(content)[:8])
        reject_weights_file(
            path,
            f"has no tensors at its top level or under the keys {', '.join(STATE_DICT_KEYS)}; it has "
            f"{f'the keys {keys}' if keys else 'no keys'}",
            SAVE_SAFETENSORS_HINT,
        )
    if not all(type(name) is str for name in state):
        reject_weights_file(path, "has tensors with numbers as keys, not names", SAVE_SAFETENSORS_HINT)
    total = sum(entry.nbytes for entry in state.values())
    if total > max(UNPACK_ALLOWANCE_BYTES, MAX_SHARING_RATIO * size):
        reject_weights_file(
            path, f"has {size:,} bytes, but its tensors would take {total:,}", "save each tensor only once"
        )
    return state, section, tuple(key for key in dicts if key != section)


def get_stubbed_tensors(content: dict[Any, Any]) -> dict[Any, TensorInfo]:
    """Return the tensors among the values of a described dict."""
    return {name: value.entry for name, value in content.items() if type(value) is TensorStub}


def read_pickled_tensors(path: Path, section: str, entries: dict[str, TensorInfo]) -> dict[str, Tensor]:
    """Read the named tensors, of any shape, in a child process that writes them as safetensors. Raises WeightsError if
    it fails. The child may use 8 GiB of address space for torch, plus three times the size of the tensors, and two
    minutes, longer for a large file."""
    size = path.stat().st_size + sum(entry.nbytes for entry in entries.values())
    with tempfile.TemporaryDirectory(prefix="vitreous-") as folder:  # readable by this user only
        output_path, seconds = (
            Path(folder) / "weights.safetensors",
            CHILD_TIMEOUT_SECONDS + size // MIN_READ_BYTES_PER_SECOND,
        )
        request = {
            "path": os.fspath(path.absolute()),
            "out": os.fspath(output_path),
            "section": section,
            "names": list(entries),
        }
        request |= {"objects": [name.replace(" ", ".") for name in INERT_OBJECTS]}
        request |= {"mappings": [name.replace(" ", ".") for name in INERT_MAPPINGS]}
        try:
            completed = run_unpickle_child(json.dumps(request | {"memory": CHILD_MEMORY_BYTES + 3 * size}), seconds)
        except subprocess.TimeoutExpired:
            raise WeightsError(f"{path} was not read within {seconds} s", SAVE_SAFETENSORS_HINT) from None
        if completed.returncode:
            lines = (
                completed.stdout.splitlines()
                or completed.stderr.splitlines()[-1:]
                or [f"the process ended with code {completed.returncode}"]
            )
            reject_weights_file(
                path,
                f"cannot be read ({sanitise_name(lines[0])})",
                f"check that {tempfile.gettempdir()} has space; or, {SAVE_SAFETENSORS_HINT}",
            )
        return read_safetensors(output_path)


def run_unpickle_child(request: str, seconds: float) -> subprocess.CompletedProcess[str]:
    """Start the child process with a JSON request on stdin, and wait until it ends. Raises
    subprocess.TimeoutExpired."""
    # -P: ignore a file torch.py in the working folder. No GPU: only the memory of the process is limited.
    command, environment = (
        [sys.executable, "-P", os.fspath(UNPICKLE_SCRIPT)],
        {**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    return run_shielded_process(command, seconds, request, environment)
