"""Says on which backend a batch runs, and why on no faster one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from adamerge.patching.apply import stack_of
from adamerge.patching.stack import Stack
from adamerge.runtime.backend import Backend, PackedBackend, TritonWithFallback
from adamerge.runtime.block_view import PlainView


@dataclass(frozen=True)
class Explanation:
    """How a merged model runs a batch.

    Attributes:
        backend: "reference", "packed" or "triton".
        why_not_faster: what keeps the batch from the kernels; None where nothing does.
        unknown_part: the part of the recipe that the kernels do not know, so that the reference decides the merges.
        graph: whether the blocks run as a CUDA graph, or when they will, or why they do not.
        blocks_of_torch: blocks whose norms, products and activations are operations of torch, not kernels.
        dtype: that of the tokens.
        tokens_in: tokens of an image that enter the blocks.
        tokens_out: tokens of an image after the last merge, on average over the batch.
    """

    backend: str
    why_not_faster: str | None
    unknown_part: str | None
    graph: str
    blocks_of_torch: tuple[int, ...]
    dtype: torch.dtype
    tokens_in: int
    tokens_out: float

    def __str__(self) -> str:
        why = "" if self.why_not_faster is None else f", because {self.why_not_faster}"
        decides = {"packed": "operations of torch", "reference": "the reference"}.get(self.backend, "kernels")
        decides = decides if self.unknown_part is None else "the reference"
        unknown = "" if self.unknown_part is None else f", because kernels do not know its {self.unknown_part}"
        plain = "kernels"
        if self.blocks_of_torch:
            plain = f"operations of torch in blocks {', '.join(map(str, self.blocks_of_torch))}"
        rows = {
            "backend": f"{self.backend}{why}",
            "merges decided by": f"{decides}{unknown}",
            "CUDA graph": self.graph,
            "layers": plain if self.backend == "triton" else "operations of torch",
            "dtype": str(self.dtype).removeprefix("torch."),
            "tokens of an image": f"{self.tokens_in} in, {self.tokens_out:.1f} after the last merge",
        }
        return "\n".join(f"{name:<20}{text}" for name, text in rows.items())


def explain(model: nn.Module, images: Any) -> Explanation:
    """Run a merged model once, as `model(images)` in the current modes of torch, and say how its blocks ran."""
    stack = stack_of(model)
    with _observed(stack) as seen:
        model(images)
    trace = stack.last_trace
    assert trace is not None
    name = _backend_name(seen.backend)
    unknown = stack.selector.triton().not_lowered if name == "triton" else None
    params = [view.params() if isinstance(view, PlainView) else None for view in stack.views]
    return Explanation(
        backend=name,
        why_not_faster=seen.reason if name != "triton" else None,
        unknown_part=unknown,
        graph=_graph(stack, name, seen),
        blocks_of_torch=tuple(layer for layer, found in enumerate(params) if found is None),
        dtype=seen.tokens.dtype,
        tokens_in=seen.tokens.shape[1],
        tokens_out=trace.prefix + trace.counts[:, -1].double().mean().item(),
    )


@dataclass
class _Seen:
    """What a forward pass did: its tokens, its backend (None if a graph ran) and whether all blocks ran at once."""

    tokens: Tensor
    backend: Backend | None = None
    at_once: bool = False
    reason: str | None = None


@contextmanager
def _observed(stack: Stack) -> Iterator[_Seen]:
    """Note how the stack runs inside."""
    seen = _Seen(torch.empty(0, 0, 0))
    choose: Callable[[Tensor], Backend] = stack.choose_backend
    forward: Callable[..., Tensor] = stack.forward

    def note(x: Tensor) -> None:
        hooks = stack.find_hooks()
        with torch.no_grad():
            reason = stack.selector.why_reference(x, stack.training)
        if reason is None:
            # Gradients come last: they keep few batches from the faster backends.
            reason = stack.selector.why_reference(x, stack.training) if hooks is None else hooks.reason
        seen.tokens, seen.reason = x, reason or ("kernels need a CUDA device" if not x.is_cuda else None)

    def choose_and_note(x: Tensor) -> Backend:
        note(x)
        seen.backend = choose(x)
        return seen.backend

    def forward_and_note(x: Tensor, *args: Any) -> Tensor:
        note(x)
        seen.at_once = True
        return forward(x, *args)

    attributes: dict[str, Any] = {"choose_backend": choose_and_note, "forward": forward_and_note}
    vars(stack).update(attributes)
    try:
        yield seen
    finally:
        for name in attributes:
            del vars(stack)[name]


def _backend_name(backend: Backend | None) -> str:
    if isinstance(backend, PackedBackend):
        return "packed"
    runs_kernels = backend is None or (isinstance(backend, TritonWithFallback) and backend.fallback is None)
    return "triton" if runs_kernels else "reference"


def _graph(stack: Stack, backend: str, seen: _Seen) -> str:
    """What to say of the CUDA graph of the blocks."""
    if backend != "triton" or not seen.tokens.is_cuda:
        return "none, because the blocks run without kernels on a CUDA device"
    if not stack.cuda_graphs:
        return "none, because cuda_graphs=False was given to adamerge.apply"
    if not seen.at_once:
        return "none, because something reads the tokens between the blocks (a hook, or hidden states are asked for)"
    if stack.graphs.failure is not None:
        return f"none, because it could not be captured: {stack.graphs.failure}"
    left = stack.graphs.calls_until_capture(seen.tokens)
    return f"captured at call {left} from now with this shape" if left else "the blocks run as one"
