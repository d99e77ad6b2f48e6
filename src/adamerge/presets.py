"""Recipes that win without tuning: the family, and how its merges are spread over the layers, at any cost."""

from dataclasses import replace

import torch
from torch import nn

from adamerge.core.budget import Fixed, Threshold
from adamerge.core.combine import MeanNorm
from adamerge.core.errors import BadOption
from adamerge.core.match import Alternating, Bipartite, Keys, Protect, Tokens
from adamerge.core.recipe import BySalience, BySize, Recipe
from adamerge.core.salience import AttentionShare, ClassShare, Uniform
from adamerge.data.batches import Images
from adamerge.search.evaluator import Evaluator, Loss, gather_images
from adamerge.search.journal import Journal
from adamerge.search.local_search import Search, Trial, quiet
from adamerge.search.schedule import ALL, Rates, shape
from adamerge.search.solve import Sense, Target

# Found on calibration images of vit_tiny and deit_tiny; see docs/frontier.md.
STRENGTH = 0.75
WEAKER = 0.5
# Up to a cut: the share of the depth before the first merge, and by how much the rate grows from there to the end.
SPREADS = (
    (0.15, 0.42, 1.0),
    (0.25, 0.34, 1.0),
    (0.35, 0.34, 0.0),
    (0.45, 0.25, 0.0),
    (0.55, 0.17, 2.0),
    (1, 0.09, 2.0),
)


def protect(
    strength: float | None = None,
    *,
    class_token: bool = True,
    static: bool = False,
    r: float | tuple[float, ...] = 0.0,
) -> Recipe:
    """Merge where little is lost: the distance of a token to its partner, times how much the class token looks at it.

    Counts are cut at calibrated thresholds, so that an image merges as much as it can spare; merged tokens are averaged
    in proportion to how much is made of them, and keep their length.  Models without a class token use the attention of
    all tokens instead, which says less: there tokens are compared, not keys, and averaged by size.

    Args:
        strength: how much attention protects from merging, 0.75 with a class token, else 0.5; 0 leaves distance alone.
        class_token: whether the model has one.
        static: merge the same number in every image: worse, but with shapes that are known beforehand.
        r: tokens merged at each layer on average over the calibration images; `best` and `tune` choose them.
    """
    if strength is None:
        strength = STRENGTH if class_token else WEAKER
    return Recipe(
        site="after_attention",
        salience=ClassShare() if class_token else AttentionShare(),
        links=_linked(Keys() if class_token else Tokens(), strength),
        budget=Fixed(r) if static else Threshold(r),
        weight=BySalience() if class_token else BySize(),
        combine=MeanNorm(),
        proportional_attention=True,
    )


def families(class_token: bool, static: bool = False) -> list[Recipe]:
    """The families worth a try on a model, the likeliest first."""
    first = protect(class_token=class_token, static=static)
    if class_token:
        return [first, replace(first, links=_linked(Tokens(), STRENGTH)), replace(first, weight=BySize())]
    plain = replace(first, salience=Uniform(), links=_linked(Tokens(), 0.0))
    return [first, plain, replace(plain, links=_linked(Keys(), 0.0))]


def _linked(metric: Tokens | Keys, strength: float) -> Bipartite:
    return Bipartite(Alternating(from_prefix=True), metric, Protect(strength))


def rates(cut: float, depth: int, reads_patches: bool = False) -> Rates:
    """How the merges of a cut are spread over the layers: late while little is cut, earlier the more it is.

    Where nothing reads the patches after the last attention, all that can merge there do; `reads_patches` spares them.
    """
    return shape(depth, *opening(cut, depth), None if reads_patches else ALL)


def opening(cut: float, depth: int) -> tuple[int, float]:
    """The layer where the preset begins to merge, and by how much its rate grows from there."""
    first, slope = next((first, slope) for most, first, slope in SPREADS if cut <= most)
    return min(round(first * depth), depth - 1), slope


def best(
    model: nn.Module,
    images: Images,
    cut: float = 0.3,
    *,
    count: Sense = "true",
    gmacs: float | None = None,
    loss: Loss | None = None,
    static: bool = False,
) -> Recipe:
    """The preset at a wanted cost, calibrated on unlabelled images in a few passes; nothing is searched.

    Args:
        model: a supported model; it is left as it was found.
        images: what the cost is met on: a tensor, or an iterable of batches or of `(images, labels)`.
        cut: the share of the cost to save.
        count: which count of multiply-accumulates, the true one or the paper's.
        gmacs: instead of `cut`, 10^9 multiply-accumulates per image.
        loss: what the model's output is compared by; see `tune`.
        static: merge the same number in every image; see `tune`.
    """
    bench = Evaluator(model, gather_images(model, images), sense=count, loss=loss)
    target = Target(gmacs=gmacs) if gmacs is not None else Target(cut=cut)
    return settle(bench, target, static)


def settle(bench: Evaluator, target: Target, static: bool = False) -> Recipe:
    """The preset at a target on a bench."""
    host = bench.host
    spread = rates(1 - target.macs(bench.full) / bench.full, host.depth, bench.reads_patches)
    family = protect(class_token=host.class_token, static=static)
    return bench.sweep(scaled(bench, family, spread, target).recipe).recipe


def scaled(bench: Evaluator, family: Recipe, spread: Rates, target: Target) -> Trial:
    """A family whose merges are spread so, scaled to a target."""
    goal = target.macs(bench.full)
    if not goal < bench.full:
        raise BadOption(f"{target} is no saving: the unmerged model costs {bench.full / 1e9:.4g} GMACs")
    return Search(bench, goal, Journal(None, {}), seed=0, until=torch.inf, tries=1, bar=quiet()).attempt(family, spread)
