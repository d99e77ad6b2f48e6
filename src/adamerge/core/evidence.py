"""Everything a part of a recipe may look at when it decides a merge."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from adamerge.core.errors import BadOption
from adamerge.core.types import Counts, Features, Mask, PerToken


@dataclass(frozen=True)
class Heads:
    """One attention layer's queries, keys and values over all tokens, prefix included: `(b, tokens, heads, k)`."""

    query: Float[Tensor, "b t h k"]
    key: Float[Tensor, "b t h k"]
    value: Float[Tensor, "b t h k"]
    scale: float
    bias: Float[Tensor, "b 1 1 t"] | None = None

    def mean_key(self, dtype: torch.dtype) -> Float[Tensor, "b t k"]:
        """The keys of all tokens, averaged over heads."""
        return self.key.to(dtype).mean(2)


@dataclass(frozen=True)
class Widths:
    """What a part needs to know of a block to say what it costs there."""

    dim: int
    heads: int
    key_dim: int
    prefix: int


@dataclass(frozen=True)
class Evidence:
    """The patch tokens at the merge site, and what is known about them.  Prefix tokens are never among them.

    `size` is in float32 or better, and shapes are read off it: a runtime may pad `raw` only when somebody looks at it.
    `class_token` says whether the first prefix token is one.  `count` is None when every image owns all `n` tokens.
    `heads` exists only after attention.  `place` is the first original patch (of `patches`, in reading order) that a
    token stands for.
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
        """The tokens in at least float32: raw dot products overflow float16 (D1)."""
        return self.raw.to(torch.promote_types(self.raw.dtype, torch.float32))

    @property
    def keys(self) -> Features:
        """The patch tokens' attention keys, averaged over heads."""
        return self._after_attention("keys").mean_key(self.size.dtype)[:, self.prefix :]

    @property
    def values(self) -> Features:
        """The patch tokens' attention values, all heads side by side."""
        value = self._after_attention("values").value[:, self.prefix :]
        return value.to(self.tokens.dtype).flatten(2)

    @property
    def class_attention(self) -> PerToken:
        """How much the class token attends to each patch token, averaged over heads."""
        heads = self._after_attention("weights")
        if not self.class_token:
            raise BadOption(
                "a part of this recipe reads the class token's attention, but this model has no class token; "
                "use a part that reads the tokens or the keys"
            )
        return self._weights(heads, heads.query[:, :1])[:, 0, self.prefix :]

    @property
    def attention(self) -> Float[Tensor, "b t t"]:
        """The whole attention matrix over all tokens, prefix included, averaged over heads."""
        heads = self._after_attention("weights")
        return self._weights(heads, heads.query)

    @property
    def valid(self) -> Mask | None:
        """Which tokens exist; None when all do."""
        if self.count is None:
            return None
        return torch.arange(self.size.shape[1], device=self.size.device) < self.count[:, None]

    @property
    def counts(self) -> Counts:
        """How many tokens each image has."""
        b, n = self.size.shape
        return torch.full((b,), n, device=self.size.device) if self.count is None else self.count

    def _weights(self, heads: Heads, query: Float[Tensor, "b q h k"]) -> Float[Tensor, "b q t"]:
        query, key = (side.to(self.tokens.dtype).transpose(1, 2) for side in (query, heads.key))
        scores = heads.scale * query @ key.mT
        return (scores if heads.bias is None else scores + heads.bias).softmax(-1).mean(1)

    def _after_attention(self, what: str) -> Heads:
        if self.heads is None:
            raise BadOption(
                f"a part of this recipe reads attention {what}, which do not exist before the block; "
                "use site='after_attention', or a part that reads the tokens"
            )
        return self.heads
