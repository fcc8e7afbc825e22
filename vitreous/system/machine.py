"""Capabilities of the machine: devices, precisions, processor features, memory."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from threading import Barrier

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitreous.errors import UsageError
from vitreous.system.allocator import tune_allocator
from vitreous.system.cores import count_usable_cores

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}  # by the values of `--precision`


#: the processor features on which choices of kernels depend, by PyTorch's names
CPU_FEATURES = ("avx2", "avx_vnni", "avx512_f", "avx512_vnni", "avx512_bf16", "amx_bf16")
#: level of ONEDNN_MAX_CPU_ISA -> the features that oneDNN may then use; all features for other levels
ONEDNN_ISA_LEVELS = {
    "SSE41": (),
    "AVX": (),
    "AVX2": CPU_FEATURES[:1],
    "AVX2_VNNI": CPU_FEATURES[:2],
    "AVX2_VNNI_2": CPU_FEATURES[:2],
    "AVX512_CORE": ("avx2", "avx512_f"),
    "AVX512_CORE_VNNI": ("avx2", "avx512_f", "avx512_vnni"),
    "AVX512_CORE_BF16": ("avx2", "avx512_f", "avx512_vnni", "avx512_bf16"),
    "AVX512_CORE_FP16": CPU_FEATURES[:5],
    "AVX512_CORE_AMX": CPU_FEATURES,
}
#: result of `torch.backends.cpu.get_cpu_capability` -> the features that PyTorch's kernels may use; else all features
ATEN_CAPABILITY_FEATURES = {"DEFAULT": (), "AVX2": CPU_FEATURES[:2]}


def list_devices() -> list[str]:
    """List the names of the available devices: cpu, cuda:N and mps."""
    names = ["cpu"] + [
        f"cuda:{index}" for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    ]
    return names + ["mps"] * torch.backends.mps.is_available()


def pick_device(name: str = "auto") -> str:
    """Resolve `auto`, `cpu`, `cuda`, `cuda:1` or `mps` to a device name. Raises UsageError, with the available devices,
    if it is not available."""
    names = list_devices()
    if name == "auto":
        return names[-1] if names[-1] == "mps" else names[min(1, len(names) - 1)]
    name = "cuda:0" if name == "cuda" else name
    if name not in names:
        raise UsageError(f"no device {name} on this machine", f"use {' or '.join(names)}")
    return name


def has_bf16(device: str) -> bool:
    """Return whether the device multiplies bfloat16 numbers in hardware (a CPU with AVX512-BF16 or AMX)."""
    if device.startswith("cuda"):
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device == "mps":
        return True
    return get_cpu_features().get("avx512_bf16", False) or get_cpu_features().get("amx_bf16", False)


def pick_precision(name: str, device: str) -> str:
    """Resolve the precision `auto` to bf16 if the device supports it, else to fp32. Other names are returned
    unchanged."""
    if name == "auto":
        return "bf16" if has_bf16(device) else "fp32"
    return name


def describe_emulation(precision: str, device: str) -> str | None:
    """Return a warning if the device only emulates the requested precision, else None."""
    if precision == "bf16" and not has_bf16(device):
        return f"{device} has no bfloat16 hardware: emulation is up to a hundred times slower than --precision fp32"
    return None


def has_fast_packed_matmul(device: str) -> bool:
    """Return whether matmuls with weights pre-packed by oneDNN are faster than PyTorch's default matmuls.

    With AVX-512 or AMX they are 2x faster in float32 on AMD, and save a tenth in bfloat16. With AVX2 both reach the
    hardware limit, and the fused GELU is slower."""
    return device == "cpu" and get_cpu_features().get("avx512_f", False)


def has_vnni() -> bool:
    """Return whether the processor accumulates products of 8-bit integers in 32 bits (VNNI). Without VNNI, sums of two
    products in 16 bits overflow."""
    return get_cpu_features().get("avx512_vnni", False) or get_cpu_features().get("avx_vnni", False)


def get_cpu_features() -> dict[str, bool]:
    """Return whether each processor feature is usable, by PyTorch's names; empty if PyTorch cannot detect features.

    All choices that depend on the processor use this function. `ONEDNN_MAX_CPU_ISA` and `ATEN_CPU_CAPABILITY` limit the
    features that libraries use, and therefore the result. `VITREOUS_CPU_ISA`, a key of `ONEDNN_ISA_LEVELS`, replaces
    the result but does not change the libraries. Tests use it to test both sides of a choice on any machine; bfloat16
    is then emulated if necessary. Raises UsageError for an unknown level.
    """
    if isa_level := os.environ.get("VITREOUS_CPU_ISA", "").upper():
        if isa_level not in ONEDNN_ISA_LEVELS:
            raise UsageError(
                f"VITREOUS_CPU_ISA={isa_level} is not an instruction set level",
                f"use one of {', '.join(ONEDNN_ISA_LEVELS)}",
            )
        return {feature: feature in ONEDNN_ISA_LEVELS[isa_level] for feature in CPU_FEATURES}
    level = (os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or "").upper()
    limits = [
        ONEDNN_ISA_LEVELS.get(level, CPU_FEATURES),
        ATEN_CAPABILITY_FEATURES.get(torch.backends.cpu.get_cpu_capability(), CPU_FEATURES),
    ]
    present = getattr(torch.cpu, "get_capabilities", dict)()
    return {
        feature: is_present and (feature not in CPU_FEATURES or all(feature in limit for limit in limits))
        for feature, is_present in present.items()
        if isinstance(is_present, bool)
    }


def copy_to_device(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Copy a tensor of any shape to a device without waiting for the device's queued work.

    A copy from pageable memory to a GPU would wait for the GPU's queue; this copy goes through pinned memory.
    """
    if torch.device(device).type == "mps" and tensor.dtype == torch.float64:
        tensor = tensor.float()  # Metal has no 64-bit numbers
    if tensor.device.type == "cpu" and torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def get_device_table(build: Callable[..., torch.Tensor], device: torch.device, *arguments: Hashable) -> torch.Tensor:
    """Return the tensor `build(*arguments)` of any shape on a device. It is cached for the same arguments, so it must
    not be changed.

    Building a table on the host in every forward pass would require a copy that the host waits for.
    """
    if torch.compiler.is_compiling():
        return build(*arguments).to(device)
    return build_device_table(build, device, *arguments)


@cache  # never emptied: a CUDA graph may read a table
def build_device_table(build: Callable[..., torch.Tensor], device: torch.device, *arguments: Hashable) -> torch.Tensor:
    """Build the tensor of any shape that `get_device_table` caches. It is a normal tensor even if it is first used in
    inference mode."""
    with torch.inference_mode(False), torch.device("cpu"):
        return copy_to_device(build(*arguments), device)


def configure_process() -> None:
    """Configure this process for long computations.

    It uses no more threads than usable cores (PyTorch ignores a container's CPU quota), full float32 precision on GPUs,
    and an allocator that keeps freed memory in huge pages (`tune_allocator`).
    """
    if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > count_usable_cores():
        torch.set_num_threads(count_usable_cores())
    torch.backends.cudnn.allow_tf32 = False  # PyTorch rounds float32 convolutions on a GPU to ten bits by default
    tune_allocator()


@contextmanager
def use_deterministic_kernels(device: str, enabled: bool = True) -> Iterator[None]:
    """If `enabled`, use kernels in the block whose results do not depend on the order of a GPU's threads. Has no effect
    on a CPU. An operator without such a kernel warns."""
    if not (enabled and device.startswith("cuda")):
        yield
        return
    previous_modes = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # gives cuBLAS a workspace of fixed size
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with sdpa_kernel(SDPBackend.MATH):  # the backward passes of the fused kernels sum in any order
            yield
    finally:
        torch.use_deterministic_algorithms(previous_modes[0], warn_only=previous_modes[1])


@cache
def get_thread_pool(count: int) -> ThreadPoolExecutor:
    """Return a cached pool of `count` threads among which PyTorch's threads are divided evenly, so that each thread
    computes on separate cores."""
    total, ready = torch.get_num_threads(), Barrier(count)

    def initialise_thread() -> None:
        """Set the number of PyTorch's threads in a new thread of the pool, and wait until all threads have started."""
        torch.get_num_threads()  # the first call in a thread copies the global number, so it precedes the next line
        torch.set_num_threads(max(1, total // count))
        ready.wait()

    pool = ThreadPoolExecutor(count, "team", initialise_thread)
    list(pool.map(int, range(count)))  # starts all threads
    torch.set_num_threads(total)  # restores the global number, which later threads copy
    return pool


def get_free_memory(device: str) -> int:
    """Return the free memory of a GPU, or of a Linux machine, in bytes; 0 if it cannot be determined."""
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(device)[0]
    if sys.platform != "linux":
        return 0
    with open("/proc/meminfo") as file:
        return next((int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable")), 0)


def describe_environment() -> dict[str, object]:
    """Return the versions of libraries and the hardware, as stored in `environment.json`."""
    from importlib.metadata import version

    from vitreous.version import __version__

    return {
        "vitreous": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": version("torchvision"),
        "platform": platform.platform(),
        "processor": get_processor_name(),
        "instruction_set": get_best_cpu_feature()
        + " (assumed: VITREOUS_CPU_ISA)" * bool(os.environ.get("VITREOUS_CPU_ISA")),
        "threads": torch.get_num_threads(),
        "devices": list_devices(),
        "cuda": [torch.cuda.get_device_name(d) for d in list_devices() if d.startswith("cuda")],
    }


def get_best_cpu_feature() -> str:
    """Return the best of `CPU_FEATURES` that is usable, such as `avx512_bf16`; "" if there is none."""
    return next((feature for feature in reversed(CPU_FEATURES) if get_cpu_features().get(feature)), "")


def get_processor_name() -> str:
    """Return the model name of the processor."""
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
