"""The one module that replaces a host's block container, and the only block loop of the library."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, overload

import torch
from torch import Tensor, nn

from adamerge.core.errors import BadOption, NotApplied
from adamerge.core.recipe import Recipe
from adamerge.models.calls import Calls
from adamerge.models.standin import settle, stand_in
from adamerge.runtime import padded
from adamerge.runtime.trace import Trace, join
from adamerge.runtime.view import View


class Stack(nn.Module):
    """A host's blocks, run with merging.  The blocks keep their names, so checkpoints still load."""

    def __init__(
        self,
        owner: nn.Module,
        container: nn.Module,
        views: Sequence[View],
        recipe: Recipe,
        *,
        prefix: int,
        class_token: bool,
        training: bool,
        calls: Calls | None = None,
    ):
        super().__init__()
        self.calls = calls or Calls()
        for name, block in container.named_children():
            self.add_module(name, stand_in(block) if self.calls.watched else block)
        # Tuples keep nn.Module from registering them: the owner would otherwise contain itself.
        self._owner = (owner,)
        self._container = (container,)
        self._views = tuple(views)
        self.prefix = prefix
        self.class_token = class_token
        self.recipe = recipe
        self.last: Trace | None = None
        self.training = training

    @property
    def container(self) -> nn.Module:
        """What the host had in this place, in the state that the stack is in now."""
        container = self._container[0]
        container.training = self.training
        for mine, own in zip(self.children(), container.children(), strict=True):
            settle(mine, own)
        return container

    @property
    def views(self) -> tuple[View, ...]:
        """A view of each block.  A replica of DataParallel has blocks of its own, on its own device."""
        if not getattr(self, "_is_replica", False):
            return self._views
        blocks = zip(self._views, self.children(), strict=True)
        return tuple(replace(view, block=block) for view, block in blocks)  # pyright: ignore

    def forward(self, x: Tensor) -> Tensor:
        run = Run(self)
        run.begin(x)
        for layer in range(len(self)):
            run.advance(layer)
        return run.end()

    def __len__(self) -> int:
        return len(self._views)

    def __iter__(self) -> Iterator["Step"]:
        return iter(self[:])

    @overload
    def __getitem__(self, which: int) -> nn.Module: ...
    @overload
    def __getitem__(self, which: slice) -> list["Step"]: ...
    def __getitem__(self, which: int | slice) -> "nn.Module | list[Step]":
        """A number gives the host's own block, to look at; a slice gives merging blocks, for hosts that loop."""
        if isinstance(which, int):
            return list(self.children())[which]
        layers = range(len(self))[which]
        if layers != range(len(layers)):
            raise BadOption(
                f"blocks of a merged model run in order from the first; [{which.start}:{which.stop}:{which.step}] "
                "is not of the form [:k]. Use adamerge.remove(model) to get the plain blocks back."
            )
        self.calls.check(self._owner[0], list(self.children()))
        run = Run(self)
        return [Step(run, layer) for layer in layers]

    def extra_repr(self) -> str:
        return f"recipe={self.recipe}"


class Run:
    """One pass over the blocks: it holds the merged tokens, which the host's own loop does not see.

    On a CPU, images whose counts differ run one after the other: nothing is padded, and an image's result cannot
    depend on its batch.  Elsewhere they are padded to the longest.
    """

    def __init__(self, stack: Stack):
        self.stack = stack
        self.states: list[padded.State] = []
        self.given: Tensor | None = None

    def begin(self, x: Tensor) -> None:
        """Take the tokens that enter the first block."""
        one_by_one = self.stack.recipe.ragged and x.device.type == "cpu"
        pieces = x.split(1) if one_by_one else (x,)
        self.states = [padded.start(piece, self.stack.prefix, self.stack.class_token) for piece in pieces]

    def advance(self, layer: int, tables: padded.Tables = ()) -> None:
        """Run one block, with the rotary tables that the host hands it."""
        stack = self.stack
        if not self.states or self.states[0].layer != layer:
            raise NotApplied(f"block {layer} of a merged model ran out of turn; blocks run once each, in order")
        view, depth = stack.views[layer], len(stack)
        if tables:
            self.states = [replace(state, tables=tables) for state in self.states]
        self.states = [padded.step(state, view, stack.recipe, depth) for state in self.states]

    def end(self) -> Tensor:
        """The tokens in the host's own shape; what the layers did is kept for `adamerge.trace`."""
        stack = self.stack
        traces = [Trace(state.steps, stack.prefix, stack.recipe.site == "before_block") for state in self.states]
        stack.last = join(traces)
        pieces = [padded.finish(state) for state in self.states]
        # A copy, even an equal one, can have another memory layout than the host's, and then pool to other bits.
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


class Step:
    """One block of a run.  It takes and gives tokens in the host's own shape."""

    def __init__(self, run: Run, layer: int):
        self.run, self.layer = run, layer

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        stack = self.run.stack
        if stack.calls.watched:
            # Through the module, so that hooks on the block see it run.
            return stack[self.layer](x, *args, adamerge_step=self, **kwargs)
        return self.take(x, args, kwargs)

    def take(self, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the block on the tokens that the run holds: the host must hand on what the block before it gave."""
        run, calls = self.run, self.run.stack.calls
        tables = calls.read(args, kwargs)
        if self.layer == 0:
            run.begin(x.contiguous() if calls.contiguous else x)
        elif x is not run.given and run.given is not None and not torch.compiler.is_compiling():
            raise BadOption(
                f"the tokens were changed between blocks {self.layer - 1} and {self.layer}, by a hook or by the model "
                "around them; a merged model would lose that. Take the hook off, or call adamerge.remove(model)."
            )
        run.advance(self.layer, tables)
        run.given = run.end()
        return (run.given,) if calls.tuples else run.given
