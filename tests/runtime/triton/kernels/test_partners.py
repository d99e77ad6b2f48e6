"""Every source finds the partner that torch finds."""

import pytest
import torch
from awkward import DEVICE, LENGTHS, layout, noise, sources

from adamerge.runtime.triton.kernels.match import Split, match, match_reference
from adamerge.runtime.triton.kernels.mean_key_unit import mean_key_unit, mean_key_unit_reference

SPLITS = [Split(False), Split(True, 0), Split(True, 1, half=True)]


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("name", LENGTHS)
def test_best_partner(name, split):
    where = layout(name)
    features = mean_key_unit(noise(where.total, 3, 32))
    value, partner = match(features, where, split)
    expected, expected_partner = match_reference(features.cpu(), where, split)
    mask = sources(where, split)
    torch.testing.assert_close(value[mask].cpu(), expected[mask.cpu()], rtol=0, atol=1e-6)
    assert torch.equal(partner[mask].cpu(), expected_partner[mask.cpu()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_features_of_any_length_are_compared_by_their_directions(dtype):
    where, split = layout("vit"), SPLITS[2]
    x = noise(where.total, 96, dtype=dtype) * (1 + torch.arange(where.total, device=DEVICE)[:, None] % 5).to(dtype)
    value, partner = match(x, where, split, inverse=1 / x.float().norm(dim=1))
    unit = torch.nn.functional.normalize(x.float(), dim=1).cpu()
    expected, expected_partner = match_reference(unit, where, split)
    mask = sources(where, split)
    torch.testing.assert_close(value[mask].cpu(), expected[mask.cpu()], rtol=0, atol=1e-6)
    assert torch.equal(partner[mask].cpu(), expected_partner[mask.cpu()])


def test_ties_go_to_the_lower_place():
    where = layout("edges")
    features = torch.ones_like(mean_key_unit(noise(where.total, 1, 32))) / 32**0.5
    for split in SPLITS:
        _, partner = match(features, where, split)
        _, expected = match_reference(features.cpu(), where, split)
        mask = sources(where, split)
        assert torch.equal(partner[mask].cpu(), expected[mask.cpu()])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # The interpreter's arithmetic is numpy's, which warns.
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_a_source_that_is_not_a_number_gets_the_first_target(split):
    where = layout("edges")
    features = torch.full_like(mean_key_unit(noise(where.total, 1, 32)), float("nan"))
    _, partner = match(features, where, split)
    _, expected = match_reference(features.cpu(), where, split)
    mask = sources(where, split)
    assert torch.equal(partner[mask].cpu(), expected[mask.cpu()])


@pytest.mark.parametrize("heads, dim", [(1, 32), (3, 64), (2, 80)])
@pytest.mark.parametrize("dtype, finest", [(torch.float32, 1e-6), (torch.bfloat16, 2**-11)])
def test_directions(heads, dim, dtype, finest):
    """Those of bfloat16 keys are rounded to 11 bits, three more than the keys have."""
    key = noise(21, heads, dim, dtype=dtype)
    torch.testing.assert_close(mean_key_unit(key).float(), mean_key_unit_reference(key), rtol=finest, atol=finest / 16)


@pytest.mark.parametrize("name", LENGTHS)
def test_partners_by_keys_of_half_precision(name):
    where = layout(name)
    features = mean_key_unit(noise(where.total, 3, 64, dtype=torch.bfloat16))
    value, partner = match(features, where, SPLITS[2])
    expected, expected_partner = match_reference(features.float().cpu(), where, SPLITS[2])
    mask = sources(where, SPLITS[2])
    torch.testing.assert_close(value[mask].cpu(), expected[mask.cpu()], rtol=0, atol=1e-6)
    assert torch.equal(partner[mask].cpu(), expected_partner[mask.cpu()])


def test_directions_of_rows_after_the_last_are_not_written():
    key = noise(40, 2, 32)
    counted = torch.tensor([21], dtype=torch.int32, device=DEVICE)
    torch.testing.assert_close(
        mean_key_unit(key, counted)[:21], mean_key_unit_reference(key)[:21], rtol=1e-5, atol=1e-6
    )
