"""The module that replaces a host's block container and runs its blocks with merging."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NoReturn, overload

import torch
from torch import Tensor, nn

from adamerge.core.errors import BadOption, PatchConflict
from adamerge.core.recipe import Recipe
from adamerge.core.types import Counts
from adamerge.hosts.base import BlockStack, Host
from adamerge.patching.block_calls import BlockCall, ForwardPass, refuse_recorded_counts, refuse_symbols
from adamerge.patching.block_proxy import copy_attributes, make_proxy, proxy_conflict
from adamerge.patching.module_patch import MethodPatch, conflict, patch, refuse_conflict, unpatch
from adamerge.patching.opaque_blocks import followed_by_compiler, give_number, may_be_opaque, run_opaque
from adamerge.patching.patch_embedding import patch_embedding_patches
from adamerge.patching.patched_weights import PatchedWeights
from adamerge.patching.per_image_head import per_image_patches
from adamerge.patching.position_embedding import position_patches
from adamerge.patching.pruning import pruning_patches
from adamerge.patching.recomputed_gradients import may_recompute, run_without_recording, trained_parameters
from adamerge.patching.whole_pass import in_whole_pass, whole_pass_patches
from adamerge.runtime.backend import Backend, BackendSelector, Runtime
from adamerge.runtime.block_view import View
from adamerge.runtime.hooks import HOOK_ATTRIBUTES, HookFinder, Hooks, constant_for_compilers
from adamerge.runtime.module_watch import ModuleWatch
from adamerge.runtime.trace import BuildTrace, LazyTrace, Trace
from adamerge.runtime.triton.graph_cache import GraphCache, LayerTables, graphs_allowed


class Stack(BlockStack):
    """A host's blocks, run with merging.  The blocks keep their names, so checkpoints still load."""

    def __init__(self, host: Host, recipe: Recipe, runtime: Runtime = "auto", *, cuda_graphs: bool = True):
        super().__init__()
        self.host, self.recipe = host, recipe
        self.prefix, self.convention = host.prefix, host.convention
        # In a tuple, so that nn.Module does not register it.
        self._container = (host.container,)
        # Where a stack is installed already, its modules have the state of the model, not those of the container.
        current = installed(host) or host.container
        self.training = current.training
        # Hooks on the container run around all blocks.
        vars(self).update({name: vars(current)[name] for name in HOOK_ATTRIBUTES})
        for (name, block), state in zip(host.container.named_children(), current.children(), strict=True):
            super().add_module(name, make_proxy(block, state) if host.convention.hooked_by_class else block)
        self._blocks = tuple(self.children())
        rotary = host.convention.rotary_keyword is not None
        self.selector = BackendSelector(host.views, recipe, host.prefix, host.class_token, runtime, rotary=rotary)
        self._patches = _method_patches(host, recipe, self.selector)
        self._weights = None if recipe.patch is None else PatchedWeights(host.model, recipe.patch)
        self.cuda_graphs = cuda_graphs
        self._number = give_number(self)
        self._graphs: GraphCache | None = None
        self._hook_finder: HookFinder | None = None
        self._trace: Trace | BuildTrace | None = None

    def _refuse_change(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise PatchConflict(
            "the blocks of a merged model cannot be exchanged, added or deleted: recipes and statistics are for these. "
            "Call adamerge.remove(model), change the blocks, then adamerge.apply again. Parts of a block may change."
        )

    __setitem__ = __delitem__ = add_module = append = extend = insert = pop = _refuse_change

    def __getstate__(self) -> dict[str, Any]:
        """A copy of a model has not run yet."""
        return {**self.__dict__, "_trace": None, "_graphs": None, "_hook_finder": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._number = give_number(self)

    @property
    def container(self) -> nn.Module:
        """The host's own block container.  Its state is that of the time when the stack was made."""
        return self._container[0]

    def enter(self) -> None:
        """Patch the modules around the blocks.  Called once the stack is in the container's place."""
        for wanted in self._patches:
            patch(wanted)
        if self._weights is not None:
            self._weights.enter()

    def leave(self) -> None:
        """Undo the patches and give the container the state of the stack.  Called before another takes the place.

        Nothing is changed where another library patched one of the modules since.
        """
        modules = {id(done.module): done.module for done in self._patches}.values()
        for module in modules:
            refuse_conflict(self.host.model, module, conflict(module))
        for mine, own in zip(self.children(), self.container.children(), strict=True):
            refuse_conflict(self.host.model, mine, proxy_conflict(mine, own))
        if self._weights is not None:
            self._weights.leave()
        for module in modules:
            unpatch(module)
        self.container.training = self.training
        vars(self.container).update({name: vars(self)[name] for name in HOOK_ATTRIBUTES})
        for mine, own in zip(self.children(), self.container.children(), strict=True):
            copy_attributes(mine, own)

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

    @property
    def tokens_left(self) -> Counts | None:
        """The patch tokens that each image of the last forward pass kept; where possible without building its trace.

        On CUDA, read it before the next pass, whose graph overwrites it.
        """
        if isinstance(self._trace, LazyTrace):
            return self._trace.left()
        return None if self.last_trace is None else self.last_trace.counts[:, -1]

    def keep_trace(self, trace: Trace | BuildTrace | None) -> None:
        """Keep the trace of a forward pass, or a function that builds it; None forgets that of the pass before."""
        self._trace = trace

    def forward(self, x: Tensor, tables: LayerTables = ()) -> Tensor:
        """All blocks on tokens `x`, each with its rotary tables where the host has any."""
        refuse_symbols(x)
        refuse_recorded_counts(self.recipe)
        if followed_by_compiler() and may_be_opaque(self, tables):
            trained = trained_parameters(self) if torch.is_grad_enabled() else []
            return run_opaque(self._number, x, tables, trained)
        tokens = self._replay(x, tables)
        if tokens is not None:
            return tokens
        if not tables and self.hooked():
            return self._run_modules(x)
        if may_recompute(self, x, tables):
            return run_without_recording(self, x, tables)
        return self._run(x, tables)

    def run(self, x: Tensor, tables: LayerTables) -> Tensor:
        """All blocks on tokens `x`, as a CUDA graph or on the backend that fits the batch; keep the trace."""
        tokens = self._replay(x, tables)
        return self._run(x, tables) if tokens is None else tokens

    def _replay(self, x: Tensor, tables: LayerTables) -> Tensor | None:
        """All blocks on tokens `x` as a CUDA graph; None if there is none for this batch."""
        replayed = self.graphs.run(x, tables) if self.may_replay(x) else None
        if replayed is None:
            return None
        self.keep_trace(replayed.build_trace)
        return replayed.tokens

    def _run(self, x: Tensor, tables: LayerTables) -> Tensor:
        """All blocks on tokens `x`, one after the other."""
        tokens, trace = self._run_blocks(x, tables)
        self.keep_trace(trace)
        return tokens

    def __prepare_scriptable__(self) -> NoReturn:
        """What torch.jit.script calls first: it cannot compile merged blocks."""
        raise BadOption(
            "torch.jit.script cannot compile a merged model. Write it to a file by adamerge.export or torch.export, "
            "make it faster by torch.compile, or call adamerge.remove(model) first."
        )

    @constant_for_compilers
    def on_cuda(self) -> bool:
        """Whether the blocks are on a CUDA device."""
        return next(self.parameters()).is_cuda

    def _run_blocks(self, x: Tensor, tables: LayerTables) -> tuple[Tensor, Trace | BuildTrace]:
        backend = self.choose_backend(x)
        for layer in range(len(self)):
            backend.step(layer, tables[layer] if tables else ())
        return backend.finish(), backend.build_trace()

    def _run_modules(self, x: Tensor) -> Tensor:
        """All blocks on tokens `x`, each called as a module, so that hooks run."""
        for call in self._calls(range(len(self))):
            x = call(x)
        return x

    def choose_backend(self, x: Tensor) -> Backend:
        """The backend for a batch of tokens, which begins a pass."""
        if not self.hooked():
            return self.selector.choose(x, self.views, self.training)
        return self.selector.choose_for_hooks(x, self.views, self.training, self.find_hooks())

    @constant_for_compilers
    def hooked(self) -> bool:
        """Whether there is a hook on a block or a part of one, or on all modules of the process."""
        return self.find_hooks() is not None

    def find_hooks(self) -> Hooks | None:
        """Where hooks are on the blocks and their parts, other than those of the host library; None without any.

        Hooks that no backend calls are refused.
        """
        if not getattr(self, "_is_replica", False) and (*self.children(),) != self._blocks:
            self._refuse_change()
        if self._hook_finder is None:
            self._hook_finder = HookFinder(list(self.children()), self.host.views, self.convention.ignores_hook)
        return self._hook_finder.find()

    @property
    def graphs(self) -> GraphCache:
        """The CUDA graphs of the blocks, one for each shape of tokens that came often enough."""
        if self._graphs is None:
            self._graphs = GraphCache(
                self._run_blocks, lambda: ModuleWatch(list(self.children()), self.convention.ignores_hook)
            )
        return self._graphs

    def may_replay(self, x: Tensor) -> bool:
        """Whether a CUDA graph may run the blocks: for inference with kernels, outside of compilers and captures."""
        return (
            self.cuda_graphs
            and x.is_cuda
            and not getattr(self, "_is_replica", False)
            and not torch.compiler.is_compiling()
            and not torch.cuda.is_current_stream_capturing()
            and graphs_allowed()
            and self.selector.why_reference(x, self.training) is None
        )

    def __len__(self) -> int:
        return len(self.host.views)

    def __iter__(self) -> Iterator[BlockCall]:
        return iter(self[:])

    @overload
    def __getitem__(self, which: int) -> nn.Module: ...
    @overload
    def __getitem__(self, which: slice) -> list[BlockCall]: ...
    def __getitem__(self, which: int | slice) -> nn.Module | list[BlockCall]:
        """A number gives the host's own block, to read its attributes; a slice gives merging calls, one per block."""
        if isinstance(which, int):
            return self.block(which)
        layers = range(len(self))[which]
        if layers != range(len(layers)):
            raise BadOption(
                f"blocks of a merged model run in order from the first; [{which.start}:{which.stop}:{which.step}] "
                "is not of the form [:k]. Use adamerge.remove(model) to get the plain blocks back."
            )
        refuse_recorded_counts(self.recipe)
        self.convention.check_can_run(self.host.owner, list(self.children()))
        return self._calls(layers)

    def _calls(self, layers: range) -> list[BlockCall]:
        """Merging calls of the first blocks, as one pass."""
        hooked = self.hooked()
        at_once = not hooked and len(layers) == len(self) and self._may_run_at_once()
        forward_pass = ForwardPass(self, at_once, hooked)
        return [BlockCall(forward_pass, layer) for layer in layers]

    def block(self, layer: int) -> nn.Module:
        """The module of one block."""
        return list(self.children())[layer]

    def _may_run_at_once(self) -> bool:
        """Whether the loop over the blocks that begins now reads nothing between them."""
        if not (self.convention.clean_loop or in_whole_pass(self)):
            return False
        if torch.compiler.is_compiling() and not (followed_by_compiler() and may_be_opaque(self, ())):
            return False
        return not self._records_tokens()

    @constant_for_compilers
    def _records_tokens(self) -> bool:
        return self.convention.records_tokens(list(self.children()))

    def extra_repr(self) -> str:
        return f"recipe={self.recipe}"


def _method_patches(host: Host, recipe: Recipe, selector: BackendSelector) -> tuple[MethodPatch, ...]:
    """The patches of modules around the blocks: a head that runs per image, an embedding that kernels compute."""
    head = per_image_patches(host.head) if recipe.ragged else ()
    embedding = (*patch_embedding_patches(host.model), *position_patches(host, selector)) if selector.may_pack else ()
    return (*head, *embedding, *whole_pass_patches(host), *pruning_patches(host))


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
