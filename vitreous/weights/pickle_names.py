"""Names of classes and functions that a pickle of `torch.save` may contain, as "module name", and their stand-ins when
it is described.

Training scripts store settings and metrics with the weights: `argparse.Namespace`, NumPy scalars, paths. Such objects
are inert: nothing of their module is imported, called or set, here or in the child process that reads the tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from vitreous.weights.entry import DTYPE_BYTES, TensorInfo

#: storage classes, with the dtype of their elements
STORAGE_DTYPES = {
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
#: functions that build containers and tensors
TENSOR_BUILDERS = (
    "collections OrderedDict",
    "torch Size",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_parameter",
)
NUMPY_MODULES = (
    "numpy dtype",
    "numpy ndarray",
    *(f"numpy {scalar}" for scalar in ("float64", "float32", "int64", "int32", "bool_")),
)
BUILTIN_NAMES = ("set", "frozenset", "dict", "list", "int", "float", "str", "bool", "object", "bytes", "complex")
#: objects without items: settings, numbers, paths, devices
INERT_OBJECTS = (
    "argparse Namespace",
    "types SimpleNamespace",
    *NUMPY_MODULES,
    *(f"{core}.multiarray {name}" for core in ("numpy.core", "numpy._core") for name in ("scalar", "_reconstruct")),
    "_codecs encode",  # how protocol 2 stores bytes, including those of NumPy scalars
    *(f"pathlib {name}" for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")),
    "torch device",
    *(f"{module} {name}" for module in ("__builtin__", "builtins") for name in BUILTIN_NAMES),
    "typing Any",
    *(f"omegaconf.base {name}" for name in ("ContainerMetadata", "Metadata")),
    *(f"omegaconf.{name}" for name in ("dictconfig DictConfig", "listconfig ListConfig")),
    *(f"omegaconf.nodes {scalar}Node" for scalar in ("Any", "String", "Integer", "Float", "Boolean")),
)
#: dictionary subclasses
INERT_MAPPINGS = (
    "collections defaultdict",
    "collections Counter",
    "yacs.config CfgNode",
    "easydict EasyDict",
    "addict.addict Dict",
    "lightning_fabric.utilities.data AttributeDict",
    "lightning.fabric.utilities.data AttributeDict",
    "pytorch_lightning.utilities.parsing AttributeDict",
)
ALLOWED_NAMES = {
    *STORAGE_DTYPES,
    *TENSOR_BUILDERS,
    *INERT_OBJECTS,
    *INERT_MAPPINGS,
    *(f"torch {dtype}" for dtype in DTYPE_BYTES),
}


class Storage(NamedTuple):
    """The stored elements of one or several tensors in the file: key, dtype, and number of elements."""

    key: str
    dtype: str
    elements: int


class TensorStub(NamedTuple):
    """Stand-in for a tensor: its shape and dtype."""

    entry: TensorInfo


class StorageClass(NamedTuple):
    """Stand-in for a storage class, such as torch.FloatStorage: the dtype of its elements."""

    dtype: str


class InertObject:
    """Stand-in for an object that is neither a tensor nor a container of tensors; its arguments and state are
    dropped."""

    def __init__(self, *arguments: object) -> None:
        pass

    def extend(self, items: Iterable[object]) -> None:
        """Drop the items of a list-like object."""


class InertMapping(InertObject):
    """Stand-in for a dictionary subclass; its items are dropped."""
