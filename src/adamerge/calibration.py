"""Calibration: measures the statistics of each layer that an adaptive recipe compares images with."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from tqdm import tqdm

from adamerge.core.errors import BadImages, BadOption
from adamerge.core.parts import to_json
from adamerge.core.recipe import Recipe
from adamerge.core.requirements import check_can_run
from adamerge.core.stats import LayerStats, summarise
from adamerge.data.batches import Images, batches, number_of_batches
from adamerge.distributed import in_order, my_share
from adamerge.hosts.base import Host, find_host, image_entry
from adamerge.methods.papers.adamerge import adamerge
from adamerge.patching.apply import apply, temporarily_patched, trace
from adamerge.patching.patched_weights import weights_patched
from adamerge.patching.probes import embed
from adamerge.patching.stack import install
from adamerge.runtime.layerwise import HostBlock, calibrate_layers, measure_unmerged
from adamerge.runtime.reference import State

How = Literal["iterative", "sequential"]
NO_IMAGES = "there are no images to calibrate on; pass at least one batch"


def calibrate(
    model: nn.Module,
    images: Images,
    recipe: Recipe | None = None,
    *,
    r_max: float | tuple[float, ...] | None = None,
    how: How | None = None,
    passes: int = 2,
    progress: bool = True,
) -> LayerStats:
    """Measure the redundancy statistics of each layer of `model` on `images`, without labels and without training.

    Args:
        model: a supported model; it is not changed.
        images: a tensor, or an iterable of image batches or of `(images, labels)`, preprocessed for the model.
            An iterable is iterated once for each pass.
        recipe: the adaptive recipe to calibrate; by default published AdaMerge with `r_max`.
        r_max: shorthand for `recipe=adamerge.methods.adamerge(r_max=r_max)`.
        how: "iterative" is as published: pass 1 measures without merging, pass k merges with the statistics of pass
            k - 1.  "sequential" is ours: one sweep, layer by layer.  Each layer is measured on tokens that the
            calibrated layers before it have merged, so no second pass is needed.  The default is "iterative", and
            "sequential" for recipes with thresholds, which need it.
        passes: the number of iterative passes; the paper recommends two.
        progress: show a progress bar.

    Layers at which the recipe cannot merge are not measured: they have mean 0 and standard deviation 0.
    """
    recipe = _adaptive(recipe, r_max)
    how = _way(how, recipe)
    if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
        raise BadOption(f"passes must be a whole number >= 1; got {passes!r}")
    if isinstance(images, Iterator) and how == "iterative" and passes > 1:
        raise BadImages(
            f"{passes} passes go over the images {passes} times, but an iterator can be gone through only once; "
            "pass a list or a DataLoader"
        )
    host = find_host(model)
    check_can_run(recipe, host.depth, host.class_token, with_stats=False)
    with temporarily_patched(model), torch.no_grad():
        if how == "sequential":
            passes, stats = 1, _sequential(host, model, images, recipe, progress)
        else:
            stats = _iterative(host, model, images, recipe, passes, progress)
    return replace(stats, how=how, passes=passes, model=host.fingerprint(), recipe=to_json(recipe.plain))


def _adaptive(recipe: Recipe | None, r_max: float | tuple[float, ...] | None) -> Recipe:
    if (recipe is None) == (r_max is None):
        raise BadOption("give either a recipe or r_max, to say what is calibrated")
    return (recipe if recipe is not None else adamerge(r_max=r_max)).with_stats(None)


def _way(how: How | None, recipe: Recipe) -> How:
    thresholds = recipe.adaptive is not None and recipe.adaptive.needs_thresholds
    if how is None:
        return "sequential" if thresholds else "iterative"
    if how not in get_args(How):
        raise BadOption(f"how must be one of {', '.join(get_args(How))}; got {how!r}")
    if thresholds and how == "iterative":
        raise BadOption("recipes that cut at a threshold are calibrated layer by layer; use how='sequential'")
    return how


def _iterative(host: Host, model: nn.Module, images: Images, recipe: Recipe, passes: int, progress: bool) -> LayerStats:
    """Pass 1 measures unmerged tokens; pass k measures while merging with the statistics of pass k - 1."""
    install(host, host.container)
    label = "calibrating, pass {} of " + str(passes)
    seen = []
    with weights_patched(model, recipe.patch):
        for batch in _shown(images, label.format(1), progress):
            state, blocks = _embedded(host, model, batch)
            seen.append(measure_unmerged([state], blocks, recipe))
    stats = summarise(_all(seen))
    for number in range(2, passes + 1):
        # On a CPU always with the reference, so that statistics are the same to the bit whatever is fastest.
        on_cpu = next(model.parameters()).device.type == "cpu"
        apply(model, recipe.with_stats(stats), "reference" if on_cpu else "auto")
        seen = []
        for batch in _shown(images, label.format(number), progress):
            image_entry(model)(_on(model, batch))
            seen.append(trace(model).redundancy)
        stats = summarise(_all(seen))
    return stats


def _sequential(host: Host, model: nn.Module, images: Images, recipe: Recipe, progress: bool) -> LayerStats:
    """One sweep over all images, layer by layer."""
    install(host, host.container)
    embedded = [_embedded(host, model, batch) for batch in _shown(images, "calibrating, embedding", progress)]
    if not in_order([len(embedded)] * len(embedded)):
        raise BadImages(NO_IMAGES)
    if not embedded:
        # Other processes have images; this one takes part in their layers with none.
        embedded = [_embedded(host, model, torch.zeros(0, *host.image))]
    states, blocks = [state for state, _ in embedded], embedded[-1][1]
    shown = tqdm(total=host.depth, desc="calibrating, layers", disable=not progress)
    with shown as bar, weights_patched(model, recipe.patch):
        return calibrate_layers(states, blocks, recipe, bar.update)[1]


def _embedded(host: Host, model: nn.Module, batch: Tensor) -> tuple[State, list[HostBlock]]:
    """The tokens of a batch that enter the first block, and the blocks with their rotary tables."""
    state, tables = embed(host, model, _on(model, batch))
    return state, [HostBlock(view, table) for view, table in zip(host.views, tables, strict=True)]


def _all(seen: list[Tensor]) -> Tensor:
    """The redundancy of all images, `(images, layers)`, in float64."""
    everything = in_order([batch.double().cpu() for batch in seen])
    if not everything:
        raise BadImages(NO_IMAGES)
    return torch.cat(everything)


def _shown(images: Images, label: str, progress: bool) -> Iterator[Tensor]:
    shown = tqdm(batches(images), desc=label, total=number_of_batches(images), disable=not progress)
    return iter(my_share(shown, images))


def _on(model: nn.Module, batch: Tensor) -> Tensor:
    """The batch on the device and in the dtype of the model."""
    parameter = next(model.parameters())
    return batch.to(parameter.device, parameter.dtype)
