"""Which runtime a batch takes: the reference, or packed tokens with or without kernels."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from adamerge.core.budget import Adaptive, Fixed
from adamerge.core.recipe import Recipe
from adamerge.runtime import reference
from adamerge.runtime.block_view import View
from adamerge.runtime.packed import forward as packed
from adamerge.runtime.packed.onednn import with_onednn
from adamerge.runtime.packed.state import PackedState, pack, unpack
from adamerge.runtime.reference import Tables
from adamerge.runtime.trace import Trace, join

if TYPE_CHECKING:
    from adamerge.runtime.triton import forward as fused

Runtime = Literal["auto", "reference", "packed"]
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@runtime_checkable
class Backend(Protocol):
    """One pass over the blocks on some runtime."""

    def step(self, layer: int, tables: Tables = ()) -> None: ...

    def finish(self) -> Tensor: ...

    def tell(self) -> Trace | Callable[[], Trace]:
        """What the layers did so far, or how to work it out when asked for."""
        ...


class BackendSelector:
    """Chooses the road for each batch, and says once why it is not the one asked for."""

    def __init__(
        self,
        views: Sequence[View],
        recipe: Recipe,
        prefix: int,
        class_token: bool,
        runtime: Runtime,
        *,
        rotary: bool = False,
    ):
        self.views, self.recipe, self.prefix, self.class_token = tuple(views), recipe, prefix, class_token
        self.runtime, self.rotary = runtime, rotary
        self.said = False
        # Why a kernel could not run, once one could not.
        self.failed: str | None = None
        self._fused: fused.TritonBackend | None = None

    @property
    def may_pack(self) -> bool:
        """Whether any batch can take the road with kernels."""
        return self.runtime != "reference" and not self.rotary and not _merges_nothing(self.recipe)

    def choose(self, x: Tensor, views: Sequence[View], training: bool) -> Backend:
        """The road for a batch.  A replica of DataParallel has views of its own."""
        if self.runtime == "reference" or (self.runtime == "auto" and not x.is_cuda):
            return ReferenceBackend(self, x, views)
        reason = self._obstacle(x, training)
        if reason is None and views != self.views:
            reason = "this is a replica of DataParallel"
        if reason is not None:
            # Gradients, training and identity are everyday; only a wish that cannot be met is worth a word.
            self._say(f"runtime='packed' was asked for, but {reason}; the reference runs instead")
            return ReferenceBackend(self, x, views)
        if not x.is_cuda:
            return PackedCpuBackend(self, x)
        road = self.kernels()
        if isinstance(road.fusion, str):
            self._say(f"the kernels do not know this recipe's {road.fusion}; the reference decides its merges")
        return TritonWithFallback(self, x, views)

    def reference_because(self, x: Tensor, training: bool) -> str | None:
        """Why a batch on a CUDA device takes the reference, if it does."""
        return "runtime='reference' was asked for" if self.runtime == "reference" else self._obstacle(x, training)

    def _obstacle(self, x: Tensor, training: bool) -> str | None:
        if torch.is_grad_enabled():
            return "gradients are enabled (use torch.inference_mode)"
        if training:
            return "the model is in training mode"
        if torch.is_autocast_enabled(x.device.type):
            return "autocast is on"
        if self.rotary:
            return "this host turns its queries and keys by their places"
        if _merges_nothing(self.recipe):
            return "this recipe merges nothing, and only the reference is bit-exact then"
        if x.is_cuda and x.dtype not in KERNEL_DTYPES:
            return f"there are no kernels for {x.dtype}"
        return (self.failed or why_no_kernels()) if x.is_cuda else None

    def kernels(self) -> "fused.TritonBackend":
        """The road with kernels, which is kept."""
        if self._fused is None:
            from adamerge.runtime.triton import forward as fused

            self._fused = fused.TritonBackend(self.views, self.recipe, self.prefix, self.class_token)
        return self._fused

    def give_up(self, error: Exception) -> None:
        """From now on without kernels, because one of them cannot run here."""
        first = (str(error).splitlines() or [""])[0]
        self.failed = f"a kernel does not run on this device ({type(error).__name__}: {first})"
        self.said = True
        warnings.warn(f"{self.failed}; the reference runs instead, from now on", stacklevel=2)

    def _say(self, text: str) -> None:
        if self.runtime == "packed" and not self.said:
            self.said = True
            warnings.warn(text, stacklevel=2)


def why_no_kernels() -> str | None:
    """Why the kernels cannot be compiled here, if so."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    from adamerge.runtime.triton.kernels.launch import why_triton_too_old

    return why_triton_too_old()


def _merges_nothing(recipe: Recipe) -> bool:
    """Whether a recipe is known to merge nothing."""
    budget = recipe.budget
    if isinstance(budget, Fixed):
        return not any(budget.r) if isinstance(budget.r, tuple) else budget.r == 0
    return isinstance(budget, Adaptive) and not budget.ragged


class ReferenceBackend:
    """The padded road.  On a CPU, images whose counts differ run one after the other: nothing is padded, and an
    image's result cannot depend on its batch."""

    def __init__(self, switch: BackendSelector, x: Tensor, views: Sequence[View]):
        self.switch, self.views = switch, views
        self.one_by_one = switch.recipe.ragged and x.device.type == "cpu"
        pieces = x.split(1) if self.one_by_one else (x,)
        self.states = [reference.start(piece, switch.prefix, switch.class_token) for piece in pieces]

    def step(self, layer: int, tables: Tables = ()) -> None:
        view, depth = self.views[layer], len(self.views)
        states = [replace(state, tables=tables) for state in self.states] if tables else self.states
        self.states = [reference.step(state, view, self.switch.recipe, depth) for state in states]

    def finish(self) -> Tensor:
        pieces = [reference.finish(state) for state in self.states]
        # A copy, even an equal one, can have another memory layout than the host's, and then pool to other bits: a
        # batch that is no copy stays as it is, and images that ran one by one get the same layout however many.
        return torch.cat(pieces).contiguous() if self.one_by_one else pieces[0]

    def tell(self) -> Trace:
        prefix, before = self.switch.prefix, self.switch.recipe.site == "before_block"
        return join([Trace(state.steps, prefix, before) for state in self.states])


class PackedCpuBackend:
    """Packed tokens on a CPU, in plain torch."""

    def __init__(self, switch: BackendSelector, x: Tensor):
        self.switch, self.state = switch, pack(x, switch.prefix, switch.class_token)
        self.views = [with_onednn(view, x) for view in switch.views]

    def step(self, layer: int, tables: Tables = ()) -> None:
        self.state = packed.step(self.state, self.views[layer], self.switch.recipe, len(self.views))

    def finish(self) -> Tensor:
        return unpack(self.state)

    def tell(self) -> Callable[[], Trace]:
        return _lazy_trace(self.state, self.switch.recipe)


class TritonWithFallback:
    """Packed tokens with kernels.  Where one of them cannot run, the reference takes over, from the first layer on."""

    def __init__(self, switch: BackendSelector, x: Tensor, views: Sequence[View]):
        from adamerge.runtime.triton.kernels.launch import CannotRun

        self.switch, self.x, self.views = switch, x, views
        self.error: type[Exception] = CannotRun
        self.run = switch.kernels().start(x)
        self.instead: ReferenceBackend | None = None

    def step(self, layer: int, tables: Tables = ()) -> None:
        if self.instead is None:
            try:
                return self.run.step(layer)
            except self.error as error:
                self.instead = self._reference(error, layer)
        self.instead.step(layer)

    def finish(self) -> Tensor:
        if self.instead is None:
            try:
                return self.run.finish()
            except self.error as error:
                self.instead = self._reference(error, len(self.views))
        return self.instead.finish()

    def tell(self) -> Trace | Callable[[], Trace]:
        return _lazy_trace(self.run.state, self.switch.recipe) if self.instead is None else self.instead.tell()

    def _reference(self, error: Exception, layers: int) -> ReferenceBackend:
        """The reference after so many layers."""
        self.switch.give_up(error)
        road = ReferenceBackend(self.switch, self.x, self.views)
        for layer in range(layers):
            road.step(layer)
        return road


def _lazy_trace(state: PackedState, recipe: Recipe) -> Callable[[], Trace]:
    steps, prefix, before = state.steps, state.layout.prefix, recipe.site == "before_block"
    return lambda: Trace(tuple(step() for step in steps), prefix, before)
