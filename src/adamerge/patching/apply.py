"""Applies merging to a model, removes it, and reads what the last forward pass did."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import get_args

from torch import nn

from adamerge.core.errors import BadOption, NotApplied
from adamerge.core.parts import to_json
from adamerge.core.recipe import Recipe
from adamerge.core.requirements import check_can_run
from adamerge.core.stats import LayerStats
from adamerge.hosts.base import find_host
from adamerge.patching.stack import Stack, install, installed
from adamerge.runtime.backend import Runtime
from adamerge.runtime.trace import Trace


def apply(
    model: nn.Module,
    recipe: Recipe | str | os.PathLike[str],
    runtime: Runtime = "auto",
    *,
    cuda_graphs: bool = True,
) -> nn.Module:
    """Make `model` merge tokens as `recipe` says, in place; return it.

    Applying again replaces the recipe.  Parameters, `state_dict` keys, input and output shapes stay what they were.
    Nothing is changed when the model or the recipe is refused.

    Args:
        model: a supported model.
        recipe: what to merge, from `adamerge.methods` or `adamerge.tune`, or a file that `Recipe.save` wrote, or a
            folder with an `adamerge.json`.
        runtime: "reference" is plain torch on padded batches, differentiable everywhere.  "packed" holds the tokens of
            a batch without padding and runs kernels of its own on CUDA; it is for inference.  "auto" packs in
            evaluation mode, and takes the reference in training.  With gradients enabled, a backward pass runs the
            blocks again on the reference.  On a CPU an image's packed result is the same to the bit alone and in any
            batch, and within rounding of the reference.
        cuda_graphs: whether the blocks may run as CUDA graphs where they run with kernels.  A shape of batches gets its
            graph at its third call; the graphs of four shapes are kept.  They hold the memory of one forward pass.
    """
    if runtime not in get_args(Runtime):
        raise BadOption(f"runtime must be one of {', '.join(get_args(Runtime))}; got {runtime!r}")
    if isinstance(recipe, (str, os.PathLike)):
        recipe = Recipe.load(recipe)
    if not isinstance(recipe, Recipe):
        raise BadOption(
            f"expected a Recipe such as adamerge.methods.adamerge(r_max=14, stats=stats), got {type(recipe).__name__}"
        )
    host = find_host(model)
    if recipe.stats is not None:
        host.check(recipe.stats)
    if recipe.patch is not None:
        host.check_patch(recipe.patch)
    check_can_run(recipe, host.depth, host.class_token)
    if recipe.stats is not None:
        _warn_if_stats_of_another_recipe(recipe, recipe.stats)
    stack = Stack(host, recipe, runtime, cuda_graphs=cuda_graphs)
    stack.find_hooks()
    install(host, stack)
    return model


def remove(model: nn.Module) -> nn.Module:
    """Give `model` its own blocks back, bit for bit; return it.  A model without merging is left alone."""
    host = find_host(model)
    if installed(host) is not None:
        install(host, host.container)
    return model


@contextmanager
def applied(
    model: nn.Module,
    recipe: Recipe | str | os.PathLike[str],
    runtime: Runtime = "auto",
    *,
    cuda_graphs: bool = True,
) -> Iterator[nn.Module]:
    """`apply` for the time of a `with` block: `with adamerge.applied(model, recipe): logits = model(images)`.

    Afterwards, also after an error, the model is what it was, bit for bit: without merging, or with the recipe that was
    applied before.  Blocks can be nested.  Read `trace(model)` inside the block.  The arguments are those of `apply`.
    """
    host = find_host(model)
    before = host.blocks
    apply(model, recipe, runtime, cuda_graphs=cuda_graphs)
    try:
        yield model
    finally:
        install(host, before)


def trace(model: nn.Module) -> Trace:
    """What the last forward pass of a merged model did with its batch."""
    last = stack_of(model).last_trace
    if last is None:
        raise NotApplied(
            "the merged model has not run yet, or its first block runs now; call model(images) before "
            "adamerge.trace(model), and in a hook keep the features and ask after model(images)"
        )
    return last


def stack_of(model: nn.Module) -> Stack:
    """The stack of a merged model."""
    stack = installed(find_host(model))
    if stack is None:
        raise NotApplied("this model does not merge; call adamerge.apply(model, recipe) first")
    return stack


@contextmanager
def temporarily_patched(model: nn.Module) -> Iterator[None]:
    """Run the model in evaluation mode; afterwards its mode and its blocks are what they were."""
    host = find_host(model)
    blocks = host.blocks
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        install(host, blocks)
        for module, training in modes.items():
            module.training = training


def _warn_if_stats_of_another_recipe(recipe: Recipe, stats: LayerStats) -> None:
    """Statistics describe the tokens that one recipe leaves; say so when they are used with another."""
    if not stats.recipe:
        return
    mine = to_json(recipe.plain)
    differing = [name for name in mine if mine[name] != stats.recipe.get(name)]
    if differing:
        theirs = {name: stats.recipe.get(name) for name in differing}
        warnings.warn(
            f"these statistics were calibrated for another recipe ({theirs}); this one has "
            f"{ {name: mine[name] for name in differing} }. Calibrate again for the recipe you run.",
            stacklevel=3,
        )
