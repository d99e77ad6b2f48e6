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
    """Merge up to `r_max` tokens before each block, fewer in images with little redundancy.  Defaults are as published.

    Args:
        r_max: the most tokens a layer may merge; one number for all layers, or one for each.  9 is mild, 23 aggressive
            (ViT-B/16, Table 1).
        stats: mean and standard deviation of the redundancy of each layer, from `calibrate`.  Without them the recipe
            can be calibrated but not applied.
        r: merge exactly this many tokens at every layer, in every image, instead of adapting.
        alpha: factor of the z-score in the sigmoid.
        temperature: divisor of the z-score; the smaller, the more the count reacts to the image.
        affinity: "dot" is the raw dot product (published), "scaled" divides it by sqrt(d), "cosine" normalises tokens.
        split: "sequential" merges the first half of the tokens into the second (published), "alternating" every second
            token into the others.
        direction: "published" merges salient tokens first, "protecting" merges them last, "off" ignores salience.
        averaging: weight of a token in an average: "salience" (published), "size", or "salience_size", their product.
        proportional_attention: add the log of its size to the attention scores of a merged token.
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
    """The part that an option names."""
    if choice not in choices:
        raise BadOption(f"{name} must be one of {', '.join(choices)}; got {choice!r}")
    return choices[choice]


def _number(r_max: float | tuple[float, ...] | None) -> float | tuple[float, ...]:
    """`r_max`, which must be given here."""
    if r_max is None:
        raise BadOption("r_max must be a number >= 0; got None")
    return r_max
