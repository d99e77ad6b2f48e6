"""The links of packed tokens on a CPU.

Products, and sums whose order depends on a length, are computed for each image alone, or for images of the same length
at once where this machine gives each the same bits.  All else is elementwise, on arrays `(b, columns)` whose number of
columns is the same in every batch.  So an image gets the same links in any batch, to the bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from adamerge.core.budget import Fixed, Threshold, ZScore
from adamerge.core.combine import Average, BySalience, BySalienceAndSize, BySize, Drop, MeanNorm
from adamerge.core.evidence import Evidence
from adamerge.core.lazy import deferred
from adamerge.core.match import (
    Alternating,
    Bipartite,
    Everywhere,
    Keys,
    Protect,
    SalientFirst,
    SalientLast,
    Score,
    Sequential,
    SimilarityOnly,
    Tokens,
)
from adamerge.core.recipe import Recipe
from adamerge.core.salience import AttentionShare, Centrality, ClassShare, Uniform, min_max_scale, scale_to_mean_one
from adamerge.core.types import PerToken
from adamerge.runtime.packed.layout import Packed, PackedHeads
from adamerge.runtime.packed.onednn import available, linear
from adamerge.runtime.packed.split import ImageSplit, split_image
from adamerge.runtime.packed.state import PackedState

PerSource = Float[Tensor, "b columns"]

# torch computes whole vectors of numbers in one way and the numbers left over at the end in another, and splits arrays
# of this many numbers between threads.  A multiple of the longest vectors, and fewer numbers than that, avoid both.
COLUMNS = 64
MOST_ON_ONE_THREAD = 32768 - 1
# The least length by which a token is divided, as in `torch.nn.functional.normalize`.
SHORTEST = 1e-12

KNOWN: dict[str, tuple[type, ...]] = {
    "salience": (Uniform, ClassShare, AttentionShare, Centrality),
    "links": (Bipartite,),
    "budget": (Fixed, ZScore, Threshold),
    "weight": (BySalience, BySize, BySalienceAndSize),
    "combine": (Average, Drop, MeanNorm),
}
KNOWN_LINKS: dict[str, tuple[type, ...]] = {
    "split": (Sequential, Alternating),
    "metric": (Keys, Tokens),
    "score": (SimilarityOnly, SalientFirst, SalientLast, Protect),
    "reach": (Everywhere,),
}


@dataclass(frozen=True)
class PackedLinks:
    """The links of the sources of a batch, `(b, columns)`: the sources of an image come first, then columns of 0.

    `target` is the number of the best target among the targets of the image.  `salience` is that of all patch tokens,
    `(b, patches)`; None if all are equal.
    """

    value: PerSource
    target: Int[Tensor, "b columns"]
    splits: Sequence[ImageSplit]
    salience: PerToken | None


def links_known(recipe: Recipe) -> bool:
    """Whether `find_links` computes the links of a recipe, and `merge_rows` its merges."""
    links = recipe.links
    return all(type(getattr(recipe, name)) in kinds for name, kinds in KNOWN.items()) and all(
        type(getattr(links, name)) in kinds for name, kinds in KNOWN_LINKS.items()
    )


def find_links(state: PackedState, recipe: Recipe, key: PackedHeads | None, received: PerToken | None) -> PackedLinks:
    """The links of a batch.

    Args:
        state: the tokens that are about to be merged.
        recipe: one for which `links_known`.
        key: the keys of all rows, after attention.
        received: the attention that each patch token got, `(b, patches)`, where the salience is a share of it.
    """
    bipartite, layout = recipe.links, state.layout
    assert isinstance(bipartite, Bipartite)
    if layout.uniform:
        splits = [split_image(bipartite.split, layout.prefix, layout.most)] * layout.images
    else:
        splits = [split_image(bipartite.split, layout.prefix, n) for n in layout.counts]
    wide = torch.promote_types(state.x.dtype, torch.float32)
    patches = state.history.shape[1]
    columns = -(-max(split_image(bipartite.split, layout.prefix, patches).sources, 1) // COLUMNS) * COLUMNS
    best = torch.zeros((layout.images, columns), dtype=wide)
    target = torch.zeros((layout.images, columns), dtype=torch.long)
    if isinstance(recipe.salience, Centrality):
        salience = _central(state, recipe.salience, splits, best, target)
    else:
        salience = None if received is None else scale_to_mean_one(received.to(wide), _counted(state, received))
    compared = state.x if key is None or isinstance(bipartite.metric, Tokens) else key.mean(1, dtype=wide)
    if compared is not state.x or not isinstance(recipe.salience, Centrality):
        compared = compared.to(wide)
        length = torch.linalg.vector_norm(compared, dim=-1, keepdim=True).clamp_min_(SHORTEST)
        _compare(compared / length, state, splits, best, target)
    value = best
    if salience is not None:
        value = _scored(bipartite.score, best, _of_sources(salience, splits, columns))
    elif not isinstance(bipartite.score, SimilarityOnly):
        value = _scored(bipartite.score, best, torch.ones_like(best))
    return PackedLinks(value, target, splits, salience)


def _compare(unit: Packed, state: PackedState, splits: Sequence[ImageSplit], best: Tensor, target: Tensor) -> None:
    """Write the best target of every source, by the products of rows of length 1."""
    layout, split = state.layout, splits[0]
    if layout.uniform:
        if split.sources:
            rows = unit[: layout.total].view(layout.images, layout.longest, -1)[:, layout.prefix :]
            similarity = _products(rows[:, split.source_rows], rows[:, split.target_rows].mT)
            torch.max(similarity, 2, out=(best[:, : split.sources], target[:, : split.sources]))
        return
    for image, (split, begin) in enumerate(zip(splits, layout.bounds, strict=False)):
        if split.sources:
            rows = unit[begin + layout.prefix : begin + layout.prefix + split.n]
            similarity = rows[split.source_rows] @ rows[split.target_rows].T
            torch.max(similarity, 1, out=(best[image, : split.sources], target[image, : split.sources]))


def _products(left: Float[Tensor, "b m d"], right: Float[Tensor, "b d n"]) -> Float[Tensor, "b m n"]:
    """The products of the matrices of each image, with the bits that each has alone."""
    (images, m, d), n = left.shape, right.shape[2]
    number = 1 << (images - 1).bit_length()
    if images > 1 and _same_together(number, m, d, n, left.dtype, torch.get_num_threads()):
        return torch.bmm(left, right)
    return torch.stack([torch.mm(*pair) for pair in zip(left, right, strict=True)])


@lru_cache(1024)
def _same_together(images: int, m: int, d: int, n: int, dtype: torch.dtype, threads: int) -> bool:
    """Whether this machine computes a product among others as alone, to the bit: tried once for each shape."""
    random = torch.Generator().manual_seed(m)
    # Every second row of an image is a source, and every second a target.
    rows = torch.randn(max(2 * m, 2 * n), d, generator=random, dtype=dtype)
    many = rows.new_full((images, *rows.shape), float("nan"))
    many[-1] = rows
    left, right = many[:, : 2 * m : 2], many[:, 1 : 2 * n : 2].mT
    return torch.equal(torch.bmm(left, right)[-1], torch.mm(rows[: 2 * m : 2], rows[1 : 2 * n : 2].T))


def _central(
    state: PackedState, salience: Centrality, splits: Sequence[ImageSplit], best: Tensor, target: Tensor
) -> PerToken:
    """The centrality of every patch token; writes the best targets by tokens, which are read off the same products."""
    layout, wide = state.layout, best.dtype
    x = state.x.to(wide)
    length = torch.linalg.vector_norm(x, dim=-1).clamp_min_(SHORTEST)
    if salience.affinity == "cosine":
        x, length = x / length[:, None], torch.ones_like(length)
    sums = torch.zeros((layout.images, state.history.shape[1]), dtype=wide)
    inverse, onednn = length.reciprocal(), wide is torch.float32 and available()
    for image, (split, begin) in enumerate(zip(splits, layout.bounds, strict=False)):
        rows = slice(begin + layout.prefix, begin + layout.prefix + split.n)
        own, scale = x[rows], inverse[rows]
        affinity = linear(own, own) if onednn and split.n else own @ own.T
        if split.sources:
            similarity = affinity[split.source_rows, split.target_rows] * scale[split.target_rows]
            found = best[image, : split.sources]
            torch.max(similarity, 1, out=(found, target[image, : split.sources]))
            # The length of a source does not change which of its targets is the best.
            found *= scale[split.source_rows]
        if salience.affinity == "scaled":
            affinity /= x.shape[-1] ** 0.5
        torch.sum(affinity.softmax(-1), 0, out=sums[image, : split.n])
    evidence = _counted(state, sums)
    return min_max_scale(sums, evidence.valid, _slack(state, sums))


def _slack(state: PackedState, sums: PerToken) -> Float[Tensor, "b 1"]:
    """By how much sums may differ and count as equal: a few roundings, or without limit if all tokens are identical."""
    layout, few = state.layout, 8 * torch.finfo(sums.dtype).eps
    last = len(state.x) - 1
    first, second = (torch.from_numpy(np.minimum(layout.first_patches[:, 0] + place, last)) for place in (0, 1))
    # Most images are told apart by their first two patch tokens.
    pairs = (state.x.index_select(0, first) == state.x.index_select(0, second)).all(1).tolist()
    slack = []
    for pair, begin, n in zip(pairs, layout.bounds, layout.counts, strict=False):
        own = state.x[begin + layout.prefix : begin + layout.prefix + n] if pair and n > 1 else None
        alike = own is not None and bool((own == own[0]).all())
        slack.append(float("inf") if alike or n == 1 else few)
    return torch.tensor(slack, dtype=sums.dtype)[:, None]


def _counted(state: PackedState, values: PerToken) -> Evidence:
    """Evidence that says which of `values` are of tokens; nothing else can be read from it."""
    layout = state.layout
    whole = layout.uniform and layout.most == values.shape[1]
    count = None if whole else torch.tensor(layout.counts)
    return Evidence(raw=deferred(_unread), size=values, layer=state.layer, depth=0, count=count)


def _unread() -> Tensor:
    raise AssertionError("the tokens are not here")


def _of_sources(values: PerToken, splits: Sequence[ImageSplit], columns: int) -> PerSource:
    """The values of the sources of each image.  The first source is at the same place in all images."""
    split = splits[0]
    own = values[:, split.first_source :: split.step][:, :columns]
    return pad(own, (0, columns - own.shape[1])).contiguous()


def _scored(score: Score, similarity: PerSource, salience: PerSource) -> PerSource:
    """The value of each link, in parts that one thread computes."""
    rows = max(MOST_ON_ONE_THREAD // similarity.shape[1], 1)
    if len(similarity) <= rows:
        return score(similarity, salience)
    parts = zip(similarity.split(rows), salience.split(rows), strict=True)
    return torch.cat([score(*part) for part in parts])
