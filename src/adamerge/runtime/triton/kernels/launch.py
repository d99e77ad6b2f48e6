"""What all kernels need to know about the numbers and the machine they are given."""

from functools import cache
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.errors import TritonError

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:
    # Older releases of Triton have none; pointers do then.
    TensorDescriptor = None


# Raised where a kernel cannot be compiled for a device, or asks for more than it has.
CannotRun = TritonError

# Kernels take powers of 2; hosts take those of e.
LOG2E = 1.4426950408889634

# Up to as many rows, processors are idle, and kernels wait for memory and for each other most of the time.
SMALL_GRID_ROWS = 4096

# Bytes of a processor's memory: what a program may have on an H200, what is enough for all kernels with bulk copies,
# and what a program needs besides the tiles it asks for ahead.
H200, BULK, SCRATCH = 227 * 1024, 160 * 1024, 2048

# That of torch 2.11, the oldest that the kernels were run with; 3.2, that of torch 2.6, cannot interpret them.
OLDEST_TRITON = (3, 6)


def why_triton_too_old() -> str | None:
    """What is wrong with a Triton that the kernels were never run with."""
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) >= OLDEST_TRITON:
        return None
    oldest = ".".join(map(str, OLDEST_TRITON))
    return f"Triton {triton.__version__} is older than {oldest}, with which the kernels were tested"


@triton.jit
@no_type_check
def pdl_wait(EARLY: tl.constexpr):
    """Where the kernel was put in place while the one before still ran, wait for that one.

    Nothing is written before, and only read what the kernel right before has not written: all earlier ones are done,
    because none lets the next one in before its own wait.  The next one may be put in place from here on.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def small_grid(x: Tensor) -> bool:
    """Whether there are so few rows that a kernel's work is less than what surrounds it."""
    return len(x) <= SMALL_GRID_ROWS


def pdl_options(x: Tensor) -> dict[str, bool]:
    """How a kernel is launched: in CUDA graphs, from Hopper on, it is put in place while the one before still runs.

    Not with many rows: what waits in place then takes room from what runs.
    """
    if x.is_cuda and small_grid(x) and _has_tma(x.device) and torch.cuda.is_current_stream_capturing():
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}


def precision(x: Tensor) -> str:
    """How the tensor cores multiply: float32 exactly, as the reference does; half precision has only one way."""
    return "ieee" if x.dtype == torch.float32 else "tf32"


def next_pow2(n: int, least: int = 16) -> int:
    """The power of two that holds `n`."""
    return max(triton.next_power_of_2(n), least)


def blocks(n: int, size: int) -> int:
    """How many blocks of `size` hold `n`."""
    return triton.cdiv(n, size)


@cache
def processors(device: torch.device) -> int:
    """How many programs the device runs side by side, at least."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@cache
def shared_memory(device: torch.device) -> int:
    """How many bytes of its processor's memory a program may have: 163 KiB on an A100, 99 on devices for a desk."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin if device.type == "cuda" else H200


def num_stages_for(wanted: int, x: Tensor, rows: int, columns: int, step: int) -> int:
    """In how many stages tiles of so many rows and columns, `step` channels each, can be asked for: as many as wanted,
    or as a processor's memory holds."""
    return max(1, min(wanted, (shared_memory(x.device) - SCRATCH) // ((rows + columns) * step * x.element_size())))


@cache
def _has_tma(device: torch.device) -> bool:
    # Other vendors number their devices likewise; later ones for a desk have the engine and less memory.
    new = device.type == "cpu" or (torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0))
    return new and shared_memory(device) >= BULK


def tma_describable(*arrays: Tensor) -> bool:
    """Whether the bulk copy engine can fetch tiles of these matrices: half precision, rows on 16-byte boundaries."""
    return TensorDescriptor is not None and all(
        x.dtype in (torch.bfloat16, torch.float16)
        and x.stride(1) == 1
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
        and _has_tma(x.device)
        for x in arrays
    )


def tma_descriptor(x: Tensor, tile: list[int]) -> Any:
    """The matrix as the bulk copy engine knows it; what a tile has beyond its edge reads as 0 and is not written."""
    assert TensorDescriptor is not None
    return TensorDescriptor(x, list(x.shape), list(x.stride()), tile)
