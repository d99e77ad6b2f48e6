"""All merged blocks as one operator that compilers do not look into.

How many tokens an image keeps is known only when it runs, and kernels and CUDA graphs cannot be traced: followed layer
by layer, `torch.compile` would end a graph at every merge.
"""

from collections.abc import Sequence
from itertools import count
from typing import Optional, Protocol, runtime_checkable
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from adamerge.runtime.autocast import autocast_dtype
from adamerge.runtime.hooks import constant_for_compilers
from adamerge.runtime.reference import Tables


@runtime_checkable
class RunsBlocks(Protocol):
    """What the operator calls: the stack of a merged model."""

    def forward(self, x: Tensor, tables: tuple[Tables, ...] = ()) -> Tensor:
        """All blocks on tokens `x`, each with its rotary tables."""
        ...


_stacks: WeakValueDictionary[int, RunsBlocks] = WeakValueDictionary()
_numbers = count()


def give_number(stack: RunsBlocks) -> int:
    """A number by which the operator finds the stack."""
    number = next(_numbers)
    _stacks[number] = stack
    return number


@torch.library.custom_op("adamerge::merged_blocks", mutates_args=())
def _merged_blocks(
    x: Tensor,
    tables: Sequence[Tensor],
    per_layer: int,
    autocast: Optional[torch.dtype],  # noqa: UP045 (torch reads the annotation)
    stack: int,
) -> Tensor:
    """The blocks of a stack; `tables` has `per_layer` rotary tables for each layer, and `autocast` is the dtype of it.

    Compiled code runs without autocast, so the operator switches it on again.
    """
    layers = tuple(tuple(tables[at : at + per_layer]) for at in range(0, len(tables), max(per_layer, 1)))
    with torch.no_grad(), torch.autocast(x.device.type, autocast, enabled=autocast is not None):
        out = _stacks[stack].forward(x, layers)
    return out.clone() if out.data_ptr() == x.data_ptr() else out.contiguous()


@_merged_blocks.register_fake
def _(x: Tensor, tables: Sequence[Tensor], per_layer: int, autocast: Optional[torch.dtype], stack: int) -> Tensor:  # noqa: UP045
    return x.new_empty(x.shape)


def followed_by_compiler() -> bool:
    """Whether `torch.compile` follows this code now; `torch.export` does not count, whose result runs without us."""
    return torch.compiler.is_dynamo_compiling() and not _exporting()


@constant_for_compilers
def _exporting() -> bool:
    """Whether `torch.export` runs.  A compiler calls this and does not follow it: torch 2.11 would read True inside."""
    return getattr(torch.compiler, "is_exporting", lambda: False)()


def run_opaque(stack: int, x: Tensor, tables: tuple[Tables, ...]) -> Tensor:
    """All blocks of the stack with this number as one operator."""
    flat = [table for layer in tables for table in layer]
    return _merged_blocks(x, flat, len(tables[0]) if tables else 0, autocast_dtype(x.device), stack)
