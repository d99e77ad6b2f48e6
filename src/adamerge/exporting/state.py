"""The tokens of a batch between two layers while a model is exported."""

from dataclasses import dataclass

import torch
from torch import Tensor

from adamerge.core.evidence import Evidence, Heads
from adamerge.runtime.reference import Tables

# bfloat16 has all whole numbers up to this one.
EXACT = 256


@dataclass(frozen=True)
class ExportState:
    """The tokens of a batch, and what is known of them.  Only the number of images is free; all widths are integers.

    The prefix counts as tokens in all of these, so that nothing has to be cut off and put back:

    * `x`: the tokens `(b, t, d)`: prefix tokens, patch tokens, padding.
    * `size`: how many patches each token stands for, `(b, t)`; 1 for prefix tokens.
    * `place`: the first original token that each token stands for, `(b, t)`; None while nothing has merged.
    * `slot`: the token that each original token is part of, `(b, original tokens)`; None while nothing has merged.
    * `count`: how many patch tokens each image has; None if there is no padding.
    """

    x: Tensor
    size: Tensor
    prefix: int
    class_token: bool
    original: int
    layer: int = 0
    place: Tensor | None = None
    slot: Tensor | None = None
    count: Tensor | None = None
    tables: Tables = ()

    @property
    def tokens(self) -> int:
        """How many tokens there are, prefix and padding included."""
        return self.x.shape[1]

    @property
    def places(self) -> Tensor:
        """The first original token of each token."""
        return numbers(self.x, self.tokens) if self.place is None else self.place

    def evidence(self, depth: int, heads: Heads | None) -> Evidence:
        """What a recipe may read of the patch tokens."""
        return Evidence(
            raw=self.x[:, self.prefix :],
            size=self.size[:, self.prefix :],
            layer=self.layer,
            depth=depth,
            prefix=self.prefix,
            class_token=self.class_token,
            count=self.count,
            heads=heads,
            place=self.places[:, self.prefix :] - self.prefix,
            patches=self.original - self.prefix,
        )


def start(x: Tensor, prefix: int, class_token: bool) -> ExportState:
    """The state of a batch that enters the first block."""
    size = torch.ones(x.shape[:2], device=x.device, dtype=torch.promote_types(x.dtype, torch.float32))
    return ExportState(x, size, prefix, class_token, x.shape[1])


def numbers(like: Tensor, n: int) -> Tensor:
    """0 … n-1 for each image of `like`, `(b, n)`."""
    return torch.arange(n, device=like.device).expand(like.shape[0], n)


def rows(x: Tensor, index: Tensor) -> Tensor:
    """Each image's tokens, or values, at `index` `(b, k)`: one gather of whole rows, which every engine has."""
    b, n = x.shape[:2]
    flat = index + n * torch.arange(b, device=x.device)[:, None]
    return x.reshape(b * n, *x.shape[2:]).index_select(0, flat.flatten()).view(b, index.shape[1], *x.shape[2:])


def count(mask: Tensor) -> Tensor:
    """How many entries of the last dimension are True, as integers.

    Summed as floats: OpenVINO 2026.4 computes sums of integers wrong where a subtraction follows.  Engines that compute
    in bfloat16 are exact up to 256.
    """
    parts = [part.to(torch.float32).sum(-1).long() for part in mask.split(EXACT, -1)]
    return sum(parts[1:], parts[0])
