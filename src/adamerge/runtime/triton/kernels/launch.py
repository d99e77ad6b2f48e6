"""Helpers for launching kernels: tile sizes, device limits, TMA descriptors, programmatic dependent launch (PDL)."""

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
    # Older releases of Triton have no descriptors; kernels use pointers then.
    TensorDescriptor = None


# Raised where a kernel cannot be compiled for a device, or asks for more than it has.
CannotRun = TritonError

# Kernels use exp2 and log2, hosts exp and log.
LOG2E = 1.4426950408889634

# Up to this many rows, processors are idle: kernels are bound by memory latency and launches.
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
    """If EARLY, the kernel was launched while its predecessor still ran: wait for it, then release the successor.

    Each kernel waits for its predecessor (gdc_wait) before it releases its successor.  So before this wait a kernel may
    read only what its direct predecessor does not write, and must write nothing.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
@no_type_check
def head_offset(head, head_stride, BY_EIGHT: tl.constexpr):
    """Where a head begins in its row.  If BY_EIGHT, the stride is a multiple of eight: eight channels load at once.

    Triton sees that only for multiples of 16; heads of 72 or 88 channels are none.  It ignores hints on arguments.
    """
    offset = head * head_stride
    if BY_EIGHT:
        offset = tl.multiple_of(offset, 8)
    return offset


@triton.jit
@no_type_check
def head_rows(at, channel, DIM: tl.constexpr, END: tl.constexpr):
    """Some channels, up to END, of rows of a head; 0 from channel DIM on."""
    if END <= DIM:
        tile = tl.load(at + channel[None, :])
    else:
        tile = tl.load(at + channel[None, :], mask=(channel < DIM)[None, :], other=0.0)
    return tile


@triton.jit
@no_type_check
def head_rows_if(here, at, channel, DIM: tl.constexpr):
    """The same for the rows that are `here`, and 0 for others."""
    return tl.load(at + channel[None, :], mask=here[:, None] & (channel < DIM)[None, :], other=0.0)


def empty_rows(count: int, length: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """`count` arrays of `length` numbers of four bytes in one allocation, each on a boundary of 16 bytes.

    Triton compiles a kernel once more for arrays that lie elsewhere, and where they lie would depend on the batch.
    """
    whole = torch.empty((count, 4 * triton.cdiv(length, 4)), dtype=dtype, device=device)
    return whole[:, :length].unbind()


def small_grid(x: Tensor) -> bool:
    """Whether there are so few rows that latency, not work, takes most of a kernel's time."""
    return len(x) <= SMALL_GRID_ROWS


def pdl_options(x: Tensor) -> dict[str, bool]:
    """Launch options of a kernel: in CUDA graphs, from Hopper on, it is launched while its predecessor still runs.

    Not with many rows: a waiting kernel would then take registers and memory from the running one.
    """
    if x.is_cuda and small_grid(x) and _has_tma(x.device) and torch.cuda.is_current_stream_capturing():
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}


def precision(x: Tensor) -> str:
    """`input_precision` of `tl.dot`: float32 is multiplied exactly, as in the reference; half precision ignores it."""
    return "ieee" if x.dtype == torch.float32 else "tf32"


def next_pow2(n: int, least: int = 16) -> int:
    """The smallest power of two that is at least `n` and `least`."""
    return max(triton.next_power_of_2(n), least)


def split_head(dim: int) -> tuple[int, int]:
    """The channels of a head as two powers of two, the second for what the first leaves over: 72 is 64 and 16.

    One power of two, 128, would take twice as long.  Where nothing is left over, the second is 16 and not used.
    """
    first = max(16, 1 << (dim.bit_length() - 1))
    return first, next_pow2(dim - first)


def blocks(n: int, size: int) -> int:
    """`n / size`, rounded up."""
    return triton.cdiv(n, size)


@cache
def processors(device: torch.device) -> int:
    """How many multiprocessors the device has; 2 for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@cache
def shared_memory(device: torch.device) -> int:
    """Shared memory per program in bytes: 163 KiB on an A100, 99 KiB on consumer GPUs."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin if device.type == "cuda" else H200


def num_stages_for(wanted: int, x: Tensor, rows: int, columns: int, step: int) -> int:
    """`num_stages` for tiles of `rows` and of `columns` tokens, `step` channels each: as many as wanted, or as fit into
    shared memory."""
    return max(1, min(wanted, (shared_memory(x.device) - SCRATCH) // ((rows + columns) * step * x.element_size())))


@cache
def _has_tma(device: torch.device) -> bool:
    # HIP devices have such numbers too.  Later consumer GPUs have TMA, but too little shared memory.
    new = device.type == "cpu" or (torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0))
    return new and shared_memory(device) >= BULK


def tma_describable(*arrays: Tensor) -> bool:
    """Whether TMA can load tiles of these matrices: half precision, rows on 16-byte boundaries."""
    return TensorDescriptor is not None and all(
        x.dtype in (torch.bfloat16, torch.float16)
        and x.stride(1) == 1
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
        and _has_tma(x.device)
        for x in arrays
    )


def tma_descriptor(x: Tensor, tile: list[int]) -> Any:
    """The TMA descriptor of a matrix; the part of a tile beyond the edge reads as 0 and is not written."""
    assert TensorDescriptor is not None
    return TensorDescriptor(x, list(x.shape), list(x.stride()), tile)
