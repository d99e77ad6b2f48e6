"""The contenders of a benchmark: a merged or unmerged model, and a way to run it."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from adamerge.core.errors import BadOption
from adamerge.core.recipe import Recipe
from adamerge.experiments.benchmark.entries import Entry
from adamerge.flops import Cost, Meter
from adamerge.hosts.base import find_host
from adamerge.patching.apply import apply, trace
from adamerge.patching.cuda_graphs import capture
from adamerge.runtime.backend import Runtime
from adamerge.runtime.triton.lowering import lower

Run = Callable[[Tensor], Any]


@dataclass(frozen=True)
class Way:
    """A way to run a model.

    Attributes:
        make: takes the model and images of the batch size, and gives the function that runs on such batches.
        captured: whether it is a CUDA graph; it then needs CUDA, keeps its memory and reports no stages.
        runtime: the runtime for merging, as in `apply`.
    """

    make: Callable[[nn.Module, Tensor], Run]
    captured: bool = False
    runtime: Runtime = "auto"


@dataclass(frozen=True)
class Contender:
    """A method and a way to run it.

    Attributes:
        method: the name of the method.
        way: the name of the way.
        prepare: takes a batch and gives the function to time.
        price: takes a batch and gives the cost of each image.
        captured: whether it is a CUDA graph.
        facts: further columns of its rows.
        error: why it cannot run; empty if it can.
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
    """The model compiled by torch.compile for this shape; kernels for dynamic shapes would be slower."""
    run: Run = torch.compile(model, dynamic=False)
    return run


def graph(model: nn.Module, images: Tensor) -> Run:
    """The model as a CUDA graph."""
    return capture(model, images)


def compiled_graph(model: nn.Module, images: Tensor) -> Run:
    """The compiled model as a CUDA graph."""
    return capture(compiled(model, images), images)


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
    """The ways with these names; without names, all that the device supports."""
    if names is None:
        usable = {name: way for name, way in known.items() if device.type == "cuda" or not way.captured}
        return usable
    for name in names:
        if name not in known:
            raise BadOption(f"there is no way {name!r} to run a model; choose from {', '.join(known)}")
        if known[name].captured and device.type != "cuda":
            raise BadOption(f"{name!r} is a CUDA graph and the model is on {device.type}; leave it out or use CUDA")
    return {name: known[name] for name in names}


def twin(model: nn.Module) -> nn.Module:
    """A copy of the model that shares its parameters and buffers."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


def unmerged_contenders(model: nn.Module, ways: Mapping[str, Way], prices: Meter) -> Iterator[Contender]:
    """The unmerged model in every way."""
    for name, way in ways.items():
        yield Contender("none", name, _preparing(way, model), lambda images: prices.unmerged(), way.captured)


def merged_contenders(model: nn.Module, entry: Entry, ways: Mapping[str, Way], prices: Meter) -> Iterator[Contender]:
    """An entry's recipe in every way that supports it."""
    host = find_host(model)
    for name, way in ways.items():
        recipe = entry.recipe
        if recipe is None:
            yield Contender(entry.method, name, _nothing, _nothing, way.captured, entry.facts, entry.error)
            continue
        # A CUDA graph cannot depend on the images, unless the triton backend reads the token counts on the device.
        fusion = lower(recipe, host.prefix, host.class_token)
        known = way.runtime == "packed" and not isinstance(fusion, str)
        if way.make is graph and recipe.ragged and not known:
            continue
        try:
            net = apply(twin(model), recipe, way.runtime)
        except Exception as error:
            yield Contender(entry.method, name, _nothing, _nothing, way.captured, entry.facts, describe(error))
            continue
        yield Contender(
            entry.method, name, _preparing(way, net), pricing(net, recipe, prices), way.captured, entry.facts
        )


def pricing(model: nn.Module, recipe: Recipe, prices: Meter) -> Callable[[Tensor], Cost]:
    """A function that gives the cost of each image of a batch, from the token counts of a forward pass."""

    def price(images: Tensor) -> Cost:
        model(images)
        seen = trace(model)
        return prices.cost(seen.counts.cpu(), recipe, seen.patches)

    return price


def describe(error: Exception) -> str:
    """The error as one line of text."""
    words = str(error).strip().splitlines()
    return f"{type(error).__name__}: {words[0]}" if words else type(error).__name__


def _preparing(way: Way, model: nn.Module) -> Callable[[Tensor], Run]:
    return lambda images: way.make(model, images)


def _nothing(images: Tensor) -> Any:
    raise BadOption("a contender with an error does not run")
