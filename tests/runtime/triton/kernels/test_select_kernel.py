"""The selection of links on the device is that of `core.select`, and what the merge kernel reads agrees with it."""

import pytest
import torch
from awkward import DEVICE, layout, noise
from torch import Tensor

from adamerge.core import select as core
from adamerge.core.match import Links
from adamerge.core.plan import tally
from adamerge.runtime.packed.layout import Layout, pad
from adamerge.runtime.triton.kernels.merge import merge
from adamerge.runtime.triton.kernels.select import PaddedLinks, select


def links_of(where: Layout) -> tuple[Links, Tensor]:
    """Random links from about half of the tokens to the others, some with equal values, and who exists."""
    b, n = where.images, where.most
    place = torch.arange(n, device=DEVICE)
    valid = place < where.patches[:, None]
    target = valid & ((place % 3 == 1) | (place == 0))
    source = valid & ~target
    # Every source goes to the nearest target before it.
    partner = torch.where(target, place, 0).cummax(1).values
    value = (noise(b, n) * 2).round() / 2
    return Links(value, partner, source, None), valid


def chosen(links: Links, where: Layout, merges: int | Tensor, order: str, weight: Tensor | None):
    salience = noise(where.images, where.most, seed=4).abs()
    padded = PaddedLinks(links.value, links.partner, links.source, salience, weight)
    history = torch.arange(where.most, device=DEVICE).minimum(where.patches[:, None] - 1).clamp_min(0).int()
    return select(padded, merges, history, where, sources_first=order == "sources_first"), salience, history


@pytest.mark.parametrize("order", ["kept", "sources_first"])
@pytest.mark.parametrize(
    "name, merges", [("one", 1), ("edges", "different"), ("no prefix", 2**31), ("registers", 3), ("vit", "different")]
)
def test_the_plan_is_that_of_the_reference(name, merges, order):
    where = layout(name)
    links, valid = links_of(where)
    if merges == "different":
        merges = torch.arange(where.images, device=DEVICE) * 5
    plan = core.select(links, merges, valid, order)
    weight = noise(where.images, where.most, seed=3).abs()
    choice, salience, history = chosen(links, where, merges, order, weight)
    assert torch.equal(choice.count.long(), plan.count)
    assert torch.equal(pad(choice.slot.long(), where, where.most, -1), plan.slot)
    assert torch.equal(choice.history.long(), plan.slot.gather(1, history.long()))
    torch.testing.assert_close(choice.redundancy, links.redundancy)
    for found, given in ((choice.weight, weight), (choice.salience, salience)):
        assert torch.equal(pad(found, where, where.most), torch.where(valid, given, 0))

    x, size = noise(where.total, 32), noise(where.total, seed=1).abs().mul(3).ceil()
    y, _, new_size, _, offsets = merge(x, size, where, choice)
    for image in range(where.images):
        old, new, count = int(where.offsets[image]) + where.prefix, int(offsets[image]), int(plan.count[image])
        n, slot = int(where.patches[image]), plan.slot[image, : int(where.patches[image])]
        shared = torch.zeros(count, n, device=DEVICE)
        shared[slot, torch.arange(n, device=DEVICE)] = weight[image, :n]
        mean = shared @ x[old : old + n] / shared.sum(1, keepdim=True)
        found = y[new + where.prefix : new + where.prefix + count]
        torch.testing.assert_close(found, mean, rtol=1e-4, atol=1e-5)
    sizes = tally(pad(size, where, where.most), plan)
    assert float(new_size[: int(offsets[-1])].sum()) == float(size.sum()) and sizes.sum() <= size.sum()


def test_where_tokens_are_dropped_only_those_that_stay_weigh():
    where = layout("edges")
    links, valid = links_of(where)
    choice, *_ = chosen(links, where, 4, "kept", None)
    plan = core.select(links, 4, valid, "kept")
    merged = links.source & (plan.slot == plan.slot.gather(1, links.partner))
    assert merged.any()
    assert torch.equal(pad(choice.weight, where, where.most) > 0, valid & ~merged)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # The interpreter's arithmetic is numpy's, which warns.
def test_values_that_are_no_numbers_merge_first_as_in_the_reference():
    where = layout("edges")
    links, valid = links_of(where)
    links.value[0, 2:9:3] = float("nan")
    links.value[0, 3] = float("-inf")
    choice, *_ = chosen(links, where, 9, "kept", None)
    assert torch.equal(pad(choice.slot.long(), where, where.most, -1), core.select(links, 9, valid).slot)


def test_a_batch_without_images_has_no_choice():
    where = Layout(torch.zeros(1, dtype=torch.int32, device=DEVICE), 1, 0, 1, uniform=True)
    nothing = torch.zeros(0, 0, device=DEVICE)
    links = PaddedLinks(nothing, nothing.long(), nothing.bool(), nothing, None)
    choice = select(links, 3, torch.zeros(0, 4, dtype=torch.int32, device=DEVICE), where, sources_first=True)
    assert choice.count.shape == (0,) and choice.history.shape == (0, 4)
