"""A merge as data: `Plan` says which output slot each token goes to, `fold` and `unfold` apply it."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from adamerge.core.types import Counts, Features, PerToken, Slots


@dataclass(frozen=True)
class Plan:
    """One merge step: token `i` of image `b` becomes part of token `slot[b, i]`.

    Image `b` has slots `0 .. count[b] - 1`; the slots from there to `width` are padding.  Padding in the input has slot
    -1.  `ragged` says whether the counts of the images may differ.  `width` and `ragged` are Python values, so that a
    fixed budget needs no synchronisation with the device and compiles to static shapes.
    """

    slot: Slots
    count: Counts
    width: int
    ragged: bool = False

    @property
    def is_identity(self) -> bool:
        """True if no image merges anything, as far as that is known without synchronising with the device."""
        return self.width == self.slot.shape[1] and not self.ragged

    def then(self, later: "Plan") -> "Plan":
        """This plan followed by `later`, as one plan."""
        slot = torch.where(self.slot < 0, -1, later.slot.gather(1, self.slot.clamp_min(0)))
        return Plan(slot, later.count, later.width, later.ragged)

    def padded_to(self, width: int) -> "Plan":
        """The same merge with `width` slots for each image, as far as there are so many tokens; the rest is padding."""
        width = min(width, self.slot.shape[1])
        return self if width <= self.width else Plan(self.slot, self.count, width, ragged=True)

    def after_prefix(self, prefix: int) -> "Plan":
        """The same plan for sequences that start with `prefix` tokens, which stay unmerged."""
        if prefix == 0:
            return self
        head = torch.arange(prefix, device=self.slot.device).expand(self.slot.shape[0], prefix)
        slot = torch.where(self.slot < 0, -1, self.slot + prefix)
        return Plan(torch.cat([head, slot], 1), self.count + prefix, self.width + prefix, self.ragged)


def keep_all(b: int, n: int, device: torch.device) -> Plan:
    """The plan that merges nothing."""
    slot = torch.arange(n, device=device).expand(b, n)
    return Plan(slot, torch.full((b,), n, device=device), n)


def tally(value: PerToken, plan: Plan) -> Float[Tensor, "b m"]:
    """The sum of a per-token value over each slot; 0 in padding."""
    value = torch.where(plan.slot < 0, 0, value)
    return value.new_zeros(value.shape[0], plan.width).scatter_add(1, plan.slot.clamp_min(0), value)


def first(number: Slots, plan: Plan) -> Int[Tensor, "b m"]:
    """The smallest of a per-token integer in each slot; 0 in padding."""
    start = number.new_full((number.shape[0], plan.width), torch.iinfo(number.dtype).max)
    number = torch.where(plan.slot < 0, torch.iinfo(number.dtype).max, number)
    low = start.scatter_reduce(1, plan.slot.clamp_min(0), number, "amin")
    return torch.where(low == torch.iinfo(number.dtype).max, 0, low)


def shares(plan: Plan, weight: PerToken) -> PerToken:
    """Each token's share in the average of its slot, `w_i / sum w`; the shares of a slot add up to 1.

    A token alone in its slot has share 1, whatever its weight (D7).  If all weights of a slot are 0, its tokens have
    equal shares (D6).
    """
    at = plan.slot.clamp_min(0)
    total = tally(weight, plan).gather(1, at)
    members = tally(torch.ones_like(weight), plan).gather(1, at)
    # The inner `where` avoids 0/0, whose gradient is not finite even where the outer one discards it.
    divisor = torch.where(total == 0, 1, total)
    weighted = _without_steep_gradients(weight, total) / _without_steep_gradients(divisor, total)
    share = torch.where(members == 1, 1, torch.where(total == 0, 1 / members.clamp_min(1), weighted))
    return torch.where(plan.slot < 0, 0, share)


def _without_steep_gradients(value: PerToken, total: PerToken) -> PerToken:
    """`value`, as a constant where `total` is so small that the gradient of a division by it can overflow.

    Salience can be as small as 1e-40; the gradient of such a share has a factor of 1e40.
    """
    if not value.requires_grad:
        return value
    return torch.where(total.abs() < torch.finfo(total.dtype).tiny ** 0.5, value.detach(), value)


def fold(x: Features, plan: Plan, weight: PerToken) -> Float[Tensor, "b m d"]:
    """Average the tokens that share a slot: `y[s] = sum_i w[i] x[i] / sum_i w[i]`, accumulated in float32 or better.

    A token alone in its slot stays bit-identical, even with weight 0.  A token of weight 0 that shares its slot is
    dropped.
    """
    b, _, d = x.shape
    part = shares(plan, weight)[..., None] * x.to(weight.dtype)
    # Padding is added to one extra row at the end, which is cut off.
    image = torch.arange(b, device=x.device)[:, None]
    row = torch.where(plan.slot < 0, b * plan.width, plan.slot + plan.width * image)
    # Start at -0.0: adding to 0.0 would turn the -0.0 of a token alone in its slot into +0.0.
    sums = part.new_full((b * plan.width + 1, d), -0.0).index_add_(0, row.flatten(), part.flatten(0, 1))
    return sums[:-1].view(b, plan.width, d).to(x.dtype)


def unfold(y: Float[Tensor, "b m d"], plan: Plan) -> Features:
    """Every original token gets a copy of the token it was merged into: `(b, m, d)` -> `(b, n, d)`."""
    return y.gather(1, plan.slot.clamp_min(0)[..., None].expand(-1, -1, y.shape[-1]))
