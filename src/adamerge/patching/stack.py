"""The one module that replaces a host's block container, and the only block loop of the library."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, overload

import torch
from torch import Tensor, nn

from adamerge.core.errors import BadOption, NotApplied
from adamerge.core.recipe import Recipe
from adamerge.hosts.base import BlockStack, Host, Methods
from adamerge.hosts.call_convention import CallConvention
from adamerge.patching.block_proxy import copy_attributes, make_proxy
from adamerge.patching.module_patch import MethodPatch, patch, unpatch
from adamerge.patching.per_image_head import run_per_image
from adamerge.runtime.backend import Backend, BackendSelector, Runtime
from adamerge.runtime.block_view import View
from adamerge.runtime.reference import Tables
from adamerge.runtime.trace import Trace


class Stack(BlockStack):
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
        convention: CallConvention | None = None,
        head: Methods = (),
        before: Sequence[MethodPatch] = (),
    ):
        super().__init__()
        self.convention = convention or CallConvention()
        for name, block in container.named_children():
            self.add_module(name, make_proxy(block) if self.convention.hooked_by_class else block)
        # Tuples keep nn.Module from registering them: the owner would otherwise contain itself.
        self._owner = (owner,)
        self._container = (container,)
        self._head = head
        self._before = tuple(before)
        self._views = tuple(views)
        self.prefix = prefix
        self.class_token = class_token
        self.recipe = recipe
        self.training = training
        self.selector = BackendSelector(
            self._views, recipe, prefix, class_token, runtime, rotary=self.convention.rotary_keyword is not None
        )
        self.told: Trace | Callable[[], Trace] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy of a model has not run yet."""
        return {**self.__dict__, "told": None}

    @property
    def container(self) -> nn.Module:
        """What the host had in this place, in the state that the stack is in now."""
        container = self._container[0]
        container.training = self.training
        for mine, own in zip(self.children(), container.children(), strict=True):
            copy_attributes(mine, own)
        return container

    def enter(self) -> None:
        """Once in the container's place: whatever runs behind blocks that run image by image does so too, and what
        makes tokens for kernels does so in their way."""
        if self.recipe.ragged:
            for module, method in self._head:
                run_per_image(module, method)
        if self.selector.may_pack:
            for module, method, around in self._before:
                patch(module, method, around)

    def leave(self) -> None:
        """Before another takes the place."""
        for module, *_ in (*self._head, *self._before):
            unpatch(module)

    @property
    def views(self) -> tuple[View, ...]:
        """A view of each block.  A replica of DataParallel has blocks of its own, on its own device."""
        if not getattr(self, "_is_replica", False):
            return self._views
        blocks = zip(self._views, self.children(), strict=True)
        return tuple(replace(view, block=block) for view, block in blocks)  # pyright: ignore

    @property
    def last(self) -> Trace | None:
        """What the last pass did, worked out when asked for."""
        if callable(self.told):
            self.told = self.told()
        return self.told

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
        self.convention.check_can_run(self._owner[0], list(self.children()))
        run = Run(self)
        return [Step(run, layer) for layer in layers]

    def extra_repr(self) -> str:
        return f"recipe={self.recipe}"


class Run:
    """One pass over the blocks: it holds the merged tokens, which the host's own loop does not see."""

    def __init__(self, stack: Stack):
        self.stack = stack
        self.backend: Backend | None = None
        self.layer = 0
        self.given: Tensor | None = None

    def begin(self, x: Tensor) -> None:
        """Take the tokens that enter the first block."""
        stack = self.stack
        self.backend, self.layer = stack.selector.choose(x, stack.views, stack.training), 0

    def advance(self, layer: int, tables: Tables = ()) -> None:
        """Run one block, with the rotary tables that the host hands it."""
        if self.backend is None or self.layer != layer:
            raise NotApplied(f"block {layer} of a merged model ran out of turn; blocks run once each, in order")
        self.backend.step(layer, tables)
        self.layer += 1

    def end(self) -> Tensor:
        """The tokens in the host's own shape; what the layers did is kept for `adamerge.trace`."""
        assert self.backend is not None
        self.stack.told = self.backend.build_trace()
        return self.backend.finish()


class Step:
    """One block of a run.  It takes and gives tokens in the host's own shape."""

    def __init__(self, run: Run, layer: int):
        self.run, self.layer = run, layer

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        stack = self.run.stack
        if stack.convention.hooked_by_class:
            # Through the module, so that hooks on the block see it run.
            return stack[self.layer](x, *args, adamerge_step=self, **kwargs)
        return self.take(x, args, kwargs)

    def take(self, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the block on the tokens that the run holds: the host must hand on what the block before it gave."""
        run, convention = self.run, self.run.stack.convention
        tables = convention.rotary_tables(args, kwargs)
        if self.layer == 0:
            run.begin(x.contiguous() if convention.contiguous_tokens else x)
        elif x is not run.given and run.given is not None and not torch.compiler.is_compiling():
            raise BadOption(
                f"the tokens were changed between blocks {self.layer - 1} and {self.layer}, by a hook or by the model "
                "around them; a merged model would lose that. Take the hook off, or call adamerge.remove(model)."
            )
        run.advance(self.layer, tables)
        run.given = run.end()
        return (run.given,) if convention.returns_tuple else run.given


def installed(host: Host) -> Stack | None:
    """The stack in the place of the host's block container, if merging is applied."""
    return host.blocks if isinstance(host.blocks, Stack) else None


def install(host: Host, blocks: nn.Module) -> None:
    """Put `blocks`, a stack or the host's own container, where the model keeps its blocks."""
    before = installed(host)
    if before is not None:
        before.leave()
    setattr(host.owner, host.attribute, blocks)
    if isinstance(blocks, Stack):
        blocks.enter()
