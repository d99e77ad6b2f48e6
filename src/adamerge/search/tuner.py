"""Tuning: finds the recipe that changes a model's output least at a given cost, on unlabelled images."""

import os
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from adamerge.core.errors import BadImages
from adamerge.core.recipe import Recipe
from adamerge.data.batches import Images
from adamerge.flops import CostCount
from adamerge.search.evaluator import Evaluator, Loss, gather_images
from adamerge.search.journal import Journal
from adamerge.search.latency import cut_for_latency, schedule_for_latency
from adamerge.search.local_search import SearchLimits, search_candidates
from adamerge.search.options import TuningOptions
from adamerge.search.schedule import Rates
from adamerge.search.target import Target

# One image of four is held out of the search, to check what was found on images that it was not tuned on.
HELD_OUT_EVERY = 4
MIN_IMAGES = 8


@dataclass(frozen=True)
class TuningReport:
    """The recipe that a search found, with its loss and cost on the tuning images and on the held-out ones (`check_…`).

    `tried` counts candidates, `sweeps` passes over the images (each at most one forward pass of the unmerged model).
    """

    recipe: Recipe
    rates: Rates
    loss: float
    check_loss: float
    gmacs: float
    check_gmacs: float
    cut: float
    check_cut: float
    images: int
    check_images: int
    tried: int
    sweeps: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"cut {self.cut:.1%} ({self.gmacs:.4g} GMACs), loss {self.loss:.4g} on {self.images} images; on "
            f"{self.check_images} others cut {self.check_cut:.1%}, loss {self.check_loss:.4g}; {self.tried} recipes, "
            f"{self.sweeps} passes over the images, {self.seconds:.0f} s"
        )


def tune(
    model: nn.Module,
    images: Images,
    cut: float | None = None,
    *,
    cost: CostCount = "true",
    gmacs: float | None = None,
    latency_ratio: float | None = None,
    loss: Loss | None = None,
    static: bool = False,
    merge_every: int | None = None,
    seed: int = 0,
    tries: int = 100,
    time_limit: float | None = None,
    progress: bool = True,
    resume: str | os.PathLike[str] | None = None,
) -> Recipe:
    """Search for the recipe that changes the output of `model` least at a given cost; no labels, no training.

    Args:
        model: a supported model; it is not changed.
        images: a few hundred preprocessed images, like those the model will be used on: a tensor, or an iterable of
            batches or of `(images, labels)`.  A quarter of them is held out of the search and checks the result.
        cut: the share of the cost to save, 0.3 by default.
        cost: which count of multiply-accumulates has to meet it: "true" or "paper"; see `adamerge.flops`.
        gmacs: instead of `cut`, 10^9 multiply-accumulates per image.
        latency_ratio: instead of `cut`, the time of the merged model as a share of the unmerged one's, measured on the
            model's device.
        loss: "kl" compares class probabilities, "features" the directions of the pooled output and of the patches; by
            default "kl" for a model that gives logits, else "features".
        static: merge the same number in every image.  The loss is higher at the same cost, but all shapes are known in
            advance: for export, for compilers, and where ragged batches are slow.
        merge_every: merge at every k-th block only.  The loss is higher at the same cost, but fewer blocks decide what
            to merge: for small models and batches, where deciding takes most of what merging saves.  1 by default;
            with `latency_ratio` 1, 2 or 3, whichever loses least at that time.
        seed: sets the order in which changes are tried; the same seed gives the same recipe.
        tries: how many recipes to try.
        time_limit: seconds after which the search ends with the best recipe so far.
        progress: show a progress bar.
        resume: a file that keeps what was tried; a search that was stopped continues from it.
    """
    options = TuningOptions(
        cut=cut,
        cost=cost,
        gmacs=gmacs,
        latency_ratio=latency_ratio,
        loss=loss,
        static=static,
        merge_every=merge_every,
        seed=seed,
        tries=tries,
        time_limit=time_limit,
        progress=progress,
        resume=resume,
    )
    return tune_with_report(model, images, options).recipe


def tune_with_report(model: nn.Module, images: Images, options: TuningOptions) -> TuningReport:
    """`tune`, which also gives the losses and costs of the recipe that it found."""
    begin = time.monotonic()
    tuning_images, held_out = hold_out(gather_images(model, images))
    evaluator = Evaluator(model, tuning_images, cost=options.cost, loss=options.loss)
    journal = Journal(options.resume, _task(evaluator, options))
    target, merge_every = options.target, options.merge_every or 1
    if target is None:
        target, merge_every = _latency_target(evaluator, options, journal)
    until = begin + (options.time_limit if options.time_limit is not None else torch.inf)
    limits = SearchLimits(options.tries, options.seed, until, options.progress, merge_every)
    best, tried = search_candidates(evaluator, target, limits, journal=journal, static=options.static)
    found = evaluator.sweep(best.recipe)
    checker = Evaluator(model, held_out, cost=options.cost, loss=evaluator.loss)
    checked = checker.sweep(found.recipe, calibrate=False)
    macs, check_macs = found.macs.mean().item(), checked.macs.mean().item()
    return TuningReport(
        recipe=found.recipe,
        rates=best.rates,
        loss=found.loss.mean().item(),
        check_loss=checked.loss.mean().item(),
        gmacs=macs / 1e9,
        check_gmacs=check_macs / 1e9,
        cut=1 - macs / evaluator.full,
        check_cut=1 - check_macs / evaluator.full,
        images=evaluator.number,
        check_images=checker.number,
        tried=tried,
        sweeps=evaluator.sweeps,
        seconds=time.monotonic() - begin,
    )


def hold_out(images: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The images to tune on, and every fourth image, held out as a check; in batches of the same size as before."""
    joined, size = torch.cat(images), max(len(batch) for batch in images)
    if len(joined) < MIN_IMAGES:
        raise BadImages(f"tuning needs at least {MIN_IMAGES} images, a few hundred are good; got {len(joined)}")
    out = torch.arange(len(joined), device=joined.device) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
    return list(joined[~out].split(size)), list(joined[out].split(size))


def _latency_target(evaluator: Evaluator, options: TuningOptions, journal: Journal) -> tuple[Target, int]:
    """The cut that meets the latency ratio, and at every how many blocks to merge for it.

    Both are from the journal, or measured and recorded there.  Times differ from run to run: a search that measured
    again could not continue from its own journal.
    """
    ratio, merge_every = options.latency_ratio, options.merge_every
    assert ratio is not None
    asked = {"latency_ratio": ratio}
    found = journal.lookup(asked)
    if found is None:
        if merge_every is None:
            found = schedule_for_latency(evaluator, ratio, options.static)
        else:
            found = cut_for_latency(evaluator, ratio, options.static, merge_every), merge_every
        journal.record(asked, list(found))
    # A journal of 0.1.0 has the cut alone.
    cut, merge_every = found if isinstance(found, (list, tuple)) else (found, 1)
    return Target(cut=cut), merge_every


def _task(evaluator: Evaluator, options: TuningOptions) -> dict[str, Any]:
    """The first line of the journal, which identifies the search; the fields have the names of version 0.1.0."""
    target = options.target if options.target is not None else f"latency ratio {options.latency_ratio:g}"
    # Absent by default, as in journals of 0.1.0.
    given = {} if options.merge_every is None else {"merge_every": options.merge_every}
    return {
        **given,
        "model": evaluator.host.fingerprint(),
        "images": evaluator.digest,
        "target": str(target),
        "count": options.cost,
        "loss": evaluator.loss,
        "seed": options.seed,
        "static": options.static,
    }
