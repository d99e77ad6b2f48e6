"""AdaMerge: salience-aware adaptive token merging (Lee, Go, Choi)."""

from typing import Literal

from adamerge.core.budget import Fixed, ZScore
from adamerge.core.combine import BySalience, BySalienceAndSize, BySize
from adamerge.core.errors import BadOption
from adamerge.core.match import Alternating, Bipartite, SalientFirst, SalientLast, Sequential, SimilarityOnly, Tokens
from adamerge.core.recipe import Recipe
from adamerge.core.salience import Affinity, Centrality
from adamerge.core.stats import LayerStats

SPLITS = {"sequential": Sequential(), "alternating": Alternating()}
DIRECTIONS = {"published": SalientFirst(), "protecting": SalientLast(), "off": SimilarityOnly()}
AVERAGES = {"salience": BySalience(), "size": BySize(), "salience_size": BySalienceAndSize()}


def adamerge(
    r_max: float | tuple[float, ...] | None = None,
    stats: LayerStats | None = None,
    *,
    r: float | None = None,
    alpha: float = 1.0,
    temperature: float = 1.0,
    affinity: Affinity = "dot",
    split: Literal["sequential", "alternating"] = "sequential",
    direction: Literal["published", "protecting", "off"] = "published",
    averaging: Literal["salience", "size", "salience_size"] = "salience",
    proportional_attention: bool = False,
) -> Recipe:
    """Merge up to `r_max` tokens before each block, fewer where the image is rich.  The defaults are as published.

    Args:
        r_max: most tokens one layer may merge; one number for all, or one for each.  9 is mild, 23 aggressive
            (ViT-B/16, Table 1).
        stats: layer-wise redundancy of the model, from `calibrate`.  Without it the recipe can only be calibrated.
        r: merge exactly this many at every layer instead of adapting.
        alpha: slope of the sigmoid.
        temperature: divides the z-score; smaller is sharper.
        affinity: raw dot products as published, the same over sqrt(d), or cosines.
        split: the first half merges into the second (published), or every second token into its neighbours.
        direction: salient tokens merge first (published), are protected from merging, or salience has no say.
        averaging: weigh merged tokens by salience (published), by size, or by their product.
        proportional_attention: count a merged token as often as the patches it stands for.
    """
    if (r is None) == (r_max is None):
        raise BadOption(f"give either r_max (adaptive) or r (fixed); got r_max={r_max!r} and r={r!r}")
    return Recipe(
        site="before_block",
        salience=Centrality(affinity),
        links=Bipartite(_pick("split", split, SPLITS), Tokens(), _pick("direction", direction, DIRECTIONS)),
        budget=Fixed(r) if r is not None else ZScore(_number(r_max), stats, alpha, temperature),
        weight=_pick("averaging", averaging, AVERAGES),
        proportional_attention=proportional_attention,
    )


def _pick(name: str, choice: str, choices: dict):
    if choice not in choices:
        raise BadOption(f"{name} must be one of {', '.join(choices)}; got {choice!r}")
    return choices[choice]


def _number(r_max: float | tuple[float, ...] | None) -> float | tuple[float, ...]:
    if r_max is None:
        raise BadOption("r_max must be a number >= 0; got None")
    return r_max
