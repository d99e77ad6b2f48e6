"""The salience part of a recipe: how much each token matters."""

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, get_args, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from adamerge.core.errors import BadOption
from adamerge.core.evidence import Evidence, Widths
from adamerge.core.parts import part
from adamerge.core.types import Mask, PerToken

Affinity = Literal["dot", "scaled", "cosine"]


@runtime_checkable
class Salience(Protocol):
    """Gives the importance of each token, `(b, n)`; `macs` is its cost for `n` patch tokens."""

    def __call__(self, evidence: Evidence) -> PerToken: ...

    def macs(self, n: Tensor, at: Widths) -> Tensor: ...


def min_max_scale(s: PerToken, valid: Mask | None = None, slack: float | Float[Tensor, "b 1"] = 0.0) -> PerToken:
    """Scale to [0, 1] per image by minimum and maximum; padding gets 0.  If both are equal, all tokens get 1 (D4).

    They count as equal up to a relative difference of `slack`, which allows for rounding.
    """
    inf = float("inf")
    low = (s if valid is None else s.masked_fill(~valid, inf)).amin(1, keepdim=True)
    high = (s if valid is None else s.masked_fill(~valid, -inf)).amax(1, keepdim=True)
    flat = high - low <= slack * high.abs()
    scaled = torch.where(flat, 1, (s - low) / torch.where(flat, 1, high - low))
    return scaled if valid is None else torch.where(valid, scaled, 0)


@part
@dataclass(frozen=True)
class Uniform:
    """All tokens matter the same."""

    def __call__(self, evidence: Evidence) -> PerToken:
        return torch.ones_like(evidence.size)

    def macs(self, n: torch.Tensor, at: Widths) -> torch.Tensor:
        return 0 * n


@part
@dataclass(frozen=True)
class Centrality:
    """Column sums of the row-softmaxed affinity, min-max scaled per image: eq. (1)-(2).

    `affinity` is the raw dot product as published, the same divided by sqrt(d), or the cosine.
    """

    affinity: Affinity = "dot"

    def __post_init__(self) -> None:
        if self.affinity not in get_args(Affinity):
            raise BadOption(f"affinity must be one of {', '.join(get_args(Affinity))}; got {self.affinity!r}")

    def __call__(self, evidence: Evidence) -> PerToken:
        x = evidence.tokens
        if self.affinity == "cosine":
            x = normalize(x, dim=-1)
        a = x @ x.mT
        if self.affinity == "scaled":
            a = a / x.shape[-1] ** 0.5
        valid = evidence.valid
        # Differences of a few roundings count as equal.  If all tokens of an image are identical, their salience is
        # equal by definition, although rounding can separate large products by more than that.
        own = x if valid is None else torch.where(valid[:, :, None], x, x[:, :1])
        alike = (own.amax(1) == own.amin(1)).all(1)
        slack = torch.where(alike, torch.inf, 8 * torch.finfo(a.dtype).eps)[:, None]
        if valid is None:
            return min_max_scale(a.softmax(-1).sum(-2), None, slack)
        a = a.masked_fill(~valid[:, None, :], float("-inf")).softmax(-1)
        return min_max_scale(a.masked_fill(~valid[:, :, None], 0).sum(-2), valid, slack)

    def macs(self, n: torch.Tensor, at: Widths) -> torch.Tensor:
        return n * n * at.dim


@part
@dataclass(frozen=True)
class ClassAttention:
    """The class token's attention to each token, averaged over heads."""

    needs_attention: ClassVar[str] = "weights"
    needs_class_token: ClassVar[bool] = True

    def __call__(self, evidence: Evidence) -> PerToken:
        return evidence.class_attention

    def macs(self, n: torch.Tensor, at: Widths) -> torch.Tensor:
        return (n + at.prefix) * at.heads * at.key_dim


@part
@dataclass(frozen=True)
class Sharpness:
    """The negative entropy of a token's attention, min-max scaled; values below the mean become 0, as background
    (vid-TLDR)."""

    needs_attention: ClassVar[str] = "weights"

    def __call__(self, evidence: Evidence) -> PerToken:
        weights = evidence.attention
        # A weight of 0, such as that of padding, adds nothing and has no gradient.  The derivative of the entropy is
        # infinite there, and times the 0 of the softmax not a number.
        sharp = torch.special.entr(torch.where(weights == 0, 1, weights)).sum(-1).neg()[:, evidence.prefix :]
        sharp = min_max_scale(sharp, evidence.valid)
        mean = sharp.sum(1, keepdim=True) / evidence.counts[:, None]
        return torch.where(sharp < mean, 0, sharp)

    def macs(self, n: torch.Tensor, at: Widths) -> torch.Tensor:
        return (n + at.prefix) ** 2 * at.heads * at.key_dim


@part
@dataclass(frozen=True)
class ClassShare:
    """The class token's attention to each token, divided by its mean over the image's tokens.

    Unlike min-max scaling, it does not depend on the single most attended token, and it is comparable across images.
    """

    needs_attention: ClassVar[str] = "weights"
    needs_class_token: ClassVar[bool] = True

    def __call__(self, evidence: Evidence) -> PerToken:
        return scale_to_mean_one(evidence.class_attention, evidence)

    def macs(self, n: torch.Tensor, at: Widths) -> torch.Tensor:
        return (n + at.prefix) * at.heads * at.key_dim


@part
@dataclass(frozen=True)
class AttentionShare:
    """The attention of all tokens to each token, divided by its mean: for models without a class token.

    It needs the full attention matrix, so that scores are computed a second time when attention is fused.
    """

    needs_attention: ClassVar[str] = "weights"

    def __call__(self, evidence: Evidence) -> PerToken:
        weights = evidence.attention
        if evidence.valid is not None:
            queries = torch.nn.functional.pad(evidence.valid, (evidence.prefix, 0), value=True)
            weights = weights.masked_fill(~queries[:, :, None], 0)
        return scale_to_mean_one(weights.sum(1)[:, evidence.prefix :], evidence)

    def macs(self, n: torch.Tensor, at: Widths) -> torch.Tensor:
        return (n + at.prefix) ** 2 * at.heads * at.key_dim


def scale_to_mean_one(s: PerToken, evidence: Evidence) -> PerToken:
    """Scale to a mean of 1 per image; padding gets 0.  If the mean is 0, all tokens get 1."""
    valid = evidence.valid
    s = s if valid is None else torch.where(valid, s, 0)
    mean = s.sum(1, keepdim=True) / evidence.counts[:, None]
    equal = torch.ones_like(s) if valid is None else valid.to(s.dtype)
    return torch.where(mean > 0, s / torch.where(mean > 0, mean, 1), equal)
