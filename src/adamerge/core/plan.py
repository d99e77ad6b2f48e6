"""A merge, as data: which output slot every input token goes to."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from adamerge.core.types import Counts, Features, PerToken, Slots


@dataclass(frozen=True)
class Plan:
    """One merge step: token `i` of image `b` becomes part of token `slot[b, i]`.

    Rows are left-packed: image `b` owns slots `0 .. count[b] - 1`; up to `width`, the rest is padding.
    A padding token of the input has slot -1.  `width` and `ragged` are Python values, so that a fixed
    budget never asks the device and compiles to static shapes.
    """

    slot: Slots
    count: Counts
    width: int
    ragged: bool = False

    @property
    def is_identity(self) -> bool:
        """True where no image merges anything, as far as that is known without asking the device."""
        return self.width == self.slot.shape[1] and not self.ragged

    def then(self, later: "Plan") -> "Plan":
        """This plan, then `later`, as one plan.  The history of a token is its plans chained."""
        slot = torch.where(self.slot < 0, -1, later.slot.gather(1, self.slot.clamp_min(0)))
        return Plan(slot, later.count, later.width, later.ragged)

    def after_prefix(self, prefix: int) -> "Plan":
        """The same plan for a sequence that starts with `prefix` tokens nobody merges."""
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
    """Sum a per-token number over each slot."""
    value = torch.where(plan.slot < 0, 0, value)
    return value.new_zeros(value.shape[0], plan.width).scatter_add(1, plan.slot.clamp_min(0), value)


def first(number: Slots, plan: Plan) -> Int[Tensor, "b m"]:
    """The smallest of a per-token whole number in each slot; 0 in padding."""
    start = number.new_full((number.shape[0], plan.width), torch.iinfo(number.dtype).max)
    number = torch.where(plan.slot < 0, torch.iinfo(number.dtype).max, number)
    low = start.scatter_reduce(1, plan.slot.clamp_min(0), number, "amin")
    return torch.where(low == torch.iinfo(number.dtype).max, 0, low)


def shares(plan: Plan, weight: PerToken) -> PerToken:
    """Each token's part in the average of its slot: `w_i / sum w`, so that the parts of a slot add up to 1.

    A token alone has part 1 whatever its weight (D7); a slot whose weights are all 0 is averaged plainly (D6).
    """
    at = plan.slot.clamp_min(0)
    total = tally(weight, plan).gather(1, at)
    members = tally(torch.ones_like(weight), plan).gather(1, at)
    # The inner `where` keeps 0/0 out of the backward pass as well.
    weighted = weight / torch.where(total == 0, 1, total)
    share = torch.where(members == 1, 1, torch.where(total == 0, 1 / members.clamp_min(1), weighted))
    return torch.where(plan.slot < 0, 0, share)


def fold(x: Features, plan: Plan, weight: PerToken) -> Float[Tensor, "b m d"]:
    """Average the tokens that share a slot: `y[s] = sum_i w[i] x[i] / sum_i w[i]`, accumulated in float32 or better.

    A token alone in its slot comes back bit for bit, even with weight 0.  Weight 0 in company is pruning.
    """
    b, _, d = x.shape
    part = shares(plan, weight)[..., None] * x.to(weight.dtype)
    # Padding goes to a row of its own behind all others.
    image = torch.arange(b, device=x.device)[:, None]
    row = torch.where(plan.slot < 0, b * plan.width, plan.slot + plan.width * image)
    # -0.0 is the true neutral element of addition: 0.0 would turn a lone token's -0.0 into +0.0.
    sums = part.new_full((b * plan.width + 1, d), -0.0).index_add_(0, row.flatten(), part.flatten(0, 1))
    return sums[:-1].view(b, plan.width, d).to(x.dtype)


def unfold(y: Float[Tensor, "b m d"], plan: Plan) -> Features:
    """Give every original token a copy of the token it was merged into."""
    return y.gather(1, plan.slot.clamp_min(0)[..., None].expand(-1, -1, y.shape[-1]))
