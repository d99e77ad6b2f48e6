"""Plans merge by weighted mean, keep a token alone in its slot unchanged, and can be chained."""

import math

import pytest
import torch
from examples import after, chains, members, noise, plans, seeds
from hypothesis import given
from hypothesis import strategies as st

from adamerge.core.plan import Plan, fold, keep_all, shares, tally, unfold

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def weights(plan: Plan, seed: int) -> torch.Tensor:
    """Positive weights with some zeros among them."""
    w = noise(*plan.slot.shape, seed=seed + 1).abs()
    return torch.where(noise(*plan.slot.shape, seed=seed + 2) > 0.5, 0, w)


@given(plan=plans(), seed=seeds)
def test_folding_by_size_conserves_the_weighted_sum_of_the_tokens(plan, seed):
    x, size = noise(*plan.slot.shape, 5, seed=seed), noise(*plan.slot.shape, seed=seed + 1).abs() + 0.5
    before = torch.where(plan.slot[..., None] < 0, 0, size[..., None] * x).sum(1)
    held = torch.arange(plan.width) < plan.count[:, None]
    after_ = torch.where(held[..., None], tally(size, plan)[..., None] * fold(x, plan, size), 0).sum(1)
    torch.testing.assert_close(after_, before)


@given(plan=plans(), seed=seeds)
def test_a_folded_token_lies_between_its_members(plan, seed):
    x, weight = noise(*plan.slot.shape, 3, seed=seed), weights(plan, seed)
    y = fold(x, plan, weight)
    for image, count in enumerate(plan.count.tolist()):
        for slot in range(count):
            group = x[image, members(plan, image, slot)]
            assert (y[image, slot] >= group.amin(0) - 1e-12).all()
            assert (y[image, slot] <= group.amax(0) + 1e-12).all()


@given(plan=plans(), seed=seeds)
def test_folding_is_the_weighted_mean_written_as_a_loop(plan, seed):
    x, weight = noise(*plan.slot.shape, 2, seed=seed), weights(plan, seed)
    y = fold(x, plan, weight)
    for image, count in enumerate(plan.count.tolist()):
        for slot in range(count):
            group = members(plan, image, slot)
            total = sum(weight[image, i].item() for i in group)
            mean = sum(
                x[image, i] * (weight[image, i].item() / total if total > 0 and len(group) > 1 else 1 / len(group))
                for i in group
            )
            torch.testing.assert_close(y[image, slot], mean)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(plan=plans(), seed=seeds)
def test_a_token_alone_in_its_slot_stays_bit_identical(dtype, plan, seed):
    """D7: whatever its weight, also 0, and with the sign of zero."""
    x = noise(*plan.slot.shape, 4, seed=seed, dtype=dtype)
    x[..., 0], x[..., 1] = -0.0, torch.finfo(dtype).smallest_normal / 2
    weight = weights(plan, seed).to(torch.promote_types(dtype, torch.float32))
    y = fold(x, plan, weight)
    for image, count in enumerate(plan.count.tolist()):
        for slot in range(count):
            group = members(plan, image, slot)
            if len(group) == 1:
                assert torch.equal(y[image, slot], x[image, group[0]])
                assert torch.equal(y[image, slot].signbit(), x[image, group[0]].signbit())


@pytest.mark.parametrize("weight", [0.0, 1e-45, float("inf"), float("nan")])
def test_a_plan_that_keeps_all_changes_no_bit_whatever_the_weight(weight):
    """Weights can be NaN where an image has NaN tokens; its tokens must stay as they are (D7)."""
    x = torch.tensor([[[-0.0, 1e-40, float("inf")], [3.0, float("nan"), -2.0]]])
    y = fold(x, keep_all(1, 2, x.device), torch.full((1, 2), weight))
    assert torch.equal(y.view(torch.int32), x.view(torch.int32))


@pytest.mark.parametrize("garbage", [7.0, float("inf"), float("nan")])
def test_values_in_padding_change_no_token(garbage):
    """Padding has slot -1; neither its value nor the sign of 0 times it may leak into slot 0."""
    x = torch.tensor([[[-0.0, 2.0], [4.0, -0.0], [garbage, garbage]]])
    plan = Plan(torch.tensor([[0, 1, -1]]), torch.tensor([2]), 2)
    y = fold(x, plan, torch.ones(1, 3))
    assert torch.equal(y, x[:, :2])
    assert torch.equal(y.signbit(), x[:, :2].signbit())


@given(plan=plans(), seed=seeds)
def test_a_slot_whose_weights_are_all_zero_is_averaged_with_equal_weights(plan, seed):
    """D6."""
    x = noise(*plan.slot.shape, 3, seed=seed)
    y = fold(x, plan, torch.zeros(plan.slot.shape, dtype=x.dtype))
    for image, count in enumerate(plan.count.tolist()):
        for slot in range(count):
            torch.testing.assert_close(y[image, slot], x[image, members(plan, image, slot)].mean(0))


def test_a_token_of_weight_zero_that_shares_its_slot_is_dropped():
    x = torch.tensor([[[1.0], [100.0], [3.0]]])
    plan = Plan(torch.tensor([[0, 0, 0]]), torch.tensor([1]), 1)
    assert fold(x, plan, torch.tensor([[1.0, 0.0, 1.0]])).tolist() == [[[2.0]]]


@given(plan=plans(), seed=seeds)
def test_the_shares_of_a_slot_add_up_to_one_and_padding_has_none(plan, seed):
    share = shares(plan, weights(plan, seed))
    held = torch.arange(plan.width) < plan.count[:, None]
    torch.testing.assert_close(tally(share, plan)[held], torch.ones(int(held.sum()), dtype=share.dtype))
    assert (share[plan.slot < 0] == 0).all()
    assert (share >= 0).all()


@given(plan=plans())
def test_tally_counts_the_members_of_every_slot(plan):
    held = tally(torch.ones(plan.slot.shape), plan)
    expected = [[len(members(plan, b, s)) for s in range(plan.width)] for b in range(len(plan.slot))]
    assert held.tolist() == expected


@given(plan=plans(full=True), seed=seeds)
def test_folding_what_was_unfolded_changes_nothing(plan, seed):
    x, weight = noise(*plan.slot.shape, 3, seed=seed), weights(plan, seed)
    y = fold(x, plan, weight)
    spread = unfold(y, plan)
    held = torch.arange(plan.width) < plan.count[:, None]
    torch.testing.assert_close(fold(spread, plan, weight)[held], y[held])
    torch.testing.assert_close(unfold(fold(spread, plan, weight), plan), spread)


@given(plan=plans(), seed=seeds)
def test_unfolding_gives_every_token_the_one_it_was_merged_into(plan, seed):
    y = noise(len(plan.slot), plan.width, 3, seed=seed)
    out = unfold(y, plan)
    for image, row in enumerate(plan.slot.tolist()):
        for i, slot in enumerate(row):
            assert slot < 0 or torch.equal(out[image, i], y[image, slot])


@given(chain=chains(), seed=seeds)
def test_chained_plans_are_one_plan_from_first_to_last(chain, seed):
    first, second, third = chain
    whole = first.then(second)
    for image, row in enumerate(first.slot.tolist()):
        expected = [-1 if s < 0 else second.slot[image, s].item() for s in row]
        assert whole.slot[image].tolist() == expected
    assert (whole.count, whole.width, whole.ragged) == (second.count, second.width, second.ragged)
    left, right = first.then(second).then(third), first.then(second.then(third))
    assert torch.equal(left.slot, right.slot) and torch.equal(left.count, right.count) and left.width == right.width


@given(chain=chains(length=2), seed=seeds)
def test_folding_twice_by_size_is_folding_once_by_the_chain(chain, seed):
    first, second = chain
    x, size = noise(*first.slot.shape, 3, seed=seed), noise(*first.slot.shape, seed=seed + 1).abs() + 0.1
    twice = fold(fold(x, first, size), second, tally(size, first))
    held = torch.arange(second.width) < second.count[:, None]
    torch.testing.assert_close(fold(x, first.then(second), size)[held], twice[held])


@given(data=st.data())
def test_a_chain_of_plans_uses_the_slots_below_the_count_and_no_other(data):
    first = data.draw(plans())
    second = after(first, data.draw)
    whole = first.then(second)
    for row, count in zip(whole.slot.tolist(), whole.count.tolist(), strict=True):
        assert {s for s in row if s >= 0} == set(range(count))


@given(plan=plans(), prefix=st.integers(0, 3), seed=seeds)
def test_prefix_tokens_come_first_and_stay_unchanged(plan, prefix, seed):
    x, weight = noise(len(plan.slot), prefix + plan.slot.shape[1], 2, seed=seed), weights(plan, seed)
    shifted = plan.after_prefix(prefix)
    ones = torch.ones(len(weight), prefix, dtype=weight.dtype)
    y = fold(x, shifted, torch.cat([ones, weight], 1))
    assert torch.equal(y[:, :prefix], x[:, :prefix])
    held = torch.arange(plan.width) < plan.count[:, None]
    torch.testing.assert_close(y[:, prefix:][held], fold(x[:, prefix:], plan, weight)[held])
    assert (shifted.count - plan.count).tolist() == [prefix] * len(plan.slot)
    assert (shifted.slot[:, prefix:] < 0).equal(plan.slot < 0)


def test_only_a_plan_without_merges_or_padding_is_the_identity():
    assert keep_all(2, 3, torch.device("cpu")).is_identity
    assert not Plan(torch.tensor([[0, 1, 1]]), torch.tensor([2]), 2).is_identity
    assert not Plan(torch.tensor([[0, 1, 2], [0, 1, 1]]), torch.tensor([3, 2]), 3, ragged=True).is_identity


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_folding_adds_up_in_float32(dtype):
    """4096 tokens of 1/3 in half precision would drift; their mean must not."""
    x = torch.full((1, 4096, 1), 1 / 3, dtype=dtype)
    plan = Plan(torch.zeros(1, 4096, dtype=torch.long), torch.tensor([1]), 1)
    assert fold(x, plan, torch.ones(1, 4096)).item() == pytest.approx(x[0, 0, 0].item(), rel=1e-6)


@given(plan=plans(), seed=seeds)
def test_the_gradient_of_folding_is_that_of_the_weighted_mean(plan, seed):
    x = noise(*plan.slot.shape, 2, seed=seed).requires_grad_()
    weight = (noise(*plan.slot.shape, seed=seed + 1).abs() + 0.1).requires_grad_()
    assert torch.autograd.gradcheck(lambda a, w: fold(a, plan, w), (x, weight))


def test_the_gradient_is_finite_where_all_weights_are_zero():
    x, weight = noise(1, 3, 2, seed=0).requires_grad_(), torch.zeros(1, 3, dtype=torch.float64, requires_grad=True)
    fold(x, Plan(torch.tensor([[0, 0, 1]]), torch.tensor([2]), 2), weight).square().sum().backward()
    assert x.grad is not None and weight.grad is not None
    assert x.grad.isfinite().all() and weight.grad.isfinite().all()
    assert math.isclose(x.grad[0, 0].abs().sum().item(), x.grad[0, 1].abs().sum().item())


@pytest.mark.parametrize("least", [1e-44, 1e-40, 1e-38, 1e-30, 1e-20])
def test_the_gradient_is_finite_where_all_weights_of_a_slot_are_tiny(least):
    """The gradient of a share has the factor 1 / total, which overflows for salience that softmax made almost 0."""
    x = noise(1, 3, 2, seed=0, dtype=torch.float32).requires_grad_()
    weight = torch.tensor([[least, 2 * least, 1.0]], requires_grad=True)
    (1e6 * fold(x, Plan(torch.tensor([[0, 0, 1]]), torch.tensor([2]), 2), weight)).square().sum().backward()
    assert x.grad is not None and weight.grad is not None
    assert x.grad.isfinite().all() and weight.grad.isfinite().all()
    assert x.grad[0, 1].abs().sum() > x.grad[0, 0].abs().sum() > 0, "tokens get their share of the gradient"


def test_folded_tokens_are_on_the_device_of_the_tokens():
    plan = Plan(torch.tensor([[0, 1, 0], [0, 1, 1]], device="meta"), torch.tensor([2, 2], device="meta"), 2)
    x = torch.zeros(2, 3, 4, device="meta")
    assert fold(x, plan, torch.ones(2, 3, device="meta")).device.type == "meta"
