"""Which tokens merge at a layer with a fixed count, found by sorts and comparisons."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import normalize

from adamerge.core.errors import CannotExport
from adamerge.core.evidence import Evidence
from adamerge.core.match import Alternating, Bipartite, Everywhere, Keys, Links, Sequential
from adamerge.core.recipe import Recipe
from adamerge.exporting.state import count, rows

# Numbers in the largest constant matrix of a layer.
LARGEST_TABLE = 2**16


@dataclass(frozen=True)
class MergePairs:
    """The merges of a layer, the same number `r` in every image.  Tokens are numbered with the prefix.

    * `kept`: the token that becomes each of the `m` tokens after the merge, `(b, m)`.
    * `source`: the tokens that are merged into others, `(b, r)`.
    * `slot`: which of the `m` tokens each of those becomes part of, `(b, r)`.
    * `onto`: the same as one-hot rows, `(b, r, m)`.
    """

    kept: Tensor
    source: Tensor
    slot: Tensor
    onto: Tensor


def find_pairs(recipe: Recipe, evidence: Evidence, salience: Tensor) -> MergePairs | None:
    """The pairs that `recipe` merges; None if it merges nothing."""
    asked = recipe.budget.fixed_count(evidence.layer, evidence.depth, evidence.size.shape[1]) or 0
    links = recipe.links
    if isinstance(links, Bipartite) and isinstance(links.reach, Everywhere):
        sides = static_sides(links, evidence)
        if sides is not None:
            return _between_sides(recipe, evidence, salience, sides, asked)
    found: Links = links(evidence, salience)
    if found.most is None or recipe.order != "kept":
        raise CannotExport(
            f"the number of links that {links} finds depends on the image, and a file has fixed shapes; use a matching "
            "without limits, such as that of adamerge.methods.tome or of dsm without windows"
        )
    r = min(asked, found.most)
    if r <= 0:
        return None
    value = torch.where(found.source, found.value.clamp_min(torch.finfo(found.value.dtype).min), float("-inf"))
    chosen, rest = _split(value, r)
    return _in_order(evidence, chosen, found.partner.gather(1, chosen), rest)


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
    # Keys are there for all tokens: the prefix need not be cut off first.
    whole = isinstance(links.metric, Keys)
    features = normalize(links.metric(replace(evidence, prefix=0) if whole else evidence), dim=-1)
    before = evidence.prefix if whole else 0
    similarity = _part(features, source, before) @ _part(features, target, before).mT
    chosen, rest = _split(links.score(similarity.amax(-1), _part(salience, source)), r)
    # A search for the greatest is slow in some engines: only in the rows of those that merge.
    which = rows(similarity, chosen).argmax(-1)
    if recipe.order == "sources_first":
        prefix = evidence.prefix
        first = _constant(range(prefix), rest), _numbered(rest.sort(1).values, source) + prefix
        kept = torch.cat([*first, _constant([prefix + i for i in target], rest)], 1)
        first_target = prefix + len(source) - r
        onto = one_hot(which, len(target), first_target)
        return MergePairs(kept, _numbered(chosen, source) + prefix, which + first_target, onto)
    rest = torch.cat([_numbered(rest, source), _constant(target, rest)], 1)
    return _in_order(evidence, _numbered(chosen, source), _numbered(which, target), rest)


def _in_order(evidence: Evidence, source: Tensor, target: Tensor, rest: Tensor) -> MergePairs:
    """Pairs of patch tokens whose other tokens, `rest`, stay in their order."""
    prefix = evidence.prefix
    kept = torch.cat([_constant(range(prefix), rest), rest + prefix], 1).sort(1).values
    slot = target - count(source[:, None, :] <= target[:, :, None]) + prefix
    return MergePairs(kept, source + prefix, slot, one_hot(slot, kept.shape[1]))


def one_hot(index: Tensor, n: int, before: int = 0) -> Tensor:
    """One-hot rows of length `before + n` for indices from 0 to n-1, `(b, k, before + n)`; the first `before` are 0.

    Rows of a constant matrix, which is one operator in every engine; comparisons where the matrix would be large.
    """
    if n * (before + n) > LARGEST_TABLE:
        return index[..., None] + before == torch.arange(before + n, device=index.device)
    table = torch.nn.functional.pad(torch.eye(n, device=index.device), (before, 0))
    return table.index_select(0, index.flatten()).view(*index.shape, before + n)


def _split(value: Tensor, r: int) -> tuple[Tensor, Tensor]:
    """The positions of the `r` greatest values of each image, and the others; ties go to the lower position."""
    order = value.argsort(dim=1, descending=True, stable=True)
    return order[:, :r], order[:, r:]


def _part(x: Tensor, which: range, before: int = 0) -> Tensor:
    """The tokens of a range, or values of them, in an `x` that has so many rows `before` them.

    OpenVINO gathers rows faster than it takes slices with a step.
    """
    return x.index_select(1, torch.tensor([before + token for token in which], device=x.device))


def _numbered(index: Tensor, which: range) -> Tensor:
    """The numbers at positions `index` of a range."""
    index = index * which.step if which.step != 1 else index
    return index + which.start if which.start else index


def _constant(numbers: range | list[int], like: Tensor) -> Tensor:
    """These numbers for each image of `like`."""
    return torch.tensor(list(numbers), dtype=like.dtype, device=like.device).expand(like.shape[0], len(numbers))
