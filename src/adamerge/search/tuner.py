"""Tuning: the recipe that changes a model's output least at a wanted cost, found on unlabelled images."""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from adamerge.core.budget import check_number
from adamerge.core.errors import BadImages, BadOption
from adamerge.core.recipe import Recipe
from adamerge.data.batches import Images
from adamerge.digest import digest_tensors
from adamerge.presets import families, opening, rates
from adamerge.search.evaluator import Evaluator, Loss, gather_images
from adamerge.search.journal import Journal
from adamerge.search.latency import cut_of
from adamerge.search.local_search import BudgetSpent, Search, Trial, strengths
from adamerge.search.schedule import ALL, Rates, shape
from adamerge.search.solve import Sense, Target, check_sense

# One image of four is kept out of the search, to see whether what was found holds for others.
CHECK = 4
FEWEST = 8
# By how much rates fall from the first layer to the last where most is merged early.
FADING = -0.8


@dataclass(frozen=True)
class Tuning:
    """What a search found: the recipe, what it loses and costs on the images it was tuned on and on those kept out.

    `tried` counts recipes, `sweeps` the passes over the images (each at most a forward pass of the unmerged model).
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
    count: Sense = "true",
    gmacs: float | None = None,
    latency_ratio: float | None = None,
    loss: Loss | None = None,
    static: bool = False,
    seed: int = 0,
    tries: int = 100,
    time_limit: float | None = None,
    progress: bool = True,
    resume: str | os.PathLike[str] | None = None,
) -> Recipe:
    """Search for the recipe that changes the output of `model` least at a wanted cost; no labels, no training.

    Args:
        model: a supported model; it is left as it was found.
        images: a few hundred images like those it will see, preprocessed for the model: a tensor, or an iterable of
            batches or of `(images, labels)`.  A quarter is kept out of the search, as a check.
        cut: the share of the cost to save, 0.3 by default.
        count: which count of multiply-accumulates has to meet it, the true one or the paper's.
        gmacs: instead of `cut`, 10^9 multiply-accumulates per image.
        latency_ratio: instead of `cut`, the time of the merged model as a share of the unmerged one's, measured here.
        loss: "kl" compares class probabilities, "features" the directions of the pooled output and of the patches; by
            default what the model gives.
        static: merge the same number in every image.  That loses more at the same cost, but all shapes are known
            beforehand: for export, for compilers, and where batches of different lengths are slow.
        seed: of the order in which changes are tried; the same seed gives the same recipe.
        tries: how many recipes to try.
        time_limit: seconds after which the best so far is taken.
        progress: show a progress bar.
        resume: a file that keeps what was tried; a search that was stopped goes on from it.
    """
    return study(
        model,
        images,
        cut,
        count=count,
        gmacs=gmacs,
        latency_ratio=latency_ratio,
        loss=loss,
        static=static,
        seed=seed,
        tries=tries,
        time_limit=time_limit,
        progress=progress,
        resume=resume,
    ).recipe


def study(
    model: nn.Module,
    images: Images,
    cut: float | None = None,
    *,
    count: Sense = "true",
    gmacs: float | None = None,
    latency_ratio: float | None = None,
    loss: Loss | None = None,
    static: bool = False,
    seed: int = 0,
    tries: int = 100,
    time_limit: float | None = None,
    progress: bool = True,
    resume: str | os.PathLike[str] | None = None,
) -> Tuning:
    """`tune`, with what it found on the way."""
    begin = time.monotonic()
    if sum(given is not None for given in (cut, gmacs, latency_ratio)) > 1:
        raise BadOption("give one of cut, gmacs and latency_ratio, to say what it may cost")
    check_sense(count)
    if isinstance(tries, bool) or not isinstance(tries, int) or tries < 1:
        raise BadOption(f"tries must be a whole number >= 1; got {tries!r}")
    if time_limit is not None:
        check_number("time_limit", time_limit, at_least=0)
    target = Target(gmacs=gmacs) if gmacs is not None else Target(cut=0.3 if cut is None else cut)
    tuned, kept = split(gather_images(model, images))
    bench = Evaluator(model, tuned, sense=count, loss=loss)
    if latency_ratio is not None:
        target = Target(cut=cut_of(bench, latency_ratio))
    task = _task(bench, target, seed, count, static)
    until = begin + (time_limit if time_limit is not None else torch.inf)
    options: dict[str, Any] = {"seed": seed, "tries": tries, "until": until, "progress": progress, "static": static}
    found, tried = seek(bench, target, Journal(resume, task), **options)
    outcome = bench.sweep(found.recipe)
    check = Evaluator(model, kept, sense=count, loss=bench.loss)
    checked = check.sweep(outcome.recipe, calibrate=False)
    macs, check_macs = outcome.macs.mean().item(), checked.macs.mean().item()
    return Tuning(
        recipe=outcome.recipe,
        rates=found.rates,
        loss=outcome.loss.mean().item(),
        check_loss=checked.loss.mean().item(),
        gmacs=macs / 1e9,
        check_gmacs=check_macs / 1e9,
        cut=1 - macs / bench.full,
        check_cut=1 - check_macs / bench.full,
        images=bench.number,
        check_images=check.number,
        tried=tried,
        sweeps=bench.sweeps,
        seconds=time.monotonic() - begin,
    )


def seek(
    bench: Evaluator,
    target: Target,
    journal: Journal,
    *,
    seed: int,
    tries: int,
    until: float,
    progress: bool,
    static: bool = False,
    starts: tuple[tuple[Recipe, Rates], ...] = (),
) -> tuple[Trial, int]:
    """The best trial found on a bench, and how many there were.  `starts` are tried first."""
    goal, host = target.macs(bench.full), bench.host
    if not goal < bench.full:
        raise BadOption(f"{target} is no saving: the unmerged model costs {bench.full / 1e9:.4g} GMACs")
    cut = 1 - goal / bench.full
    with tqdm(total=tries, desc=f"tuning, {target}", disable=not progress) as bar:
        search = Search(bench, goal, journal, seed=seed, until=until, tries=tries, bar=bar)
        try:
            for family, start in starts:
                search.attempt(family, start)
            default = rates(cut, host.depth, bench.reads_patches)
            for family in families(host.class_token, static):
                search.attempt(family, default)
            _open(search, cut)
            search.improve(_early)
            search.improve(strengths)
            search.walk()
            while search.improve(lambda best: strengths(best, (0.8, 1.25))):
                pass
            search.walk(0.3, 0.05)
        except BudgetSpent:
            pass
    assert search.best is not None
    return search.best, search.tried


def split(images: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The images to tune on, and every fourth, kept out as a check; both in batches as large as they came."""
    everyone, size = torch.cat(images), max(len(batch) for batch in images)
    if len(everyone) < FEWEST:
        raise BadImages(f"tuning needs at least {FEWEST} images, a few hundred are good; got {len(everyone)}")
    out = torch.arange(len(everyone), device=everyone.device) % CHECK == CHECK - 1
    return list(everyone[~out].split(size)), list(everyone[out].split(size))


def _open(search: Search, cut: float) -> None:
    """Begin a layer earlier or later than the preset, then let the rates grow otherwise."""
    assert search.best is not None
    depth, last = search.bench.host.depth, None if search.bench.reads_patches else ALL
    first, slope = opening(cut, depth)
    begun = {search.best.score: first}
    for other in (first - 1, first + 1):
        if 0 <= other < depth:
            begun[search.attempt(search.best.family, shape(depth, other, slope, last)).score] = other
    first = begun[min(begun)]
    for other in sorted({0.0, 1.0, 2.0} - {slope}):
        search.attempt(search.best.family, shape(depth, first, other, last))


def _early(best: Trial) -> Iterator[tuple[Recipe, Rates]]:
    """Most merges first and attention that knows no sizes: DINOv2 loses least so once half of its cost is cut."""
    depth, last = len(best.rates), best.rates[-1] if best.rates[-1] >= ALL else None
    yield replace(best.family, proportional_attention=False), shape(depth, 0, FADING, last)


def _task(bench: Evaluator, target: Target, seed: int, count: str, static: bool) -> dict[str, Any]:
    """What tells one search from another."""
    return {
        "model": bench.host.fingerprint(),
        "images": digest_tensors(bench.images),
        "target": str(target),
        "count": count,
        "loss": bench.loss,
        "seed": seed,
        "static": static,
    }
