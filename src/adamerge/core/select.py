"""Makes a plan from links: the strongest `r` links of each image merge."""

from typing import Literal

import torch
from torch import Tensor

from adamerge.core.match import Links
from adamerge.core.plan import Plan, keep_all
from adamerge.core.types import Counts, Mask, Slots

Order = Literal["kept", "sources_first"]


def select(links: Links, r: int | Counts, valid: Mask | None = None, order: Order = "kept") -> Plan:
    """The plan that merges the `r` strongest links of each image, or all it has if fewer (D9).

    `r` is an int for all images, which keeps shapes static, or a count for each.  Ties go to the lower index, so that
    results are reproducible (D10).  `order` is the order of the remaining tokens: unchanged (D8), or unmerged sources
    before the others (ToMe).
    """
    b, n = links.value.shape
    device = links.value.device
    if b == 0:
        return keep_all(b, n, device)
    if isinstance(r, int) and valid is None and (r <= 0 or links.most is not None):
        r = max(min(r, links.most or 0), 0)
        width = n - r
        if r == 0:
            return keep_all(b, n, device)
        slot, _ = _slots(links, r, None, order)
        return Plan(slot, torch.full((b,), width, device=device), width)
    most = links.source.sum(1) if links.room is None else links.room
    slot, kept = _slots(links, most.clamp(max=r)[:, None], valid, order)
    count = kept.sum(1)
    fewest, width = torch.stack([count.amin(), count.amax()]).tolist()
    return Plan(slot if valid is None else torch.where(valid, slot, -1), count, width, ragged=fewest != width)


def _slots(links: Links, r: int | Tensor, valid: Mask | None, order: Order) -> tuple[Slots, Mask]:
    """The slot of every token, and a mask of the tokens that are not merged into another."""
    value, n = links.value.detach(), links.value.shape[1]
    # Sources rank before all other tokens, even if their value is -inf.
    value = torch.where(links.source, value.clamp_min(torch.finfo(value.dtype).min), float("-inf"))
    by_value = value.argsort(dim=1, descending=True, stable=True)
    ranks = torch.arange(n, device=value.device).expand_as(by_value)
    rank = torch.empty_like(by_value).scatter_(1, by_value, ranks)
    merged = links.source & (rank < r)
    kept = ~merged if valid is None else valid & ~merged
    position = kept.cumsum(1) - 1
    if order == "sources_first":
        sources = kept & links.source
        others = (kept & ~links.source).cumsum(1) - 1 + sources.sum(1, keepdim=True)
        reordered = torch.where(sources, sources.cumsum(1) - 1, others)
        # An image that merges nothing keeps its order, as in ToMe: `Plan.is_identity` does not see a mere reordering.
        position = torch.where(merged.any(1, keepdim=True), reordered, position)
    return torch.where(merged, position.gather(1, links.partner), position), kept
