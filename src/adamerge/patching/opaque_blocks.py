"""All merged blocks as one operator that compilers do not look into.

How many tokens an image keeps is known only when it runs, and kernels and CUDA graphs cannot be traced: followed layer
by layer, `torch.compile` would end a graph at every merge.
"""

from collections.abc import Sequence
from inspect import signature
from itertools import count
from typing import Any, Optional, Protocol, runtime_checkable
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from adamerge.core.recipe import Recipe
from adamerge.patching.recomputed_gradients import RunsOrRecords, recompute_gradients
from adamerge.runtime.autocast import autocast_dtype
from adamerge.runtime.hooks import constant_for_compilers
from adamerge.runtime.reference import Tables


@runtime_checkable
class RunsBlocks(RunsOrRecords, Protocol):
    """What is used of the stack of a merged model."""

    recipe: Recipe

    def forward(self, x: Tensor, tables: tuple[Tables, ...] = ()) -> Tensor:
        """All blocks on tokens `x`, each with its rotary tables."""
        ...

    def hooked(self) -> bool:
        """Whether there is a hook on a block or a part of one."""
        ...

    def on_cuda(self) -> bool:
        """Whether the blocks are on a CUDA device."""
        ...


def may_be_opaque(stack: RunsBlocks, tables: tuple[Tables, ...]) -> bool:
    """Whether a compiler may take all blocks as one operator: outside of training, where it could not follow them.

    With gradients enabled, only where a backward pass may compute them on the reference.
    """
    if stack.training or getattr(stack, "_is_replica", False) or not stack.selector.merges:
        return False
    wants_reference = stack.selector.runtime == "reference"
    learned = any(table.requires_grad for layer in tables for table in layer)
    if torch.is_grad_enabled() and (wants_reference or learned or stack.hooked()):
        return False
    return stack.recipe.ragged or (stack.on_cuda() and not wants_reference)


_stacks: WeakValueDictionary[int, RunsBlocks] = WeakValueDictionary()
_numbers = count()


def give_number(stack: RunsBlocks) -> int:
    """A number by which the operator finds the stack."""
    number = next(_numbers)
    _stacks[number] = stack
    return number


def _tags() -> dict[str, Any]:
    """What keeps a compiler's own CUDA graphs (mode="reduce-overhead") from recording an operator.

    The blocks run as CUDA graphs of their own, and keep tensors between calls.  torch 2.8 cannot be told so.
    """
    known = hasattr(torch.Tag, "cudagraph_unsafe") and "tags" in signature(torch.library.custom_op).parameters
    return {"tags": (torch.Tag.cudagraph_unsafe,)} if known else {}


@torch.library.custom_op("adamerge::merged_blocks", mutates_args=(), **_tags())
def _merged_blocks(
    x: Tensor,
    tables: Sequence[Tensor],
    per_layer: int,
    autocast: Optional[torch.dtype],  # noqa: UP045 (torch reads the annotation)
    stack: int,
    parameters: Sequence[Tensor],
) -> Tensor:
    """The blocks of a stack; `tables` has `per_layer` rotary tables for each layer, and `autocast` is the dtype of it.

    Compiled code runs without autocast, so the operator switches it on again.  `parameters` are those of the stack that
    want gradients: the operator does not read them, but has to name them for torch to give them gradients.
    """
    with torch.no_grad(), torch.autocast(x.device.type, autocast, enabled=autocast is not None):
        out = _stacks[stack].forward(x, _by_layer(tables, per_layer))
    return out.clone() if out.data_ptr() == x.data_ptr() else out.contiguous()


@_merged_blocks.register_fake
def _(x, tables, per_layer, autocast, stack, parameters) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("adamerge::gradients_of_merged_blocks", mutates_args=(), **_tags())
def _gradients(
    grad: Tensor,
    x: Tensor,
    tables: Sequence[Tensor],
    per_layer: int,
    autocast: Optional[torch.dtype],  # noqa: UP045 (torch reads the annotation)
    stack: int,
    parameters: Sequence[Tensor],
) -> list[Tensor]:
    """The gradients of `x` and of `parameters`: an operator too, because a compiler follows backward passes as well."""
    # torch calls operators below autograd, which computes the gradients here.
    autograd = torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False)
    with autograd, torch.autocast(x.device.type, autocast, enabled=autocast is not None):
        found = recompute_gradients(_stacks[stack], grad, x, _by_layer(tables, per_layer))
    return [one.contiguous() for one in found]


@_gradients.register_fake
def _(grad, x, tables, per_layer, autocast, stack, parameters) -> list[Tensor]:
    return [one.new_empty(one.shape) for one in (x, *parameters)]


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, tables, ctx.per_layer, ctx.autocast, ctx.stack, parameters = inputs
    ctx.tables = len(tables)
    ctx.save_for_backward(x, *tables, *parameters)


def _backward(ctx: Any, grad: Tensor) -> Any:
    x, *others = ctx.saved_tensors
    tables, parameters = others[: ctx.tables], others[ctx.tables :]
    first, *found = _gradients(grad.contiguous(), x, tables, ctx.per_layer, ctx.autocast, ctx.stack, parameters)
    return first, [None] * len(tables), None, None, None, found


_merged_blocks.register_autograd(_backward, setup_context=_keep_inputs)


def _by_layer(tables: Sequence[Tensor], per_layer: int) -> tuple[Tables, ...]:
    return tuple(tuple(tables[at : at + per_layer]) for at in range(0, len(tables), max(per_layer, 1)))


def followed_by_compiler() -> bool:
    """Whether `torch.compile` follows this code now; `torch.export` does not count, whose result runs without us."""
    return torch.compiler.is_dynamo_compiling() and not _exporting()


@constant_for_compilers
def _exporting() -> bool:
    """Whether `torch.export` runs.  A compiler calls this and does not follow it: torch 2.11 would read True inside."""
    return getattr(torch.compiler, "is_exporting", lambda: False)()


def run_opaque(stack: int, x: Tensor, tables: tuple[Tables, ...], parameters: Sequence[Tensor]) -> Tensor:
    """All blocks of the stack with this number as one operator, with gradients for `parameters`."""
    flat = [table for layer in tables for table in layer]
    return _merged_blocks(x, flat, len(tables[0]) if tables else 0, autocast_dtype(x.device), stack, parameters)
