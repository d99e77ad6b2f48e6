"""The one module that replaces a host's block container, and the only block loop of the library."""

from collections.abc import Callable, Iterator, Sequence
from typing import overload

from torch import Tensor, nn

from adamerge.core.errors import BadOption, NotApplied
from adamerge.core.recipe import Recipe
from adamerge.models.roads import Road, Runtime, Switch
from adamerge.runtime.trace import Trace
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
        runtime: Runtime = "auto",
    ):
        super().__init__()
        for name, block in container.named_children():
            self.add_module(name, block)
        # Tuples keep nn.Module from registering them: the owner would otherwise contain itself.
        self._owner = (owner,)
        self._container = (container,)
        self.views = tuple(views)
        self.prefix = prefix
        self.class_token = class_token
        self.recipe = recipe
        self.training = training
        self.switch = Switch(self.views, recipe, prefix, class_token, runtime)
        self.tell: Callable[[], Trace] | None = None

    @property
    def container(self) -> nn.Module:
        """What the host had in this place."""
        return self._container[0]

    @property
    def last(self) -> Trace | None:
        """What the last pass did, worked out when asked for."""
        if self.tell is None:
            return None
        told = self.tell()
        self.tell = lambda: told
        return told

    def forward(self, x: Tensor) -> Tensor:
        run = Run(self)
        run.begin(x)
        for layer in range(len(self)):
            run.advance(layer)
        return run.end()

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
        run = Run(self)
        return [Step(run, layer) for layer in layers]

    def extra_repr(self) -> str:
        return f"recipe={self.recipe}"


class Run:
    """One pass over the blocks: it holds the merged tokens, which the host's own loop does not see."""

    def __init__(self, stack: Stack):
        self.stack = stack
        self.road: Road | None = None
        self.layer = 0

    def begin(self, x: Tensor) -> None:
        """Take the tokens that enter the first block."""
        self.road, self.layer = self.stack.switch.choose(x, self.stack.training), 0

    def advance(self, layer: int) -> None:
        """Run one block."""
        if self.road is None or self.layer != layer:
            raise NotApplied(f"block {layer} of a merged model ran out of turn; blocks run once each, in order")
        self.road.step(layer)
        self.layer += 1

    def end(self) -> Tensor:
        """The tokens in the host's own shape; what the layers did is kept for `adamerge.trace`."""
        assert self.road is not None
        self.stack.tell = self.road.tell()
        return self.road.finish()


class Step:
    """One block of a run.  It takes and gives tokens in the host's own shape."""

    def __init__(self, run: Run, layer: int):
        self.run, self.layer = run, layer

    def __call__(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        if attn_mask is not None or is_causal:
            raise BadOption("attention masks and merging do not go together; call adamerge.remove(model) first")
        if self.layer == 0:
            self.run.begin(x)
        self.run.advance(self.layer)
        return self.run.end()
