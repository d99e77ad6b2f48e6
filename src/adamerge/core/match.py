"""Who may merge into whom, and how strongly."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import normalize

from adamerge.core.errors import BadOption
from adamerge.core.evidence import Evidence, Widths
from adamerge.core.parts import part
from adamerge.core.types import Counts, Features, Mask, PerImage, PerToken, Slots


@dataclass(frozen=True)
class Links:
    """Every source token's destination, and how much it should go there.  `value` counts only where `source` holds.

    `most` is how many sources an image with a full row has, as a Python number, so that a fixed budget stays static;
    None where that depends on the image.  `room` is how many merges each image has room for, if fewer than sources.
    """

    value: PerToken
    partner: Slots
    source: Mask
    most: int | None
    room: Counts | None = None

    @property
    def redundancy(self) -> PerImage:
        """The mean value over the sources: the paper's proxy for how much an image can lose at this layer."""
        number = self.source.sum(1).clamp_min(1)
        return torch.where(self.source, self.value, 0).sum(1) / number


def no_links(like: PerToken) -> Links:
    """The links of tokens that nobody compares."""
    everyone = torch.arange(like.shape[1], device=like.device).expand(like.shape)
    return Links(0 * like, everyone, torch.zeros_like(like, dtype=torch.bool), 0)


@dataclass(frozen=True)
class Sides:
    """The two sides of a bipartite matching, as token positions.  `*_valid` is False where a place is empty.

    `half` limits merges to half of the tokens (ToMe): of an odd number, one more source than targets stays.
    """

    source: Int[Tensor, "b s"]
    target: Int[Tensor, "b t"]
    source_valid: Bool[Tensor, "b s"]
    target_valid: Bool[Tensor, "b t"]
    half: bool = False


@part
@dataclass(frozen=True)
class Sequential:
    """The first half merges into the second: A = the first floor(n/2) tokens, B = the rest (published)."""

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
    """Every second token merges into the tokens between (ToMe).

    ToMe counts its prefix tokens when it takes turns; `from_prefix` does so too.  Otherwise the first patch token
    is a source.
    """

    from_prefix: bool = False

    def __call__(self, evidence: Evidence) -> Sides:
        n, counts = evidence.size.shape[1], evidence.counts[:, None]
        first = evidence.prefix % 2 if self.from_prefix else 0
        source = torch.arange(first, n, 2, device=counts.device).expand(counts.shape[0], -1)
        target = torch.arange(1 - first, n, 2, device=counts.device).expand(counts.shape[0], -1)
        # A lone token has nobody to merge with, on whichever side it falls.
        return Sides(source, target, (source < counts) & (counts > 1), target < counts, half=self.from_prefix)

    def pairs(self, n: Tensor) -> Tensor:
        return (n // 2) * (n - n // 2)


@part
@dataclass(frozen=True)
class Everywhere:
    """A token may merge into any other, however far away."""

    def __call__(self, evidence: Evidence, sides: Sides) -> None:
        return None


@part
@dataclass(frozen=True)
class SameWindow:
    """A token may merge only inside its own quarter of the image, until `until` of the depth (DSM)."""

    until: float = 0.5

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
    """Compare the tokens themselves (published)."""

    def __call__(self, evidence: Evidence) -> Features:
        return evidence.tokens

    def width(self, at: Widths) -> int:
        return at.dim


@part
@dataclass(frozen=True)
class Keys:
    """Compare attention keys, averaged over heads (ToMe)."""

    def __call__(self, evidence: Evidence) -> Features:
        return evidence.keys

    def width(self, at: Widths) -> int:
        return at.key_dim


@part
@dataclass(frozen=True)
class SalientFirst:
    """`s_i * cos`: salient tokens merge first (published, eq. 3).  The factor never changes who the partner is (D2)."""

    def __call__(self, similarity: PerToken, salience: PerToken) -> PerToken:
        return salience * similarity


@part
@dataclass(frozen=True)
class SalientLast:
    """`(1 - s_i) * cos`: salience protects from being merged away (the paper's Figure 1, not its equation)."""

    def __call__(self, similarity: PerToken, salience: PerToken) -> PerToken:
        return (1 - salience) * similarity


@part
@dataclass(frozen=True)
class Protect:
    """`-(1 - cos) * s_i ** strength`: what is lost, the distance times how much the token matters (ours).

    Unlike a product with the similarity, it lets tokens go that nobody looks at, however few are like them, and those
    that much is made of only into their likes.  Salience is compared across images: use one whose mean is 1.
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
    """`cos`: salience has no say in who merges."""

    def __call__(self, similarity: PerToken, salience: PerToken) -> PerToken:
        return similarity


@runtime_checkable
class Matching(Protocol):
    """What a recipe needs of a way to link tokens."""

    def __call__(self, evidence: Evidence, salience: PerToken) -> Links: ...

    def macs(self, n: Tensor, at: Widths) -> Tensor: ...


@part
@dataclass(frozen=True)
class Bipartite:
    """Each source is linked to the most similar token of the other side; ties go to the lower position (D10)."""

    split: Any
    metric: Any
    score: Any
    reach: Any = Everywhere()

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
    """Each image's tokens at these places, copied as whole rows: gathering number by number takes far longer."""
    b, n, d = x.shape
    row = index + n * torch.arange(b, device=x.device)[:, None]
    return x.reshape(b * n, d).index_select(0, row.flatten()).view(*index.shape, d)
