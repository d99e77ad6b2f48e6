"""The module that replaces a host's block container and runs its blocks with merging."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, overload

import torch
from torch import Tensor, nn

from adamerge.core.errors import BadOption, NotApplied, PatchConflict
from adamerge.core.recipe import Recipe
from adamerge.hosts.base import BlockStack, Host
from adamerge.patching.block_proxy import copy_attributes, make_proxy, proxy_conflict
from adamerge.patching.module_patch import MethodPatch, conflict, patch, unpatch
from adamerge.patching.patch_embedding import patch_embedding_patches
from adamerge.patching.per_image_head import per_image_patches
from adamerge.patching.position_embedding import position_patches
from adamerge.runtime.backend import Backend, BackendSelector, Runtime
from adamerge.runtime.block_view import View
from adamerge.runtime.reference import Tables
from adamerge.runtime.trace import Trace


class Stack(BlockStack):
    """A host's blocks, run with merging.  The blocks keep their names, so checkpoints still load."""

    def __init__(self, host: Host, recipe: Recipe, runtime: Runtime = "auto"):
        super().__init__()
        self.host, self.recipe = host, recipe
        self.prefix, self.convention = host.prefix, host.convention
        # In a tuple, so that nn.Module does not register it.
        self._container = (host.container,)
        # Where a stack is installed already, its modules have the state of the model, not those of the container.
        current = installed(host) or host.container
        self.training = current.training
        for (name, block), state in zip(host.container.named_children(), current.children(), strict=True):
            self.add_module(name, make_proxy(block, state) if host.convention.hooked_by_class else block)
        rotary = host.convention.rotary_keyword is not None
        self.selector = BackendSelector(host.views, recipe, host.prefix, host.class_token, runtime, rotary=rotary)
        self._patches = _method_patches(host, recipe, self.selector)
        self._trace: Trace | Callable[[], Trace] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy of a model has not run yet."""
        return {**self.__dict__, "_trace": None}

    @property
    def container(self) -> nn.Module:
        """The host's own block container.  Its state is that of the time when the stack was made."""
        return self._container[0]

    def enter(self) -> None:
        """Patch the modules around the blocks.  Called once the stack is in the container's place."""
        for wanted in self._patches:
            patch(wanted)

    def leave(self) -> None:
        """Undo the patches and give the container the state of the stack.  Called before another takes the place.

        Nothing is changed where another library patched one of the modules since.
        """
        modules = {id(done.module): done.module for done in self._patches}.values()
        for module in modules:
            self._refuse_conflict(module, conflict(module))
        for mine, own in zip(self.children(), self.container.children(), strict=True):
            self._refuse_conflict(mine, proxy_conflict(mine, own))
        for module in modules:
            unpatch(module)
        self.container.training = self.training
        for mine, own in zip(self.children(), self.container.children(), strict=True):
            copy_attributes(mine, own)

    def _refuse_conflict(self, module: nn.Module, reason: str | None) -> None:
        if reason is None:
            return
        paths = [path for path, other in self.host.model.named_modules() if other is module]
        where = f"its module {paths[0]}" if paths and paths[0] else "the model"
        raise PatchConflict(
            f"adamerge.apply patched {where}, and another library changed it since: {reason}. Nothing was changed now. "
            "Undo the other change first (a parametrization by torch.nn.utils.parametrize.remove_parametrizations), "
            "then call this again; the other change can be made again afterwards."
        )

    @property
    def views(self) -> tuple[View, ...]:
        """A view of each block.  A replica of DataParallel has blocks of its own, on its own device."""
        if not getattr(self, "_is_replica", False):
            return self.host.views
        blocks = zip(self.host.views, self.children(), strict=True)
        return tuple(replace(view, block=block) for view, block in blocks)  # pyright: ignore

    @property
    def last_trace(self) -> Trace | None:
        """The trace of the last forward pass; it is built when this is first read."""
        if callable(self._trace):
            self._trace = self._trace()
        return self._trace

    def keep_trace(self, trace: Trace | Callable[[], Trace]) -> None:
        """Keep the trace of a forward pass, or a function that builds it."""
        self._trace = trace

    def forward(self, x: Tensor) -> Tensor:
        forward_pass = ForwardPass(self)
        forward_pass.begin(x)
        for layer in range(len(self)):
            forward_pass.run_block(layer)
        return forward_pass.end()

    def __len__(self) -> int:
        return len(self.host.views)

    def __iter__(self) -> Iterator["BlockCall"]:
        return iter(self[:])

    @overload
    def __getitem__(self, which: int) -> nn.Module: ...
    @overload
    def __getitem__(self, which: slice) -> list["BlockCall"]: ...
    def __getitem__(self, which: int | slice) -> "nn.Module | list[BlockCall]":
        """A number gives the host's own block, to read its attributes; a slice gives merging calls, one per block."""
        if isinstance(which, int):
            return list(self.children())[which]
        layers = range(len(self))[which]
        if layers != range(len(layers)):
            raise BadOption(
                f"blocks of a merged model run in order from the first; [{which.start}:{which.stop}:{which.step}] "
                "is not of the form [:k]. Use adamerge.remove(model) to get the plain blocks back."
            )
        self.convention.check_can_run(self.host.owner, list(self.children()))
        forward_pass = ForwardPass(self)
        return [BlockCall(forward_pass, layer) for layer in layers]

    def extra_repr(self) -> str:
        return f"recipe={self.recipe}"


class ForwardPass:
    """One forward pass over the blocks.  It holds the merged tokens, which the host's own loop does not see."""

    def __init__(self, stack: Stack):
        self.stack = stack
        self.backend: Backend | None = None
        self.next_layer = 0
        # What the last block gave the host, in the host's shape.
        self.output: Tensor | None = None

    def begin(self, x: Tensor) -> None:
        """Take the tokens that enter the first block, and choose the backend for them."""
        stack = self.stack
        self.backend, self.next_layer = stack.selector.choose(x, stack.views, stack.training), 0

    def run_block(self, layer: int, tables: Tables = ()) -> None:
        """Run one block, with the rotary tables that the host passes to it."""
        if self.backend is None or self.next_layer != layer:
            raise NotApplied(f"block {layer} of a merged model ran out of turn; blocks run once each, in order")
        self.backend.step(layer, tables)
        self.next_layer += 1

    def end(self) -> Tensor:
        """The tokens in the host's own shape.  The trace is kept for `adamerge.trace`."""
        assert self.backend is not None
        self.stack.keep_trace(self.backend.build_trace())
        return self.backend.finish()


class BlockCall:
    """One block of a forward pass.  It takes and gives tokens in the host's own shape."""

    def __init__(self, forward_pass: ForwardPass, layer: int):
        self.forward_pass, self.layer = forward_pass, layer

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        stack = self.forward_pass.stack
        if stack.convention.hooked_by_class:
            # Through the module, so that hooks on the block see it run.
            return stack[self.layer](x, *args, adamerge_call=self, **kwargs)
        return self.run(x, args, kwargs)

    def run(self, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the block on the tokens that the pass holds; `x` must be what the block before it gave."""
        current, convention = self.forward_pass, self.forward_pass.stack.convention
        tables = convention.rotary_tables(args, kwargs)
        if self.layer == 0:
            current.begin(x.contiguous() if convention.contiguous_tokens else x)
        elif x is not current.output and current.output is not None and not torch.compiler.is_compiling():
            raise BadOption(
                f"the tokens were changed between blocks {self.layer - 1} and {self.layer}, by a hook or by the model "
                "around them; a merged model would lose that. Take the hook off, or call adamerge.remove(model)."
            )
        current.run_block(self.layer, tables)
        current.output = current.end()
        return (current.output,) if convention.returns_tuple else current.output


def _method_patches(host: Host, recipe: Recipe, selector: BackendSelector) -> tuple[MethodPatch, ...]:
    """The patches of modules around the blocks: a head that runs per image, an embedding that kernels compute."""
    head = per_image_patches(host.head) if recipe.ragged else ()
    embedding = (*patch_embedding_patches(host.model), *position_patches(host, selector)) if selector.may_pack else ()
    return (*head, *embedding)


def installed(host: Host) -> Stack | None:
    """The stack in the place of the host's block container, if merging is applied."""
    return host.blocks if isinstance(host.blocks, Stack) else None


def install(host: Host, blocks: nn.Module) -> None:
    """Put `blocks`, a stack or the host's own container, where the model keeps its blocks."""
    if blocks is host.blocks:
        return
    before = installed(host)
    if before is not None:
        before.leave()
    setattr(host.owner, host.attribute, blocks)
    if isinstance(blocks, Stack):
        blocks.enter()
