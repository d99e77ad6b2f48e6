"""The ragged road in plain torch gives the reference's numbers, and its layouts are what they say."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from models.families import FAMILIES, RECIPES, build, pictures

import adamerge
from adamerge.runtime.ragged import even, pad, uneven

CPU = torch.device("cpu")


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_same_plans_same_outputs(family, recipe):
    model, images = build(family), pictures(4)
    chosen = RECIPES[recipe](model, images)
    with torch.inference_mode():
        expected = adamerge.apply(model, chosen, "reference")(images)
        before = adamerge.trace(model)
        found = adamerge.apply(model, chosen, "packed")(images)
    after = adamerge.trace(model)
    assert torch.equal(before.r, after.r) and torch.equal(before.slots(), after.slots())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(after.layers, before.layers, strict=True):
        torch.testing.assert_close(ours.redundancy, theirs.redundancy, rtol=1e-4, atol=1e-5)


@given(some.lists(some.integers(0, 9), min_size=1, max_size=5), some.integers(0, 3))
def test_padding_finds_every_patch_and_no_prefix(counts, prefix):
    where = uneven(counts, prefix, CPU)
    assert where.total == sum(counts) + prefix * len(counts) and where.longest == max(counts) + prefix
    assert where.patches.tolist() == counts and where.uniform == (len(set(counts)) == 1)
    rows = pad(torch.arange(where.total), where, where.most, -1)
    for image, count in enumerate(counts):
        begin = int(where.offsets[image]) + prefix
        assert rows[image].tolist() == [*range(begin, begin + count), *[-1] * (where.most - count)]


def test_even_images_are_a_special_case():
    assert torch.equal(even(3, 5, 1, CPU).offsets, uneven([4, 4, 4], 1, CPU).offsets)
