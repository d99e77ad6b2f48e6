"""What a host's own loop over its blocks calls in place of each block."""

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from adamerge.core.errors import BadOption, NotApplied
from adamerge.core.recipe import Recipe
from adamerge.hosts.call_convention import CallConvention
from adamerge.runtime.backend import Backend, ReferenceBackend
from adamerge.runtime.hooks import call_as
from adamerge.runtime.reference import Tables
from adamerge.runtime.trace import BuildTrace, Trace


def refuse_symbols(x: Any) -> None:
    """Refuse the symbols by which torch.fx traces a model: which tokens merge depends on the images."""
    if isinstance(x, Proxy):
        raise BadOption(
            "torch.fx cannot trace a merged model, because what merges depends on the images. For features between "
            "blocks use forward hooks on the blocks, or timm's forward_intermediates; for a graph use torch.compile or "
            "torch.export; or trace the model before merging, after adamerge.remove(model)."
        )


def refuse_recorded_counts(recipe: Recipe) -> None:
    """Refuse torch.jit.trace of adaptive counts."""
    if recipe.ragged and torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        raise BadOption(
            "torch.jit.trace would record how many tokens merge in this batch and repeat that for all; the counts "
            "of this recipe adapt to the image. Trace a recipe with fixed counts such as tome(8), or use "
            "torch.compile."
        )


@runtime_checkable
class MergingBlocks(Protocol):
    """What a forward pass uses of the stack of blocks."""

    convention: CallConvention

    def __len__(self) -> int: ...

    def choose_backend(self, x: Tensor) -> Backend:
        """The backend for a batch of tokens, which begins a pass."""
        ...

    def forward(self, x: Tensor, tables: tuple[Tables, ...] = ()) -> Tensor:
        """All blocks on tokens `x`, each with its rotary tables."""
        ...

    def block(self, layer: int) -> nn.Module:
        """The module of one block."""
        ...

    def keep_trace(self, trace: Trace | BuildTrace | None) -> None:
        """Keep the trace of a pass; None forgets that of the pass before."""
        ...


class ForwardPass:
    """One forward pass of a host's loop over the blocks.  It holds the merged tokens, which the loop does not see.

    With `at_once` the loop reads nothing between the blocks: all of them run at the call of the last one, and calls
    before it give back the tokens they were given.  With `hooked`, blocks are called as modules, so that hooks on them
    run, and go on from what the hooks left.
    """

    def __init__(self, stack: MergingBlocks, at_once: bool = False, hooked: bool = False):
        self.stack, self.at_once, self.hooked = stack, at_once, hooked
        self.next_layer = 0
        # What the last block gave the host, in the host's shape, after hooks on that block.
        self.output: Tensor | None = None
        self._backend: Backend | None = None
        self._tables: list[Tables] = []

    def run_block(self, layer: int, x: Tensor, tables: Tables = ()) -> Tensor:
        """Run one block with the rotary tables that the host passes to it; give the tokens in the host's shape."""
        if layer and self.next_layer != layer:
            raise NotApplied(f"block {layer} of a merged model ran out of turn; blocks run once each, in order")
        self.next_layer = layer + 1
        return self._defer(layer, x, tables) if self.at_once else self._step(layer, x, tables)

    def _step(self, layer: int, x: Tensor, tables: Tables) -> Tensor:
        stack = self.stack
        if layer == 0:
            # A hook inside the first block would see the trace of another batch.
            stack.keep_trace(None)
            self._backend = stack.choose_backend(x)
        elif self.hooked and isinstance(self._backend, ReferenceBackend):
            self._backend.resume(x)
        assert self._backend is not None
        self._backend.step(layer, tables)
        stack.keep_trace(self._backend.build_trace())
        return self._backend.finish()

    def _defer(self, layer: int, x: Tensor, tables: Tables) -> Tensor:
        if layer == 0:
            self._tables = []
        self._tables.append(tables)
        if layer + 1 < len(self.stack):
            return x
        return self.stack.forward(x, tuple(self._tables) if any(self._tables) else ())


class BlockCall:
    """One block of a forward pass.  It takes and gives tokens in the host's own shape.

    Its other attributes are those of the block: code that loops over blocks can read, freeze, hook or change them.
    """

    forward_pass: ForwardPass
    layer: int

    def __init__(self, forward_pass: ForwardPass, layer: int):
        # Not to the block.  Compilers of torch 2.11 do not follow `vars(self).update`.
        object.__setattr__(self, "forward_pass", forward_pass)
        object.__setattr__(self, "layer", layer)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copying and pickling ask for these before there is a block
            raise AttributeError(name)
        return getattr(self.forward_pass.stack.block(self.layer), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.forward_pass.stack.block(self.layer), name, value)

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        current = self.forward_pass
        refuse_symbols(x)
        self._refuse_changed_tokens(x)
        if current.stack.convention.hooked_by_class:
            # Through the module, so that hooks on the block see it run.
            made = current.stack.block(self.layer)(x, *args, adamerge_call=self, **kwargs)
        elif current.hooked:
            made = self._call_module(x, *args, **kwargs)
        else:
            made = self.run(x, args, kwargs)
        current.output = made[0] if isinstance(made, tuple) else made
        return made

    def _call_module(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Call the host's block, whose hooks run around the merging block."""

        def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            return self.run(x, args, kwargs)

        return call_as(self.forward_pass.stack.block(self.layer), forward, x, *args, **kwargs)

    def run(self, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the block on the tokens that the pass holds; `x` is what the block before it gave, in the host's shape.

        In a hooked pass `x` may have been changed by hooks, and the block takes the changes over.
        """
        convention = self.forward_pass.stack.convention
        tables = convention.rotary_tables(args, kwargs)
        if self.layer == 0 and convention.contiguous_tokens:
            x = x.contiguous()
        output = self.forward_pass.run_block(self.layer, x, tables)
        return (output,) if convention.returns_tuple else output

    def _refuse_changed_tokens(self, x: Tensor) -> None:
        given = self.forward_pass.output
        if self.layer and given is not None and x is not given and not torch.compiler.is_compiling():
            raise BadOption(
                f"the model around the blocks changed the tokens between blocks {self.layer - 1} and {self.layer}; a "
                "merged model would lose that. Change them by a hook on a block, or call adamerge.remove(model)."
            )
