"""Which tokens merge at a layer with a fixed count, found by sorts and comparisons."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from adamerge.core.evidence import Evidence
from adamerge.core.match import Alternating, Bipartite, Everywhere, Links, Sequential
from adamerge.core.recipe import Recipe


@dataclass(frozen=True)
class MergePairs:
    """In each image, token `source[b, j]` becomes part of token `target[b, j]`.  Both are `(b, r)`.

    Tokens are numbered in the order that they keep: `order` lists them, if that is not the order they have now.
    Prefix tokens are counted.
    """

    source: Tensor
    target: Tensor
    order: tuple[int, ...] | None = None


def find_pairs(recipe: Recipe, evidence: Evidence, salience: Tensor) -> MergePairs | None:
    """The pairs that `recipe` merges; None if it merges nothing."""
    asked = recipe.budget.fixed_count(evidence.layer, evidence.depth, evidence.size.shape[1]) or 0
    links = recipe.links
    if isinstance(links, Bipartite) and isinstance(links.reach, Everywhere):
        sides = static_sides(links, evidence)
        if sides is not None:
            return _between_sides(recipe, evidence, salience, sides, asked)
    found: Links = links(evidence, salience)
    r = min(asked, found.most or 0)
    if r <= 0:
        return None
    value = torch.where(found.source, found.value.clamp_min(torch.finfo(found.value.dtype).min), float("-inf"))
    source = _strongest(value, r)
    return MergePairs(source + evidence.prefix, found.partner.gather(1, source) + evidence.prefix)


def static_sides(links: Bipartite, evidence: Evidence) -> tuple[range, range] | None:
    """Sources and targets as patch tokens, where they do not depend on the image."""
    n, split = evidence.size.shape[1], links.split
    if isinstance(split, Alternating):
        first = evidence.prefix % 2 if split.from_prefix else 0
        return range(first, n, 2), range(1 - first, n, 2)
    return (range(n // 2), range(n // 2, n)) if isinstance(split, Sequential) else None


def _between_sides(
    recipe: Recipe, evidence: Evidence, salience: Tensor, sides: tuple[range, range], asked: int
) -> MergePairs | None:
    """The pairs of a bipartite matching whose sides are the same in all images."""
    links, (source, target) = recipe.links, sides
    assert isinstance(links, Bipartite)
    half = isinstance(links.split, Alternating) and links.split.from_prefix
    r = min(asked, min(len(source), len(target)) if half else len(source))
    if r <= 0 or not len(target):
        return None
    features = normalize(links.metric(evidence), dim=-1)
    best, which = (_part(features, source) @ _part(features, target).mT).max(-1)
    value = links.score(best, _part(salience, source))
    chosen = _strongest(value, r)
    which = which.gather(1, chosen)
    if recipe.order == "sources_first":
        order = (*range(evidence.prefix), *(evidence.prefix + i for i in (*source, *target)))
        return MergePairs(chosen + evidence.prefix, which + evidence.prefix + len(source), order)
    return MergePairs(
        chosen * source.step + source.start + evidence.prefix, which * target.step + target.start + evidence.prefix
    )


def _strongest(value: Tensor, r: int) -> Tensor:
    """The positions of the `r` greatest values of each image; ties go to the lower position."""
    return value.argsort(dim=1, descending=True, stable=True)[:, :r]


def _part(x: Tensor, which: range) -> Tensor:
    return x[:, which.start : which.stop : which.step]
