"""The one module that replaces a host's block container, and the only block loop of the library."""

from collections.abc import Iterator, Sequence
from typing import overload

from torch import Tensor, nn

from adamerge.core.errors import BadOption, NotApplied
from adamerge.core.recipe import Recipe
from adamerge.runtime import padded
from adamerge.runtime.trace import Trace
from adamerge.runtime.view import View


class Stack(nn.Module):
    """A host's blocks, run with merging.  The blocks keep their names, so checkpoints still load."""

    def __init__(self, owner: nn.Module, container: nn.Module, views: Sequence[View], prefix: int, recipe: Recipe):
        super().__init__()
        for name, block in container.named_children():
            self.add_module(name, block)
        # Tuples keep nn.Module from registering them: the owner would otherwise contain itself.
        self._owner = (owner,)
        self._container = (container,)
        self.views = tuple(views)
        self.prefix = prefix
        self.recipe = recipe
        self.last: Trace | None = None
        self.training = container.training

    @property
    def container(self) -> nn.Module:
        """What the host had in this place."""
        return self._container[0]

    def forward(self, x: Tensor) -> Tensor:
        state = padded.start(x, self.prefix)
        for view in self.views:
            state = padded.step(state, view, self.recipe, len(self.views))
        self.keep(state)
        return padded.finish(state)

    def keep(self, state: padded.State) -> None:
        """Remember what the layers did, for `adamerge.trace`."""
        self.last = Trace(state.steps, self.prefix, self.recipe.site == "before_block")

    def __len__(self) -> int:
        return len(self.views)

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
        if getattr(self._owner[0], "grad_checkpointing", False):
            raise BadOption(
                "gradient checkpointing would run a merged block twice on different tokens; "
                "call model.set_grad_checkpointing(False) before running the merged model"
            )
        run = Run(self, len(layers))
        return [Step(run, layer) for layer in layers]

    def extra_repr(self) -> str:
        return f"recipe={self.recipe}"


class Run:
    """One pass over the first `stop` blocks: it holds the merged tokens that the host's loop does not see."""

    def __init__(self, stack: Stack, stop: int):
        self.stack, self.stop = stack, stop
        self.state: padded.State | None = None


class Step:
    """One block of a run.  It takes and gives tokens in the host's own shape."""

    def __init__(self, run: Run, layer: int):
        self.run, self.layer = run, layer

    def __call__(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        if attn_mask is not None or is_causal:
            raise BadOption("attention masks and merging do not go together; call adamerge.remove(model) first")
        run, stack = self.run, self.run.stack
        state = padded.start(x, stack.prefix) if self.layer == 0 else run.state
        if state is None or state.layer != self.layer:
            raise NotApplied(f"block {self.layer} of a merged model ran out of turn; blocks run once each, in order")
        run.state = padded.step(state, stack.views[self.layer], stack.recipe, len(stack))
        if self.layer + 1 == run.stop:
            stack.keep(run.state)
        return padded.finish(run.state)
