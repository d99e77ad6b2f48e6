"""The links part of a recipe: which token may merge into which, and with what value."""

from dataclasses import dataclass, field
from typing import ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import normalize

from adamerge.core.checks import check_number
from adamerge.core.errors import BadOption
from adamerge.core.evidence import Evidence, Widths
from adamerge.core.parts import part
from adamerge.core.types import Counts, Features, Mask, PerImage, PerToken, Slots


@dataclass(frozen=True)
class Links:
    """One link from each source token to the token it may merge into.

    * `value`: how good the link is; the best links merge first.  Meaningful only where `source` is True.
    * `partner`: the index of the destination.
    * `source`: which tokens are sources.
    * `most`: the most links an image without padding has, as a Python integer, so that shapes stay static with a fixed
      budget; None if it depends on the image.
    * `room`: the most merges that each image allows, if that is less than its number of sources.
    """

    value: PerToken
    partner: Slots
    source: Mask
    most: int | None
    room: Counts | None = None

    @property
    def redundancy(self) -> PerImage:
        """The mean value over an image's sources: the paper's measure of its redundancy at this layer."""
        number = self.source.sum(1).clamp_min(1)
        return torch.where(self.source, self.value, 0).sum(1) / number


def no_links(like: PerToken) -> Links:
    """Links without any source, in the shape `(b, n)` of `like`."""
    itself = torch.arange(like.shape[1], device=like.device).expand(like.shape)
    return Links(0 * like, itself, torch.zeros_like(like, dtype=torch.bool), 0)


@dataclass(frozen=True)
class Sides:
    """The two sides of a bipartite matching, as token positions.  `*_valid` is False where an entry is padding.

    `half` allows no more merges than there are targets (ToMe): of one source more than targets, one stays.
    """

    source: Int[Tensor, "b s"]
    target: Int[Tensor, "b t"]
    source_valid: Bool[Tensor, "b s"]
    target_valid: Bool[Tensor, "b t"]
    half: bool = False


@part
@dataclass(frozen=True)
class Sequential:
    """Sources are the first floor(n/2) tokens, targets the others (published)."""

    def __call__(self, evidence: Evidence) -> Sides:
        n, counts = evidence.size.shape[1], evidence.counts[:, None]
        half = counts // 2
        source = torch.arange(n // 2, device=half.device).expand(half.shape[0], -1)
        target = torch.arange(n - n // 2, device=half.device) + half
        return Sides(source, target.clamp_max(n - 1), source < half, target < counts)

    def pairs(self, n: Tensor) -> Tensor:
        return (n // 2) * (n - n // 2)


@part
@dataclass(frozen=True)
class Alternating:
    """Sources and targets alternate (ToMe).

    ToMe starts to count at the prefix tokens, and so does `from_prefix`.  Otherwise the first patch token is a source.
    """

    from_prefix: bool = False

    def __call__(self, evidence: Evidence) -> Sides:
        n, counts = evidence.size.shape[1], evidence.counts[:, None]
        first = evidence.prefix % 2 if self.from_prefix else 0
        source = torch.arange(first, n, 2, device=counts.device).expand(counts.shape[0], -1)
        target = torch.arange(1 - first, n, 2, device=counts.device).expand(counts.shape[0], -1)
        # The only token of an image is no source: there is no target for it.
        return Sides(source, target, (source < counts) & (counts > 1), target < counts, half=self.from_prefix)

    def pairs(self, n: Tensor) -> Tensor:
        return (n // 2) * (n - n // 2)


@part
@dataclass(frozen=True)
class Everywhere:
    """Any source may merge into any target."""

    def __call__(self, evidence: Evidence, sides: Sides) -> None:
        return None


@part
@dataclass(frozen=True)
class SameWindow:
    """In the first `until` of the depth, tokens merge only within their quarter of the image; then anywhere (DSM)."""

    until: float = 0.5

    def __post_init__(self) -> None:
        check_number("until, a share of the depth,", self.until, at_least=0, at_most=1)

    def __call__(self, evidence: Evidence, sides: Sides) -> Bool[Tensor, "b s t"] | None:
        if evidence.layer >= self.until * evidence.depth:
            return None
        side = round(evidence.patches**0.5)
        if evidence.place is None or side * side != evidence.patches:
            raise BadOption(f"windows need a square grid of patches; this model has {evidence.patches}")
        row, column = evidence.place // side, evidence.place % side
        window = 2 * (2 * row >= side).long() + (2 * column >= side).long()
        return window.gather(1, sides.source)[:, :, None] == window.gather(1, sides.target)[:, None, :]


@part
@dataclass(frozen=True)
class Tokens:
    """Similarity is that of the tokens (published)."""

    def __call__(self, evidence: Evidence) -> Features:
        return evidence.tokens

    def width(self, at: Widths) -> int:
        return at.dim


@part
@dataclass(frozen=True)
class Keys:
    """Similarity is that of the attention keys, averaged over heads (ToMe)."""

    needs_attention: ClassVar[str] = "keys"

    def __call__(self, evidence: Evidence) -> Features:
        return evidence.keys

    def width(self, at: Widths) -> int:
        return at.key_dim


@part
@dataclass(frozen=True)
class SalientFirst:
    """`s_i * cos`: salient tokens merge first (published, eq. 3).  The factor never changes the partner (D2)."""

    def __call__(self, similarity: PerToken, salience: PerToken) -> PerToken:
        return salience * similarity


@part
@dataclass(frozen=True)
class SalientLast:
    """`(1 - s_i) * cos`: salient tokens merge last (the paper's Figure 1, not its equation)."""

    def __call__(self, similarity: PerToken, salience: PerToken) -> PerToken:
        return (1 - salience) * similarity


@part
@dataclass(frozen=True)
class Protect:
    """`-(1 - cos) * s_i ** strength`: minus the cosine distance times a power of the salience (ours).

    Unattended tokens merge even when dissimilar; attended ones only into near-duplicates.  A product of salience and
    similarity does not do that.  Values are compared across images, so use a salience whose mean is 1.
    """

    strength: float = 0.75

    def __post_init__(self) -> None:
        finite = isinstance(self.strength, (int, float)) and not isinstance(self.strength, bool)
        if not finite or not 0 <= self.strength < float("inf"):
            raise BadOption(f"strength must be a finite number >= 0; got {self.strength!r}")

    def __call__(self, similarity: PerToken, salience: PerToken) -> PerToken:
        return (similarity - 1) * salience**self.strength


@part
@dataclass(frozen=True)
class SimilarityOnly:
    """`cos`: salience does not influence which tokens merge."""

    def __call__(self, similarity: PerToken, salience: PerToken) -> PerToken:
        return similarity


@runtime_checkable
class SplitRule(Protocol):
    """Divides the tokens into sources and targets; `pairs` is the number of pairs among `n` tokens."""

    def __call__(self, evidence: Evidence) -> Sides: ...

    def pairs(self, n: Tensor) -> Tensor: ...


@runtime_checkable
class Metric(Protocol):
    """Gives the features whose cosine is the similarity; `width` is their number."""

    def __call__(self, evidence: Evidence) -> Features: ...

    def width(self, at: Widths) -> int: ...


@runtime_checkable
class Score(Protocol):
    """Gives the value of a link from the similarity of its tokens and the salience of its source."""

    def __call__(self, similarity: PerToken, salience: PerToken) -> PerToken: ...


@runtime_checkable
class Reach(Protocol):
    """Says which targets a source may have; None if it may have all."""

    def __call__(self, evidence: Evidence, sides: Sides) -> Bool[Tensor, "b s t"] | None: ...


@runtime_checkable
class Matching(Protocol):
    """Links source tokens to destinations; `macs` is its cost for `n` patch tokens."""

    def __call__(self, evidence: Evidence, salience: PerToken) -> Links: ...

    def macs(self, n: Tensor, at: Widths) -> Tensor: ...


@part
@dataclass(frozen=True)
class Bipartite:
    """Links each source to the most similar target; ties go to the lower position (D10).

    `split` makes sources and targets, `metric` gives the features whose cosine is the similarity, `score` turns
    similarity and salience into the value of a link, `reach` limits which targets a source may have.
    """

    split: SplitRule
    metric: Metric
    score: Score
    reach: Reach = field(default=Everywhere())

    def __call__(self, evidence: Evidence, salience: PerToken) -> Links:
        sides: Sides = self.split(evidence)
        features = normalize(self.metric(evidence), dim=-1)
        similarity: Float[Tensor, "b s t"] = _rows(features, sides.source) @ _rows(features, sides.target).mT
        similarity = similarity.masked_fill(~sides.target_valid[:, None, :], float("-inf"))
        near = self.reach(evidence, sides)
        if near is not None:
            similarity = similarity.masked_fill(~near, float("-inf"))
        b, n = salience.shape
        value = similarity.new_zeros(b, n)
        partner = torch.arange(n, device=value.device).repeat(b, 1)
        source = torch.zeros(b, n, dtype=torch.bool, device=value.device)
        if sides.source.shape[1] and sides.target.shape[1]:
            best, which = similarity.max(-1)
            linked = sides.source_valid & ~best.isneginf()
            best = torch.where(linked, best, 0)
            value = value.scatter(1, sides.source, self.score(best, salience.gather(1, sides.source)))
            partner = partner.scatter(1, sides.source, sides.target.gather(1, which))
            source = source.scatter(1, sides.source, linked)
        most = sides.source.shape[1] if sides.target.shape[1] else 0
        room = source.sum(1)
        if sides.half:
            most, room = min(most, sides.target.shape[1]), room.minimum(sides.target_valid.sum(1))
        return Links(value, partner, source, most if near is None else None, room)

    def macs(self, n: Tensor, at: Widths) -> Tensor:
        return self.split.pairs(n) * self.metric.width(at)


def _rows(x: Features, index: Int[Tensor, "b s"]) -> Float[Tensor, "b s d"]:
    """Each image's tokens at these positions.  `index_select` copies rows, which is much faster than `gather`."""
    b, n, d = x.shape
    row = index + n * torch.arange(b, device=x.device)[:, None]
    return x.reshape(b * n, d).index_select(0, row.flatten()).view(*index.shape, d)
