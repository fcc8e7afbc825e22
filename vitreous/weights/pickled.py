"""What `torch.save` writes (.pt, .pth, .bin): looked at without being run, then read by a child process.

A pickle is a program. Here its instructions are followed by an interpreter that knows only those that tensors need, and
whose every value is a number, a text, a container, or a description of a tensor: nothing is imported, called or
allocated. What a file holds is so known before it is read, and what is no tensor is refused by name. Reading itself is
torch's, with `weights_only`, in a process of its own that has a limit of memory and of time (`unpickle.py`).
"""

from __future__ import annotations

import io
import json
import os
import pickletools
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from vitreous.errors import WeightsError
from vitreous.weights.files import ITEM, KINDS, Entry, read_safetensors, refuse, shown
from vitreous.weights.npz import SLACK, Archive

if TYPE_CHECKING:
    from torch import Tensor

MAX_PICKLE = 4 << 20  # bytes; ten thousand tensors take less than half
MAX_STEPS = 80_000  # instructions; a tensor takes about thirty
MAX_AXES = 16
SHARED = 4  # times the size of the file that its tensors may take together: tied weights are stored once
#: the keys that a state dict is looked for under, the better weights first
SECTIONS = ("model_ema", "ema", "teacher", "model", "state_dict", "student", "net")
MAGIC, PROTOCOL = 0x1950A86A20F9469CFC6C, 1001  # how a file of the format before zip begins
HINT = (
    "where you trust it, save its tensors alone: safetensors.torch.save_file(model.state_dict(), 'model.safetensors')"
)
SCRIPT = Path(__file__).with_name("unpickle.py")
MEMORY = 8 << 30  # bytes of address space that torch's libraries and their working memory take, twice over
SECONDS, BYTES_PER_SECOND = 120, 20 << 20

#: what a pickle may name, as "module name": classes of storages, with the dtype of their elements ...
STORAGES = {
    "torch DoubleStorage": "float64",
    "torch FloatStorage": "float32",
    "torch HalfStorage": "float16",
    "torch BFloat16Storage": "bfloat16",
    "torch LongStorage": "int64",
    "torch IntStorage": "int32",
    "torch ShortStorage": "int16",
    "torch CharStorage": "int8",
    "torch ByteStorage": "uint8",
    "torch BoolStorage": "bool",
}
#: ... what containers and tensors are made by, and dtypes, which may lie beside the weights
MAKERS = ("collections OrderedDict", "torch Size", "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter")
NAMES = {*STORAGES, *MAKERS, *(f"torch {dtype}" for dtype in ITEM)}
#: the members that torch.save writes into a zip, under one folder
MEMBER = re.compile(
    r"data\.pkl|data/\d+|version|byteorder|\.format_version|\.storage_alignment|\.data/serialization_id"
)

CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
}
LITERALS = {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "SHORT_BINSTRING"}


@dataclass(frozen=True)
class Name:
    """Something a pickle names; never looked up."""

    name: str


@dataclass(frozen=True)
class Storage:
    """A run of numbers in the file."""

    key: str
    dtype: str
    elements: int


@dataclass(frozen=True)
class Described:
    """What would be a tensor."""

    entry: Entry


class Interpreter:
    """Follows the instructions of pickles, one `run` for each; `storages` are those that were met, by key.

    Raises WeightsError for an instruction or a name that no tensor needs. Keys of dicts are texts and whole numbers
    only: the hash of a tuple of tuples of tuples takes for ever.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.storages: dict[str, Storage] = {}

    def run(self, file: BinaryIO) -> Any:
        """The value of the pickle that begins here; the file is left where it ends."""
        self.stack: list[Any] = []
        self.outer: list[list[Any]] = []  # the stacks below each MARK
        self.memo: dict[int, Any] = {}
        protocol = 0
        try:
            for count, (code, argument, _) in enumerate(pickletools.genops(file)):
                if count > MAX_STEPS:
                    refuse(
                        self.path,
                        f"has a pickle of more than {MAX_STEPS:,} instructions",
                        "save the model without its optimizer",
                    )
                if code.name == "PROTO":
                    protocol = argument or 0
                elif code.name != "STOP":
                    self.step(code.name, argument)
            if protocol > 2:  # torch.load with weights_only knows no later one; followed up to here for the names
                refuse(
                    self.path,
                    f"was saved with pickle protocol {protocol}",
                    "save it again with torch.save as it is by default",
                )
            return self.stack.pop()
        except (ValueError, LookupError, TypeError) as error:  # of genops, an empty stack, a value of a wrong kind
            refuse(
                self.path,
                f"has a damaged pickle ({type(error).__name__}: {shown(str(error))})",
                "download or save it again",
            )

    def step(self, code: str, argument: Any) -> None:
        """One instruction."""
        stack = self.stack
        if code in LITERALS:
            stack.append(argument)
        elif code in CONSTANTS:
            stack.append(CONSTANTS[code]())
        elif code in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self.memo[len(self.memo) if argument is None else argument] = stack[-1]
        elif code in ("BINGET", "LONG_BINGET"):
            stack.append(self.memo[argument])
        elif code == "MARK":
            self.outer.append(stack)
            self.stack = []
        elif code in ("TUPLE", "APPENDS", "SETITEMS"):
            self.stack = self.outer.pop()
            self.gather(code, stack)
        elif code in ("TUPLE1", "TUPLE2", "TUPLE3", "APPEND", "SETITEM"):
            count = {"APPEND": 1, "SETITEM": 2}.get(code) or int(code[-1])
            if len(stack) < count:
                raise ValueError("nothing to take")
            items = stack[-count:]
            del stack[-count:]
            self.gather(code.rstrip("123"), items)
        elif code in ("GLOBAL", "INST", "STACK_GLOBAL"):
            stack.append(self.named(code, argument))
        elif code == "REDUCE":
            arguments, maker = stack.pop(), stack.pop()
            stack.append(self.made(maker, arguments))
        elif code == "BINPERSID":
            stack.append(self.stored(stack.pop()))
        elif code == "BUILD":
            state = stack.pop()  # of an OrderedDict of modules: the versions of their formats
            if type(stack[-1]) is not dict or type(state) is not dict or list(state) != ["_metadata"]:
                refuse(self.path, "sets the attributes of an object, which is no tensor", HINT)
        elif code != "FRAME":
            refuse(self.path, f"has the pickle instruction {code}, which tensors do not need", HINT)

    def gather(self, code: str, items: list[Any]) -> None:
        """Make a tuple of these, or put them into the list or dict on top of the stack."""
        if code == "TUPLE":
            self.stack.append(tuple(items))
            return
        target = self.stack[-1]
        if type(target) is not (list if code.startswith("APPEND") else dict):
            raise TypeError("items for something else than a list or a dict")
        if type(target) is list:
            target.extend(items)
            return
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) not in (str, int):
                refuse(self.path, f"has a dict with a key that is a {type(key).__name__.lower()}", HINT)
            target[key] = value

    def named(self, code: str, argument: str | None) -> Name:
        """What a pickle names. Raises WeightsError for all but the few names of tensors."""
        if argument is None:
            name, module = self.stack.pop(), self.stack.pop()
            if type(name) is not str or type(module) is not str:
                raise TypeError("a name that is no text")
            argument = f"{module} {name}"
        if argument not in NAMES:
            refuse(self.path, f"holds {shown(argument.replace(' ', '.', 1))}, which is no tensor", HINT)
        if code == "INST":
            raise ValueError("an instance of a function")
        return Name(argument)

    def stored(self, label: Any) -> Storage:
        """The storage that ("storage", class, key, device, elements) stands for; the older format adds what must be
        None."""
        if type(label) is not tuple or len(label) not in (5, 6) or label[5:] not in ((), (None,)):
            raise ValueError("a storage in an unknown form")
        word, kind, key, _, elements = label[:5]
        if word != "storage" or type(kind) is not Name or kind.name not in STORAGES or type(key) is not str:
            raise ValueError("a storage in an unknown form")
        if type(elements) is not int or elements < 0:
            raise ValueError("a storage of no size")
        storage = Storage(key, STORAGES[kind.name], elements)
        if self.storages.setdefault(key, storage) != storage:
            refuse(self.path, f"has the storage {shown(key)} in two sizes or dtypes", "save it again")
        return storage

    def made(self, maker: Any, arguments: Any) -> Any:
        """What a call would make: a dict, a tuple of sizes, or the description of a tensor."""
        if type(maker) is not Name or maker.name not in MAKERS or type(arguments) is not tuple:
            refuse(self.path, "calls what does not make tensors", HINT)
        made = maker.name.rpartition(" ")[2]
        if made == "OrderedDict" and not arguments:
            return {}
        if made == "Size" and len(arguments) == 1 and sizes(arguments[0]):
            return arguments[0]
        if made == "_rebuild_parameter" and len(arguments) == 3 and type(arguments[0]) is Described:
            return arguments[0]
        if (
            made == "_rebuild_tensor_v2"
            and len(arguments) in (6, 7)
            and type(arguments[0]) is Storage
            and not any(arguments[5:])
        ):
            return Described(self.view(*arguments[:4]))
        refuse(self.path, f"makes {maker.name.replace(' ', '.')} from what it is not made of", "save it again")

    def view(self, storage: Storage, offset: Any, shape: Any, stride: Any) -> Entry:
        """A tensor that lies in a storage, its first element at `offset`. Raises WeightsError where it does not fit
        into it."""
        if (
            not sizes(shape)
            or not sizes(stride)
            or not sizes((offset,))
            or len(shape) != len(stride)
            or len(shape) > MAX_AXES
        ):
            raise ValueError("a tensor with a shape that is none")
        if any(step == 0 and size > 1 for size, step in zip(shape, stride, strict=True)):
            refuse(
                self.path,
                f"has a tensor of shape {brief(shape)} that repeats one number (stride 0)",
                "save it contiguous",
            )
        entry = Entry(shape, storage.dtype)
        last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        if entry.elements and (last >= storage.elements or entry.elements > storage.elements):
            refuse(
                self.path,
                f"has a tensor of shape {brief(shape)} in a storage of {storage.elements:,} numbers",
                "save it again",
            )
        return entry


def sizes(value: Any) -> bool:
    """Whether something is a tuple of whole numbers from 0 that fit 63 bits."""
    return type(value) is tuple and all(type(item) is int and 0 <= item < 1 << 63 for item in value)


def brief(shape: tuple[int, ...]) -> str:
    """A shape for people: `3 x 4`."""
    return " x ".join(map(str, shape)) or "()"


def look_archive(archive: Archive) -> tuple[dict[str, Entry], str]:
    """The tensors of a PyTorch zip and the section they are in. Raises WeightsError for anything that is not one."""
    path = archive.path
    pickles = [name for name in archive.members if name.casefold().endswith("data.pkl")]
    if not pickles:
        refuse(path, "is a zip with neither numpy arrays nor a PyTorch checkpoint", KINDS)
    folder = pickles[0].rpartition("/")[0] + "/"
    for name, info in archive.members.items():
        tail = name.removeprefix(folder)
        if tail.startswith(("code/", "constants.pkl")):
            refuse(path, "is TorchScript: a program, not weights", HINT)
        if tail == name or not MEMBER.fullmatch(tail):
            refuse(path, f"has the member '{shown(name)}', which torch.save does not write", HINT)
        if info.compress_type != zipfile.ZIP_STORED:
            refuse(
                path,
                f"has the member '{shown(name)}' compressed, which torch.save does not do",
                "save it again with torch.save",
            )
    if f"{folder}byteorder" in archive.members and archive.head(f"{folder}byteorder", 16) != b"little":
        refuse(path, "was written on a machine of the other byte order", HINT)
    if archive.members[pickles[0]].file_size > MAX_PICKLE:
        refuse(path, f"has a pickle over {MAX_PICKLE:,} bytes", "save the model without its optimizer")
    interpreter, stream = Interpreter(path), io.BytesIO(archive.read(pickles[0]))
    content = interpreter.run(stream)
    if stream.read(1):
        refuse(path, "has something after its pickle", "download or save it again")
    for storage in interpreter.storages.values():
        info = archive.members.get(f"{folder}data/{storage.key}")
        if info is None or info.file_size != storage.elements * ITEM[storage.dtype]:
            found = f"{info.file_size:,} bytes" if info else "none"
            refuse(
                path, f"has {found} for a storage of {storage.elements:,} {storage.dtype}", "download or save it again"
            )
    return choose(path, content, sum(info.file_size for info in archive.members.values()))


def look_stream(path: Path, file: BinaryIO, size: int) -> tuple[dict[str, Entry], str]:
    """The tensors of a PyTorch file from before zip (five pickles, then each storage) and the section they are in."""
    file.seek(0)
    stream, interpreter = io.BytesIO(file.read(MAX_PICKLE)), Interpreter(path)
    magic = interpreter.run(stream)
    if type(magic) is not int or magic != MAGIC:
        refuse(path, "is a pickle, but not one that torch.save writes", HINT)
    protocol, system = interpreter.run(stream), interpreter.run(stream)
    if (
        type(protocol) is not int
        or protocol != PROTOCOL
        or type(system) is not dict
        or system.get("little_endian") is not True
    ):
        refuse(path, "was written by another version of PyTorch, or on a machine of the other byte order", HINT)
    content, keys = interpreter.run(stream), interpreter.run(stream)
    if (
        type(keys) is not list
        or not all(type(key) is str for key in keys)
        or sorted(keys) != sorted(interpreter.storages)
    ):
        refuse(path, "lists other storages than its tensors need", "download or save it again")
    position = stream.tell()
    for key in keys:
        storage = interpreter.storages[key]
        file.seek(position)
        if int.from_bytes(file.read(8), "little") != storage.elements:
            refuse(
                path,
                f"has another size for a storage of {storage.elements:,} {storage.dtype}",
                "download or save it again",
            )
        position += 8 + storage.elements * ITEM[storage.dtype]
    if position != size:
        refuse(path, f"has {size:,} bytes where its tensors need {position:,}", "download or save it again")
    return choose(path, content, size)


def choose(path: Path, content: Any, size: int) -> tuple[dict[str, Entry], str]:
    """The state dict in what a file of `size` bytes holds, and the key it was found under ("" for the top)."""
    if type(content) is not dict:
        refuse(path, "holds no state dict, which would be tensors by name", HINT)
    nested = [key for key in SECTIONS if type(content.get(key)) is dict and described(content[key])]
    section = nested[0] if nested else ""
    state = described(content[section] if section else content)
    if not state:
        keys = ", ".join(shown(str(key)) for key in list(content)[:8])
        refuse(path, f"has no tensors at its top or under {', '.join(SECTIONS)}, but {keys or 'nothing'}", HINT)
    if not all(type(name) is str for name in state):
        refuse(path, "has tensors by number, not by name", HINT)
    total = sum(entry.bytes for entry in state.values())
    if total > max(SLACK, SHARED * size):
        refuse(path, f"of {size:,} bytes has tensors that would take {total:,}", "save each tensor once")
    return state, section


def described(content: dict[Any, Any]) -> dict[Any, Entry]:
    """The tensors directly in a dict."""
    return {name: value.entry for name, value in content.items() if type(value) is Described}


def read(path: Path, section: str, entries: dict[str, Entry]) -> dict[str, Tensor]:
    """Those tensors, read by a child process that leaves them as safetensors. Raises WeightsError where it fails.

    The child may use 8 GiB of addresses for torch, and three times what it reads; it has two minutes, and more for a
    large file.
    """
    size = path.stat().st_size + sum(entry.bytes for entry in entries.values())
    with tempfile.TemporaryDirectory(prefix="vitreous-") as folder:  # for this user only
        out, seconds = Path(folder) / "weights.safetensors", SECONDS + size // BYTES_PER_SECOND
        order = {"path": os.fspath(path.absolute()), "out": os.fspath(out), "section": section, "names": list(entries)}
        # -P: a file torch.py in the working folder is not torch. No GPU: only the memory of the process is limited.
        command, environment = [sys.executable, "-P", os.fspath(SCRIPT)], {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        text = json.dumps(order | {"memory": MEMORY + 3 * size})
        try:
            done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=seconds, env=environment)
        except subprocess.TimeoutExpired:
            raise WeightsError(f"{path} was not read within {seconds} s", HINT) from None
        if done.returncode:
            lines = (
                done.stdout.splitlines()
                or done.stderr.splitlines()[-1:]
                or [f"the process ended with code {done.returncode}"]
            )
            refuse(
                path, f"cannot be read ({shown(lines[0])})", f"see that {tempfile.gettempdir()} has room; or, {HINT}"
            )
        return read_safetensors(out)
