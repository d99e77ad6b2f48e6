"""CUDA graphs of a merged model's blocks, captured without being asked: a plain call then launches all blocks at once.

A shape of tokens gets its graph after it was seen a few times.  Few graphs are kept.  The more graphs were dropped, the
more calls a new shape needs, so that a model with ever new shapes spends no time on captures.
"""

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from adamerge.core.types import AllTokens
from adamerge.runtime.autocast import autocast_dtype
from adamerge.runtime.module_watch import ModuleWatch
from adamerge.runtime.reference import Tables
from adamerge.runtime.trace import BuildTrace, LazyTrace, Trace, first_images
from adamerge.runtime.triton.graph_capture import CapturedGraph, capture_graph

# Rotary tables of each block; empty for hosts that have none.
LayerTables = tuple[Tables, ...]
# A pass over all blocks: the tokens it gives, and its trace or a function that builds it.
Blocks = Callable[[AllTokens, LayerTables], tuple[AllTokens, Trace | BuildTrace]]
Capture = Callable[..., CapturedGraph]

_allowed: ContextVar[bool] = ContextVar("adamerge_graphs_allowed", default=True)

# Plain calls of a shape before its graph is captured.
CALLS_BEFORE_CAPTURE = 2
MOST_GRAPHS = 4
# A batch without a graph of its own takes the graph of a batch at most so many times as large.
LARGEST_PADDING = 4


@dataclass(frozen=True)
class Key:
    """What a graph is captured for; `images` is the size of the batch."""

    images: int
    tokens: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    autocast: torch.dtype | None
    tables: tuple[Any, ...]


@dataclass(frozen=True)
class Replayed:
    """The result of a replay: tokens in memory of their own, and how to build the trace of this pass."""

    tokens: AllTokens
    build_trace: BuildTrace


class GraphCache:
    """The graphs of one stack of blocks.  Safe to call from several threads, each on a stream of its own."""

    def __init__(self, blocks: Blocks, make_watch: Callable[[], ModuleWatch], capture: Capture = capture_graph):
        self._blocks, self._make_watch, self._capture = blocks, make_watch, capture
        self._lock = threading.RLock()
        self._watch: ModuleWatch | None = None
        # Why graphs cannot be captured here, once one could not.
        self.failure: str | None = None
        self._clear()

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, x: AllTokens, tables: LayerTables = ()) -> Replayed | None:
        """The blocks on tokens `x`; None where the caller has to run them itself."""
        if self.failure is not None or not len(x):
            return None
        with self._lock:
            if self._watch is None or self._watch.changed():
                self._watch = self._make_watch()
                self._clear()
            if self._watch.hooked():
                return None
            unique, layers = _without_repeats(tables)
            graph = self._find(x, unique, layers)
            return None if graph is None else self._replay(graph, x, unique)

    def calls_until_capture(self, x: AllTokens) -> int:
        """At which call from now on tokens shaped like `x` get their graph; 0 where they have it."""
        wanted = (len(x), tuple(x.shape[1:]), x.dtype, x.device)

        def fits(key: Key) -> bool:
            return (key.images, key.tokens, key.dtype, key.device) == wanted

        with self._lock:
            if any(map(fits, self._graphs)):
                return 0
            calls = max((number for key, number in self._calls.items() if fits(key)), default=0)
            return self._wanted_calls + 1 - calls

    def _clear(self) -> None:
        self._graphs: OrderedDict[Key, CapturedGraph] = OrderedDict()
        self._calls: Counter[Key] = Counter()
        self._wanted_calls = CALLS_BEFORE_CAPTURE
        self._pool: Any = None
        self._done: Any = None

    def _find(self, x: AllTokens, unique: Tables, layers: tuple[tuple[int, ...], ...]) -> CapturedGraph | None:
        """The graph for tokens `x`, captured now if it is due, or one of a larger batch."""
        shapes = tuple((table.shape, table.dtype) for table in unique)
        key = Key(len(x), tuple(x.shape[1:]), x.dtype, x.device, autocast_dtype(x.device), (shapes, layers))
        if key in self._graphs:
            self._graphs.move_to_end(key)
            return self._graphs[key]
        self._calls[key] += 1
        if self._calls[key] > self._wanted_calls:
            return self._add(key, x, unique, layers)
        larger = range(len(x) + 1, LARGEST_PADDING * len(x) + 1)
        found = [other for other in self._graphs if other.images in larger and replace(other, images=len(x)) == key]
        return self._graphs[min(found, key=lambda other: other.images)] if found else None

    def _add(self, key: Key, x: AllTokens, unique: Tables, layers: tuple[tuple[int, ...], ...]) -> CapturedGraph | None:
        """Capture the graph of a shape, and drop the one that was not used for longest."""
        del self._calls[key]
        if len(self._graphs) >= MOST_GRAPHS:
            self._graphs.popitem(last=False)
            self._wanted_calls *= 2
        if self._pool is None and x.is_cuda:
            self._pool = torch.cuda.graph_pool_handle()

        def run(x: Tensor, *unique: Tensor) -> tuple[AllTokens, Trace | BuildTrace]:
            return self._blocks(x, tuple(tuple(unique[index] for index in indices) for indices in layers))

        try:
            # Normal tensors, so that replays may be read inside and outside of inference mode.
            with torch.inference_mode(False), torch.no_grad():
                copies = [each.clone() for each in (x, *unique)]
                graph = self._capture(run, *copies, pool=self._pool)
        except RuntimeError as error:
            self.failure = (str(error).splitlines() or [type(error).__name__])[0]
            return None
        self._graphs[key] = graph
        return graph

    def _replay(self, graph: CapturedGraph, x: AllTokens, unique: Tables) -> Replayed:
        """Copy the tokens in, launch, copy the result out.  Graphs share memory: one runs after the other."""
        images, device = len(x), x.device
        self._wait(device)
        graph.inputs[0][:images].copy_(x)
        for static, table in zip(graph.inputs[1:], unique, strict=True):
            static.copy_(table)
        graph.graph.replay()
        tokens, trace = graph.output
        result = tokens[:images].clone()
        if x.is_cuda:
            self._done = torch.cuda.current_stream(device).record_event()

        def build() -> Trace:
            with self._lock, torch.inference_mode(False), torch.no_grad():
                self._wait(device)
                return first_images(trace if isinstance(trace, Trace) else trace(), images)

        if isinstance(trace, LazyTrace):
            return Replayed(result, LazyTrace(build, lambda: trace.left()[:images].clone()))
        return Replayed(result, build)

    def _wait(self, device: torch.device) -> None:
        """Let the current stream wait for the last replay, whichever stream that was on."""
        if self._done is not None:
            torch.cuda.current_stream(device).wait_event(self._done)


@contextmanager
def without_cached_graphs() -> Iterator[None]:
    """Run blocks kernel by kernel inside, for a caller that captures or measures them itself."""
    token = _allowed.set(False)
    try:
        yield
    finally:
        _allowed.reset(token)


def graphs_allowed() -> bool:
    """Whether this thread may run blocks as graphs of a cache now."""
    return _allowed.get()


def _without_repeats(tables: LayerTables) -> tuple[Tables, tuple[tuple[int, ...], ...]]:
    """The different tensors among the tables of all layers, and their indices for each layer."""
    unique = {id(table): table for layer in tables for table in layer}
    index = {identity: number for number, identity in enumerate(unique)}
    return tuple(unique.values()), tuple(tuple(index[id(table)] for table in layer) for layer in tables)
