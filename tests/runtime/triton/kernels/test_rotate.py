"""Queries and keys are turned by the first patch that their token stands for."""

import pytest
import torch
from awkward import DEVICE, LENGTHS, layout, noise
from torch import Tensor

from adamerge.core.errors import BadOption
from adamerge.runtime.block_view import Rotation
from adamerge.runtime.packed.layout import Layout, uniform_layout
from adamerge.runtime.triton.kernels.rotate import (
    rotate,
    rotate_reference,
    token_places,
    token_places_reference,
)

PATCHES = 31


def random_history(where: Layout, patches: int) -> Tensor:
    """Every token has at least one patch where there are enough of them."""
    random = torch.rand(where.images, patches, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    counts = where.patches[:, None].clamp_min(1)
    order = random.argsort(1)
    return (order % counts).int()


def random_places(where: Layout, patches: int) -> Tensor:
    """Places in the table, before it and after it."""
    random = torch.rand(where.total, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    return (random * (patches + 8)).int() - 4


def tables(dim: int, *, heads: int = 0, interleaved: bool = False, dtype: torch.dtype = torch.float32) -> Rotation:
    """Different angles for both channels of a pair, so that it matters which row goes where."""
    shape = (heads, PATCHES, dim) if heads else (PATCHES, dim)
    angle = noise(*shape, seed=2)
    return Rotation(angle.cos().to(dtype), angle.sin().to(dtype), interleaved)


@pytest.mark.parametrize("name", [name for name in LENGTHS if name != "one"])
def test_a_place_is_the_first_patch_of_its_token(name):
    where = layout(name)
    history = random_history(where, 1400 if name == "large" else 250)
    place = token_places(history, where)
    assert torch.equal(place, token_places_reference(history, where))
    for image, begin in enumerate(where.offsets[:-1].tolist()):
        assert (place[begin : begin + where.prefix] == -1).all()
        for token in range(int(where.patches[image])):
            first = int((history[image] == token).nonzero()[0])
            assert place[begin + where.prefix + token] == first


def test_unused_rows_have_no_place():
    where = layout("edges")
    history = random_history(where, 40)
    longer = Layout(where.offsets, where.prefix, where.total + 3000, where.longest)
    place = token_places(history, longer)
    assert torch.equal(place[: where.total], token_places_reference(history, where))
    assert (place[where.total :] == -1).all()


def test_before_the_first_merge_every_patch_has_its_own_place():
    where = uniform_layout(3, 12, 2, DEVICE)
    history = torch.arange(10, dtype=torch.int32, device=DEVICE).repeat(3, 1)
    assert token_places(history, where).tolist() == [-1, -1, *range(10)] * 3


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("heads", [0, 3], ids=["one table", "a table for each head"])
@pytest.mark.parametrize("dim", [6, 64, 80])
def test_rotated_is_that_of_plain_torch(dim, heads, interleaved):
    where = layout("registers")
    x, place = noise(where.total, 3, dim), random_places(where, PATCHES)
    rotation = tables(dim, heads=heads, interleaved=interleaved)
    expected = rotate_reference(x, place, rotation)
    torch.testing.assert_close(rotate(x, place, rotation), expected, rtol=1e-6, atol=1e-6)
    kept = (place < 0) | (place >= PATCHES)
    assert 0 < kept.sum() < len(place)
    assert torch.equal(rotate(x, place, rotation)[kept], x[kept])
    assert not torch.isclose(expected[~kept], x[~kept]).all()


def test_one_pair_by_hand():
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]], device=DEVICE)
    cos = torch.tensor([[10.0, 20.0, 30.0, 40.0]], device=DEVICE)
    sin = torch.tensor([[0.1, 0.2, 0.3, 0.4]], device=DEVICE)
    place = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    halves = rotate(x, place, Rotation(cos, sin, interleaved=False))
    torch.testing.assert_close(halves.flatten().tolist(), [10 - 0.3, 40 - 0.8, 90 + 0.3, 160 + 0.8])
    pairs = rotate(x, place, Rotation(cos, sin, interleaved=True))
    torch.testing.assert_close(pairs.flatten().tolist(), [10 - 0.2, 40 + 0.2, 90 - 1.2, 160 + 1.2])


@pytest.mark.parametrize("heads", [0, 3], ids=["one table", "a table for each head"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_queries_and_keys_are_turned_in_the_memory_of_their_product(interleaved, heads):
    where = layout("vit")
    product, place = noise(where.total, 3 * 3 * 32), random_places(where, PATCHES)
    before = product.clone()
    rotation = tables(32, heads=heads, interleaved=interleaved)
    both = product[:, : 2 * 3 * 32].unflatten(1, (6, 32))
    assert rotate(both, place, rotation, in_place=True) is both
    query, key, value = product.unflatten(1, (3, 3, 32)).unbind(1)
    old_query, old_key, old_value = before.unflatten(1, (3, 3, 32)).unbind(1)
    torch.testing.assert_close(query, rotate_reference(old_query, place, rotation), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(key, rotate_reference(old_key, place, rotation), rtol=1e-6, atol=1e-6)
    assert torch.equal(value, old_value)


@pytest.mark.parametrize("kind", ["transposed", "strided tables", "tables laid differently"])
def test_any_strides(kind):
    where = layout("edges")
    place, x, rotation = random_places(where, PATCHES), noise(where.total, 3, 32), tables(32)
    expected = rotate_reference(x, place, rotation)
    if kind == "transposed":
        x = x.permute(2, 1, 0).contiguous().permute(2, 1, 0)
        assert x.stride(2) != 1
    elif kind == "strided tables":
        both = torch.cat([rotation.sin, rotation.cos], -1)
        rotation = Rotation(both[:, 32:], both[:, :32], interleaved=False)
    else:
        rotation = Rotation(rotation.cos, rotation.sin.mT.contiguous().mT, interleaved=False)
    torch.testing.assert_close(rotate(x, place, rotation), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("table", [torch.float32, torch.float16])
def test_half_precision_is_rounded_once(table):
    where = layout("edges")
    x, place = noise(where.total, 3, 32, dtype=torch.float16), random_places(where, PATCHES)
    rotation = tables(32, dtype=table)
    found = rotate(x, place, rotation)
    assert found.dtype == torch.float16
    exact = rotate_reference(x.double().float(), place, rotation)
    torch.testing.assert_close(found, exact.half(), rtol=1e-3, atol=1e-6)


def test_a_batch_without_images():
    where = uniform_layout(0, 5, 1, DEVICE)
    place = token_places(torch.empty((0, 4), dtype=torch.int32, device=DEVICE), where)
    assert place.shape == (0,)
    assert rotate(torch.empty((0, 3, 32), device=DEVICE), place, tables(32)).shape == (0, 3, 32)


@pytest.mark.parametrize("shape", [(PATCHES, 16), (2, PATCHES, 32)])
def test_tables_that_do_not_fit_are_refused(shape, unchecked):
    where = layout("edges")
    table = torch.ones(shape, device=DEVICE)
    with pytest.raises(BadOption, match=r"must be \(patches, 32\) or \(heads, patches, 32\), with a number of heads"):
        rotate(noise(where.total, 3, 32), random_places(where, PATCHES), Rotation(table, table, interleaved=False))
