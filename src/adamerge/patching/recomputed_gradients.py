"""Runs the blocks without recording although gradients are enabled, and runs them again if a gradient is asked for.

Most code that only wants outputs does not disable gradients, and the packed and triton backends cannot record their
operations.  So they run without recording, and a backward pass runs the blocks once more, recorded, on the reference.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from adamerge.runtime.autocast import autocast_dtype
from adamerge.runtime.backend import BackendSelector, ReferenceBackend
from adamerge.runtime.block_view import View
from adamerge.runtime.reference import Tables

LayerTables = tuple[Tables, ...]


@runtime_checkable
class RunsOrRecords(Protocol):
    """What is used of the stack of a merged model."""

    selector: BackendSelector
    training: bool

    @property
    def views(self) -> Sequence[View]:
        """A view of each block."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of the blocks."""
        ...

    def run(self, x: Tensor, tables: LayerTables) -> Tensor:
        """All blocks on tokens `x`, in the fastest way that fits the modes of torch; keep the trace."""
        ...


def may_recompute(stack: RunsOrRecords, x: Tensor, tables: LayerTables) -> bool:
    """Whether gradients are enabled, only a backward pass may ask for them, and a faster backend runs without them.

    Transforms of `torch.func` and forward-mode derivatives look into every operation.  Rotary tables that are learned
    need gradients of their own.  The parameters of a replica of DataParallel are not listed by its modules.
    """
    if not torch.is_grad_enabled() or getattr(stack, "_is_replica", False) or _looked_into():
        return False
    if any(table.requires_grad for layer in tables for table in layer):
        return False
    with torch.no_grad():
        return stack.selector.why_reference(x, stack.training) is None


def _looked_into() -> bool:
    """Whether a compiler or a transform follows the operations."""
    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )


def trained_parameters(stack: RunsOrRecords) -> list[nn.Parameter]:
    """The parameters of the blocks that want gradients."""
    return [parameter for parameter in stack.parameters() if parameter.requires_grad]


def recompute_gradients(stack: RunsOrRecords, grad: Tensor, x: Tensor, tables: LayerTables) -> list[Tensor]:
    """The gradients of `x` and of the trained parameters, for the gradient `grad` of the output; else zeros."""
    start = x.detach().requires_grad_()
    wanted = [start, *trained_parameters(stack)]
    found = _gradients(stack, tables, start, wanted, grad)
    return [torch.zeros_like(one) if of is None else of for one, of in zip(wanted, found, strict=True)]


def run_without_recording(stack: RunsOrRecords, x: Tensor, tables: LayerTables) -> Tensor:
    """All blocks of `stack` on tokens `x`; gradients of the result are computed by the reference when asked for."""
    parameters = trained_parameters(stack)
    if parameters or x.requires_grad:
        return _Blocks.apply(stack, tables, x, *parameters)
    with torch.no_grad():
        return stack.run(x, tables)


class _Blocks(torch.autograd.Function):
    """The blocks as one operation.  Parameters are arguments, so that torch knows that the result depends on them."""

    @staticmethod
    def forward(ctx: Any, stack: RunsOrRecords, tables: LayerTables, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.stack, ctx.tables, ctx.autocast = stack, tables, autocast_dtype(x.device)
        # Saved by torch, which refuses a backward pass after one of them was changed in place.
        ctx.save_for_backward(x, *parameters)
        return stack.run(x, tables)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, *parameters = ctx.saved_tensors
        # With create_graph=True gradients are enabled here, and derivatives of the gradients reach the graph of `x`.
        create_graph = torch.is_grad_enabled()
        start = x if create_graph else x.detach().requires_grad_(x.requires_grad)
        needed = ctx.needs_input_grad[2:]
        wanted = [tensor for tensor, need in zip((start, *parameters), needed, strict=True) if need]
        with torch.autocast(x.device.type, ctx.autocast, enabled=ctx.autocast is not None):
            found = iter(_gradients(ctx.stack, ctx.tables, start, wanted, *grads, create_graph=create_graph))
        return None, None, *(next(found) if need else None for need in needed)


def _gradients(
    stack: RunsOrRecords,
    tables: LayerTables,
    x: Tensor,
    wanted: Sequence[Tensor],
    grad: Tensor,
    *,
    create_graph: bool = False,
) -> tuple[Tensor | None, ...]:
    """The gradients of `wanted`, None for others than those of the output: the blocks run again, on the reference."""
    with torch.enable_grad():
        backend = ReferenceBackend(stack.selector, x, stack.views)
        for layer in range(len(stack.views)):
            backend.step(layer, tables[layer] if tables else ())
        tokens = backend.finish()
    return torch.autograd.grad(tokens, wanted, grad, create_graph=create_graph, allow_unused=True)
