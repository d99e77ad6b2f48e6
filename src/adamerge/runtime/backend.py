"""Chooses the backend of a batch.

Three backends: `reference` pads every image to the longest of its batch and uses plain torch; `packed` keeps the tokens
of a batch in one array without padding, in plain torch on CPU; `triton` is the packed one with kernels, on CUDA.
The option `runtime="packed"` asks for whichever of the last two fits the device.
"""

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from adamerge.core.recipe import Recipe
from adamerge.runtime import reference
from adamerge.runtime.autocast import autocast_dtype
from adamerge.runtime.block_view import View
from adamerge.runtime.hooks import Hooks
from adamerge.runtime.obstacles import Obstacle, find_obstacle, read_facts
from adamerge.runtime.packed import forward as packed
from adamerge.runtime.packed.onednn import OneDnnView, with_onednn
from adamerge.runtime.packed.prepared_blocks import PreparedBlocks
from adamerge.runtime.packed.rotary import RowTurner
from adamerge.runtime.packed.state import PackedState, pack, unpack
from adamerge.runtime.reference import Tables
from adamerge.runtime.trace import BuildTrace, LazyTrace, Trace, join

if TYPE_CHECKING:
    from adamerge.runtime.triton.forward import TritonBackend

Runtime = Literal["auto", "reference", "packed"]


@runtime_checkable
class Backend(Protocol):
    """One forward pass of one batch through the blocks."""

    def step(self, layer: int, tables: Tables = ()) -> None:
        """Run block `layer`; `tables` are the host's rotary tables, if it has any."""
        ...

    def finish(self) -> Tensor:
        """The tokens in the host's own shape, `(b, prefix + patches, d)`."""
        ...

    def build_trace(self) -> Trace | BuildTrace:
        """The trace of the layers run so far, or a function that builds it."""
        ...


class BackendSelector:
    """Chooses the backend of each batch, and warns once when it is not the one asked for."""

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
        depth = len(self.views)
        self.merges = any(recipe.may_merge(layer, depth) for layer in range(depth))
        # Whether the reference runs images one at a time on CPU; elsewhere, and in training, it pads them.
        self.per_image_on_cpu = recipe.ragged
        self.warned = False
        # Why a kernel could not run, once one could not.
        self.triton_failure: str | None = None
        self._triton: TritonBackend | None = None
        self.prepared = PreparedBlocks(self.views)

    @property
    def may_pack(self) -> bool:
        """Whether any batch can take the packed or the triton backend."""
        return self.runtime != "reference" and self._why_no_rotation() is None and self.merges

    def choose(self, x: Tensor, views: Sequence[View], training: bool) -> Backend:
        """Start a pass on the backend that fits the batch.  A DataParallel replica passes views of its own."""
        compiling = self.runtime == "auto" and not x.is_cuda and torch.compiler.is_compiling()
        if self.runtime == "reference" or compiling:
            return ReferenceBackend(self, x, views, training=training)
        obstacle = self._obstacle(x, training)
        if obstacle is None and views != self.views:
            obstacle = Obstacle("this is a replica of DataParallel")
        if obstacle is not None:
            # A batch on a CPU never has kernels: with "auto" the reference is no surprise there.
            if x.is_cuda or self.runtime == "packed":
                self._warn_of(obstacle)
            return ReferenceBackend(self, x, views, training=training)
        if not x.is_cuda:
            return PackedBackend(self, x)
        reason = self.triton().not_lowered
        if reason is not None:
            self.warn_once(
                f"the kernels do not know this recipe's {reason}; the reference decides its merges, which takes longer"
            )
        return TritonWithFallback(self, x, views)

    def choose_for_hooks(
        self, x: Tensor, views: Sequence[View], training: bool, hooks: Hooks | None
    ) -> "ReferenceBackend":
        """Start a pass on the reference, which calls the host's modules, so that hooks on them run."""
        if hooks is not None and (self.runtime == "packed" or (x.is_cuda and self.runtime == "auto")):
            self._warn_of(self._obstacle(x, training) or Obstacle(hooks.reason, "remove it where speed matters"))
        return ReferenceBackend(self, x, views, hooks, training=training)

    def why_reference(self, x: Tensor, training: bool) -> str | None:
        """Why a batch takes the reference backend, or None if it does not."""
        if self.runtime == "reference":
            return "runtime='reference' was asked for"
        obstacle = self._obstacle(x, training)
        return None if obstacle is None else obstacle.reason

    def _obstacle(self, x: Tensor, training: bool) -> Obstacle | None:
        batch = read_facts(x, training)
        found = find_obstacle(
            batch, self.merges, self._why_no_rotation(), lambda: self.triton_failure or why_no_kernels()
        )
        return self._obstacle_on_cpu(x, batch.autocast) if found is None and batch.device == "cpu" else found

    def _why_no_rotation(self) -> str | None:
        """Why this host's queries and keys cannot be turned without the reference; None if they can or need not."""
        if not self.rotary:
            return None
        unknown = [type(view).__name__ for view in self.views if not hasattr(view, "rotation")]
        return f"the view of a block, {unknown[0]}, has no `rotation`" if unknown else None

    def _warn_of(self, obstacle: Obstacle) -> None:
        """Say that the reference runs: always where "packed" was asked for, else where it is a surprise."""
        if self.runtime == "packed":
            self.warn_once(f"runtime='packed' was asked for, but {obstacle.reason}; the reference runs instead")
        elif obstacle.advice is not None:
            self.warn_once(f"the merged blocks run without kernels because {obstacle.reason}; {obstacle.advice}")

    def _obstacle_on_cpu(self, x: Tensor, autocast: torch.dtype | None) -> Obstacle | None:
        """Why the reference is better for a batch on a CPU that could be packed; None if it is not."""
        if torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
            return Obstacle("torch.jit.trace follows plain torch only")
        if self.runtime == "auto" and torch.compiler.is_compiling():
            return Obstacle("a compiler follows plain torch best")
        if self.runtime == "auto" and type(x) is not Tensor:
            return Obstacle(f"the tokens are a {type(x).__name__}, not a plain tensor")
        if autocast is not None and not self.prepared.all_in_onednn(x, autocast):
            return Obstacle(f"autocast is on, and oneDNN does not run these blocks in {autocast}")
        if self.runtime == "packed" or self.recipe.ragged:
            return None
        if autocast is None and not isinstance(with_onednn(self.views[0], x), OneDnnView):
            return Obstacle("equal lengths need no packing, and oneDNN does not run this block")
        return None

    def triton(self) -> "TritonBackend":
        """The triton backend for this recipe, built once."""
        if self._triton is None:
            from adamerge.runtime.triton.forward import TritonBackend

            self._triton = TritonBackend(self.views, self.recipe, self.prefix, self.class_token)
        return self._triton

    def disable_triton(self, error: Exception) -> None:
        """Use the reference from now on, because a kernel raised `error`."""
        first = (str(error).splitlines() or [""])[0]
        self.triton_failure = f"a kernel does not run on this device ({type(error).__name__}: {first})"
        self.warned = True
        warnings.warn(f"{self.triton_failure}; the reference runs instead, from now on", stacklevel=2)

    def warn_once(self, text: str) -> None:
        """Warn if the user had no warning from this selector yet.  A compiler that traces the model keeps silent."""
        if not self.warned and not torch.compiler.is_compiling():
            self.warned = True
            warnings.warn(text, stacklevel=2)


def why_no_kernels() -> str | None:
    """Why the kernels cannot be compiled here, or None if they can."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    from adamerge.runtime.triton.kernels.launch import why_triton_too_old

    return why_triton_too_old()


class ReferenceBackend:
    """Every image padded to the longest of its batch, in plain torch.

    On CPU, images whose counts differ run one at a time: nothing is padded, and an image's result cannot depend on its
    batch.  A hook inside a block gets the tokens of all images, so they are padded then; so are those of a batch in
    training, which takes less time.
    """

    def __init__(
        self,
        selector: BackendSelector,
        x: Tensor,
        views: Sequence[View],
        hooks: Hooks | None = None,
        *,
        training: bool = False,
    ):
        self.selector, self.views, self.hooks = selector, views, hooks
        whole = training or (hooks is not None and hooks.inside)
        self.per_image = selector.per_image_on_cpu and x.device.type == "cpu" and not whole
        pieces = x.split(1) if self.per_image else (x,)
        states = [reference.start(piece, selector.prefix, selector.class_token) for piece in pieces]
        self.states = [reference.start_training(state) for state in states] if training else states

    def step(self, layer: int, tables: Tables = ()) -> None:
        view, depth = self.views[layer], len(self.views)
        states = [replace(state, tables=tables) for state in self.states] if tables else self.states
        hooked = self.hooks is not None
        self.states = [reference.step(state, view, self.selector.recipe, depth, hooked) for state in states]

    def resume(self, x: Tensor) -> None:
        """Go on from tokens in the host's own shape, which a hook may have changed."""
        pieces = x.split(1) if self.per_image and isinstance(x, Tensor) else [x] * len(self.states)
        self.states = [reference.resume(state, piece) for state, piece in zip(self.states, pieces, strict=True)]

    def finish(self) -> Tensor:
        pieces = [reference.finish(state) for state in self.states]
        # Pooling rounds by the memory layout.  A batch keeps the host's layout (no copy); images that ran one at a time
        # are made contiguous, so that the layout does not depend on how many there are.
        return torch.cat(pieces).contiguous() if self.per_image else pieces[0]

    def build_trace(self) -> Trace:
        prefix, before = self.selector.prefix, self.selector.recipe.site == "before_block"
        return join([Trace(state.steps, prefix, before) for state in self.states])


class PackedBackend:
    """Packed tokens on CPU, in plain torch."""

    def __init__(self, selector: BackendSelector, x: Tensor):
        self.selector, self.state = selector, pack(x, selector.prefix, selector.class_token)
        self.autocast = autocast_dtype(x.device)
        self.views = selector.prepared.views_for(x, self.autocast)
        self.turner = RowTurner()

    def step(self, layer: int, tables: Tables = ()) -> None:
        turn = partial(self.turner.turn, view=self.selector.views[layer], tables=tables) if tables else None
        # The views compute in the dtype of autocast themselves.
        with torch.autocast("cpu", enabled=False) if self.autocast is not None else nullcontext():
            self.state = packed.step(self.state, self.views[layer], self.selector.recipe, len(self.views), turn)

    def finish(self) -> Tensor:
        return unpack(self.state)

    def build_trace(self) -> BuildTrace:
        return _lazy_trace(self.state, self.selector.recipe)


class TritonWithFallback:
    """Packed tokens with Triton kernels on CUDA.

    If a kernel cannot run, the reference backend repeats the pass from the first layer.
    """

    def __init__(self, selector: BackendSelector, x: Tensor, views: Sequence[View]):
        from adamerge.runtime.triton.kernels.launch import CannotRun

        self.selector, self.x, self.views = selector, x, views
        self.cannot_run: type[Exception] = CannotRun
        self.forward = selector.triton().start(x, autocast_dtype(x.device))
        self.fallback: ReferenceBackend | None = None
        # The rotary tables of the layers so far, for the reference.
        self.tables: list[Tables] = []

    def step(self, layer: int, tables: Tables = ()) -> None:
        if self.fallback is None:
            try:
                self.forward.step(layer, tables)
                return self.tables.append(tables)
            except self.cannot_run as error:
                self.fallback = self._start_fallback(error)
        self.fallback.step(layer, tables)

    def finish(self) -> Tensor:
        if self.fallback is None:
            try:
                return self.forward.finish()
            except self.cannot_run as error:
                self.fallback = self._start_fallback(error)
        return self.fallback.finish()

    def build_trace(self) -> Trace | BuildTrace:
        if self.fallback is not None:
            return self.fallback.build_trace()
        return _lazy_trace(self.forward.state, self.selector.recipe)

    def _start_fallback(self, error: Exception) -> ReferenceBackend:
        """The reference backend after the layers so far."""
        self.selector.disable_triton(error)
        backend = ReferenceBackend(self.selector, self.x, self.views)
        for layer, tables in enumerate(self.tables):
            backend.step(layer, tables)
        return backend


def _lazy_trace(state: PackedState, recipe: Recipe) -> BuildTrace:
    """A function that builds the trace: it reads counts from the device, so it runs only when asked for."""
    steps, layout, prefix, before = state.steps, state.layout, state.layout.prefix, recipe.site == "before_block"
    return LazyTrace(lambda: Trace(tuple(step() for step in steps), prefix, before), lambda: layout.patches)
