"""A merged token has the direction of the mean and the norm that its combine part defines."""

from collections.abc import Callable

import pytest
import torch
from examples import members, noise, plans, seeds, seen
from hypothesis import given

from adamerge.core.combine import Combine, KeepNorm, MeanNorm
from adamerge.core.decision import Decision
from adamerge.core.match import Links
from adamerge.core.parts import from_json, to_json
from adamerge.core.plan import Plan, fold
from adamerge.core.types import PerToken

# The length of a merged token, from its members' lengths and their shares in the average.
LENGTHS: dict[Combine, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    MeanNorm(): lambda length, share: (share * length).sum(),
    KeepNorm(): lambda length, share: length.max(),
}
PARTS = pytest.mark.parametrize("part", LENGTHS, ids=lambda part: type(part).__name__)


def combined(part: Combine, x: torch.Tensor, plan: Plan, weight: PerToken) -> torch.Tensor:
    links = Links(weight, plan.slot, plan.slot >= 0, None)
    return part(x, Decision(plan, weight, weight, links), seen(x))


@PARTS
@given(plan=plans(), seed=seeds)
def test_a_merged_token_has_the_mean_direction_and_the_promised_length(part, plan, seed):
    b, n = plan.slot.shape
    x, weight = noise(b, n, 5, seed=seed), noise(b, n, seed=seed + 1).abs() + 0.1
    out, mean = combined(part, x, plan, weight), fold(x, plan, weight)
    for image in range(b):
        for slot in range(int(plan.count[image])):
            who = members(plan, image, slot)
            if len(who) == 1:
                assert torch.equal(out[image, slot], x[image, who[0]]), "a token alone comes back bit for bit"
                continue
            share = weight[image, who] / weight[image, who].sum()
            length = LENGTHS[part](x[image, who].norm(dim=-1), share)
            torch.testing.assert_close(out[image, slot].norm(), length)
            direction = mean[image, slot] / mean[image, slot].norm()
            torch.testing.assert_close(out[image, slot], length * direction)


@PARTS
@pytest.mark.parametrize("length", [1.0, 8.0, 1e30])
def test_opposite_tokens_have_no_direction_and_become_zero(part, length):
    x = torch.tensor([[[length, 0.0], [-length, 0.0]]])
    out = combined(part, x, Plan(torch.tensor([[0, 0]]), torch.tensor([1]), 1), torch.ones(1, 2))
    assert out.tolist() == [[[0.0, 0.0]]]


@PARTS
def test_half_precision_comes_back_in_half_precision(part):
    x = (300 * noise(1, 4, 8, seed=0)).half()
    out = combined(part, x, Plan(torch.tensor([[0, 0, 1, 1]]), torch.tensor([2]), 2), torch.ones(1, 4))
    assert out.dtype == torch.float16 and out.isfinite().all()


@PARTS
def test_the_part_survives_json(part):
    assert from_json(to_json(part)) == part
