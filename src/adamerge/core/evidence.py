"""The input of every part of a recipe: what is known about a batch of tokens when one layer decides its merge."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from adamerge.core.errors import BadOption
from adamerge.core.lazy import lazy_fields
from adamerge.core.types import Counts, Features, Mask, PerToken


@lazy_fields("query", "key", "value", "bias")
@dataclass(frozen=True)
class Heads:
    """One attention layer's queries, keys and values over all tokens, prefix included: `(b, tokens, heads, k)`.

    `scale` multiplies the scores `query @ key.mT`; `bias`, if any, is added to them.
    """

    query: Float[Tensor, "b t h k"]
    key: Float[Tensor, "b t h k"]
    value: Float[Tensor, "b t h k"]
    scale: float
    bias: Float[Tensor, "b 1 1 t"] | None = None

    def mean_keys(self, prefix: int, dtype: torch.dtype) -> Features:
        """The keys of the tokens after the prefix, averaged over heads: `(b, n, k)`."""
        return self.key.to(dtype).mean(2)[:, prefix:]

    def value_norms(self, prefix: int, dtype: torch.dtype) -> PerToken:
        """The norms of their values, heads concatenated: `(b, n)`."""
        return self.value[:, prefix:].to(dtype).flatten(2).norm(dim=-1)

    def class_weights(self, prefix: int, dtype: torch.dtype) -> PerToken:
        """The first token's attention to them, averaged over heads: `(b, n)`."""
        return self.weights(self.query[:, :1], dtype)[:, 0, prefix:]

    def weights(self, query: Float[Tensor, "b q h k"], dtype: torch.dtype) -> Float[Tensor, "b q t"]:
        """The attention of these queries to all tokens, averaged over heads."""
        query, key = (side.to(dtype).transpose(1, 2) for side in (query, self.key))
        scores = self.scale * query @ key.mT
        return (scores if self.bias is None else scores + self.bias).softmax(-1).mean(1)


@dataclass(frozen=True)
class Widths:
    """The widths of a block, from which a part computes its multiply-accumulates there."""

    dim: int
    heads: int
    key_dim: int
    prefix: int


@lazy_fields("raw", "place")
@dataclass(frozen=True)
class Evidence:
    """The patch tokens at the merge site, `(b, n, d)`, and what is known about them.  Prefix tokens are left out.

    * `raw`: the tokens in the dtype of the model; padding where an image has fewer than `n`.
    * `size`: how many patches each token stands for, in float32 or better.
    * `layer`, `depth`: the number of this block, and how many there are.
    * `prefix`, `class_token`: how many prefix tokens there are, and whether the first one is a class token.
    * `count`: how many tokens each image has; None when all have `n`.
    * `heads`: the queries, keys and values of this block; None before attention.
    * `place`: the first original patch (of `patches`, in reading order) that each token stands for.

    The packed runtime gives `raw`, `place` and the arrays of `heads` as deferred values: they are padded when a part
    reads them.  Take shapes from `size`, which is always there.
    """

    raw: Features
    size: PerToken
    layer: int
    depth: int
    prefix: int = 0
    class_token: bool = False
    count: Counts | None = None
    heads: Heads | None = None
    place: Int[Tensor, "b n"] | None = None
    patches: int = 0

    @property
    def tokens(self) -> Features:
        """The tokens in float32 or better: dot products of float16 tokens would overflow (D1)."""
        return self.raw.to(torch.promote_types(self.raw.dtype, torch.float32))

    @property
    def keys(self) -> Features:
        """The patch tokens' attention keys, averaged over heads: `(b, n, k)`."""
        return self._after_attention("keys").mean_keys(self.prefix, self.size.dtype)

    @property
    def values(self) -> Features:
        """The patch tokens' attention values, heads concatenated: `(b, n, heads * k)`."""
        value = self._after_attention("values").value[:, self.prefix :]
        return value.to(self.size.dtype).flatten(2)

    @property
    def value_norms(self) -> PerToken:
        """The norms of the patch tokens' attention values, heads concatenated."""
        return self._after_attention("values").value_norms(self.prefix, self.size.dtype)

    @property
    def class_attention(self) -> PerToken:
        """How much the class token attends to each patch token, averaged over heads."""
        heads = self._after_attention("weights")
        if not self.class_token:
            raise BadOption(
                "a part of this recipe reads the class token's attention, but this model has no class token; "
                "use a part that reads the tokens or the keys"
            )
        return heads.class_weights(self.prefix, self.size.dtype)

    @property
    def attention(self) -> Float[Tensor, "b t t"]:
        """The attention matrix over all tokens, prefix included, averaged over heads."""
        heads = self._after_attention("weights")
        return heads.weights(heads.query, self.size.dtype)

    @property
    def valid(self) -> Mask | None:
        """Which tokens exist, as a mask; None when there is no padding."""
        if self.count is None:
            return None
        return torch.arange(self.size.shape[1], device=self.size.device) < self.count[:, None]

    @property
    def counts(self) -> Counts:
        """How many tokens each image has."""
        b, n = self.size.shape
        return torch.full((b,), n, device=self.size.device) if self.count is None else self.count

    def _after_attention(self, what: str) -> Heads:
        """The heads; refused where there are none yet."""
        if self.heads is None:
            raise BadOption(
                f"a part of this recipe reads attention {what}, which do not exist before the block; "
                "use site='after_attention', or a part that reads the tokens"
            )
        return self.heads
