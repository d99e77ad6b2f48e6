"""A merged token keeps the length of its members."""

import torch
from examples import members, noise, plans, seeds, seen
from hypothesis import given

from adamerge.core.combine import MeanNorm
from adamerge.core.match import Links
from adamerge.core.parts import from_json, to_json
from adamerge.core.plan import Plan, fold
from adamerge.core.recipe import Decision
from adamerge.core.types import PerToken


def combined(x: torch.Tensor, plan: Plan, weight: PerToken) -> torch.Tensor:
    links = Links(weight, plan.slot, plan.slot >= 0, None)
    return MeanNorm()(x, Decision(plan, weight, weight, links), seen(x))


@given(plan=plans(), seed=seeds)
def test_a_merged_token_has_the_mean_direction_and_the_mean_length(plan, seed):
    b, n = plan.slot.shape
    x, weight = noise(b, n, 5, seed=seed), noise(b, n, seed=seed + 1).abs() + 0.1
    out, mean = combined(x, plan, weight), fold(x, plan, weight)
    for image in range(b):
        for slot in range(int(plan.count[image])):
            who = members(plan, image, slot)
            if len(who) == 1:
                assert torch.equal(out[image, slot], x[image, who[0]]), "a token alone comes back bit for bit"
                continue
            share = weight[image, who] / weight[image, who].sum()
            length = (share * x[image, who].norm(dim=-1)).sum()
            torch.testing.assert_close(out[image, slot].norm(), length)
            direction = mean[image, slot] / mean[image, slot].norm()
            torch.testing.assert_close(out[image, slot], length * direction)


def test_opposite_tokens_have_no_direction_and_become_nothing():
    x = torch.tensor([[[1.0, 0.0], [-1.0, 0.0]]])
    out = combined(x, Plan(torch.tensor([[0, 0]]), torch.tensor([1]), 1), torch.ones(1, 2))
    assert out.isfinite().all()


def test_half_precision_comes_back_in_half_precision():
    x = (300 * noise(1, 4, 8, seed=0)).half()
    out = combined(x, Plan(torch.tensor([[0, 0, 1, 1]]), torch.tensor([2]), 2), torch.ones(1, 4))
    assert out.dtype == torch.float16 and out.isfinite().all()


def test_the_part_survives_json():
    assert from_json(to_json(MeanNorm())) == MeanNorm()
