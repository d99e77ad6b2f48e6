"""Who takes part in a benchmark: a model, merged or not, and a way to run it."""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from adamerge.benchmark.entries import Entry
from adamerge.core.errors import BadOption
from adamerge.core.recipe import Recipe
from adamerge.flops import Cost, Meter
from adamerge.models.surgery import apply, trace

Run = Callable[[Tensor], Any]

# Calls on a side stream before a CUDA graph is captured, so that whatever sets itself up lazily has done so.
BEFORE_CAPTURE = 3


@dataclass(frozen=True)
class Way:
    """One way to run a model: `make` gets it and the images it will run on, and gives what is called on them.

    `captured` ways are CUDA graphs: they need CUDA, hold their memory all the time and pass no stages.
    `runtime` is what merging runs on.
    """

    make: Callable[[nn.Module, Tensor], Run]
    captured: bool = False
    runtime: str = ""


@dataclass(frozen=True)
class Contender:
    """A method run in one way.  `prepare` makes what is timed, `price` says what a batch costs.

    `facts` are further columns of its rows; `error` is why it cannot take part.
    """

    method: str
    way: str
    prepare: Callable[[Tensor], Run]
    price: Callable[[Tensor], Cost]
    captured: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""


def as_it_is(model: nn.Module, images: Tensor) -> Run:
    """The model itself."""
    return model


def compiled(model: nn.Module, images: Tensor) -> Run:
    """The model through torch.compile, for images of this very shape: kernels for any shape would be slower."""
    run: Run = torch.compile(model, dynamic=False)
    return run


def graph(model: nn.Module, images: Tensor) -> Run:
    """The model as a CUDA graph."""
    return capture(model, images)


def compiled_graph(model: nn.Module, images: Tensor) -> Run:
    """The compiled model as a CUDA graph."""
    return capture(compiled(model, images), images)


def capture(run: Run, images: Tensor) -> Run:
    """`run` as a CUDA graph; its replay first copies the images to where the graph looks for them."""
    seat = images.clone()
    here, aside = torch.cuda.current_stream(images.device), torch.cuda.Stream(images.device)
    aside.wait_stream(here)
    with torch.cuda.stream(aside):
        for _ in range(BEFORE_CAPTURE):
            run(seat)
    here.wait_stream(aside)
    recording = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recording):
        out = run(seat)

    def replay(images: Tensor) -> Any:
        seat.copy_(images)
        recording.replay()
        return out

    return replay


UNMERGED: dict[str, Way] = {
    "eager": Way(as_it_is),
    "compiled": Way(compiled),
    "graph": Way(graph, captured=True),
    "compiled graph": Way(compiled_graph, captured=True),
}
MERGED: dict[str, Way] = {
    "packed": Way(as_it_is, runtime="packed"),
    "packed graph": Way(graph, captured=True, runtime="packed"),
    "reference": Way(as_it_is, runtime="reference"),
}


def find_ways(known: Mapping[str, Way], names: Sequence[str] | None, device: torch.device) -> dict[str, Way]:
    """The ways of these names, or without names all that this device has."""
    if names is None:
        usable = {name: way for name, way in known.items() if device.type == "cuda" or not way.captured}
        return {name: way for name, way in usable.items() if way.runtime in ("", *runtimes())}
    for name in names:
        if name not in known:
            raise BadOption(f"there is no way {name!r} to run a model; choose from {', '.join(known)}")
        if known[name].captured and device.type != "cuda":
            raise BadOption(f"{name!r} is a CUDA graph and the model is on {device.type}; leave it out or use CUDA")
    return {name: known[name] for name in names}


def twin(model: nn.Module) -> nn.Module:
    """A copy of the model's modules around the very same parameters and buffers."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


def runtimes() -> tuple[str, ...]:
    """The runtimes that `apply` lets choose between, the fastest first."""
    return ("packed", "reference") if "runtime" in inspect.signature(apply).parameters else ("reference",)


def merge_with(model: nn.Module, recipe: Recipe, runtime: str) -> nn.Module:
    """The model with merging, on this runtime."""
    if runtime not in runtimes():
        raise BadOption(f"there is no runtime {runtime!r}; choose from {', '.join(runtimes())}")
    options: Any = {"runtime": runtime} if len(runtimes()) > 1 else {}
    return apply(model, recipe, **options)


def unmerged_contenders(model: nn.Module, ways: Mapping[str, Way], prices: Meter) -> Iterator[Contender]:
    """The unmerged model in every way."""
    for name, way in ways.items():
        yield Contender("none", name, _preparing(way, model), lambda images: prices.unmerged(), way.captured)


def merged_contenders(model: nn.Module, entry: Entry, ways: Mapping[str, Way], prices: Meter) -> Iterator[Contender]:
    """A recipe in every way that it can run."""
    for name, way in ways.items():
        recipe = entry.recipe
        if recipe is None:
            yield Contender(entry.method, name, _nothing, _nothing, way.captured, entry.facts, entry.error)
            continue
        # What a CUDA graph does cannot depend on the images, unless the runtime has its own way to capture.
        if way.make is graph and recipe.ragged:
            continue
        try:
            net = merge_with(twin(model), recipe, way.runtime)
        except Exception as error:
            yield Contender(entry.method, name, _nothing, _nothing, way.captured, entry.facts, describe(error))
            continue
        yield Contender(
            entry.method, name, _preparing(way, net), pricing(net, recipe, prices), way.captured, entry.facts
        )


def pricing(model: nn.Module, recipe: Recipe, prices: Meter) -> Callable[[Tensor], Cost]:
    """What a merged model spends on each image of a batch, from the tokens it really kept."""

    def price(images: Tensor) -> Cost:
        model(images)
        seen = trace(model)
        return prices.cost(seen.counts.cpu(), recipe, seen.patches)

    return price


def describe(error: Exception) -> str:
    """An error in one line."""
    words = str(error).strip().splitlines()
    return f"{type(error).__name__}: {words[0]}" if words else type(error).__name__


def _preparing(way: Way, model: nn.Module) -> Callable[[Tensor], Run]:
    return lambda images: way.make(model, images)


def _nothing(images: Tensor) -> Any:
    raise BadOption("a contender with an error does not run")
