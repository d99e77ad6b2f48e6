"""Attention by matrix products: some images at once, each with the bits that it has alone."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from adamerge.runtime.packed import products
from adamerge.runtime.packed.attention import AttentionReader, attend_with_bias
from adamerge.runtime.packed.layout import Layout, ragged_layout

CPU, HALF = torch.device("cpu"), torch.bfloat16
HEADS, CHANNELS, SCALE = 4, 32, 0.2
Sides = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
# Five are near each other, two of them equal.
LENGTHS = [70, 90, 70, 77, 21, 88]


def at_once() -> bool:
    """Whether this machine computes images at once."""
    known = products.products_known(HALF)
    return known and products._same_together(8, 96, 90, HEADS, CHANNELS, HALF, torch.get_num_threads())


pytestmark = pytest.mark.skipif(not at_once(), reason="this machine computes no images at once in bfloat16")


@pytest.fixture(autouse=True)
def few_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def shapes(monkeypatch):
    """How many images and tokens are computed at once."""
    found, own = [], products._attend
    monkeypatch.setattr(
        products, "_attend", lambda sides, shape, *rest: (found.append(shape), own(sides, shape, *rest))[1]
    )
    return found


def rows(lengths: list[int]) -> tuple[Layout, Sides, torch.Tensor]:
    """A layout with unused rows, queries, keys and values beside each other, and a bias."""
    layout, random = ragged_layout([n - 1 for n in lengths], 1, CPU), torch.Generator().manual_seed(len(lengths))
    sides = torch.randn(layout.total + 3, 3, HEADS, CHANNELS, generator=random).to(HALF)
    return layout, (sides[:, 0], sides[:, 1], sides[:, 2]), torch.rand(layout.total + 3, generator=random)


def own_rows(layout: Layout, image: int) -> slice:
    return slice(*layout.bounds[image : image + 2])


@pytest.mark.parametrize("biased", [False, True])
def test_images_computed_at_once_get_the_bits_of_each_alone(shapes, biased):
    layout, sides, bias = rows(LENGTHS)
    found = attend_with_bias(*sides, layout, SCALE, bias if biased else None)
    assert (5, 96) in shapes and (1, 21) in shapes
    for image, length in enumerate(LENGTHS):
        own = own_rows(layout, image)
        single = ragged_layout([length - 1], 1, CPU)
        query, key, value = (side[own] for side in sides)
        alone = attend_with_bias(query, key, value, single, SCALE, bias[own] if biased else None)
        assert torch.equal(found[own], alone)
    assert not found[layout.total :].any()


def test_in_bfloat16_the_result_is_as_near_to_the_exact_one_as_that_of_torch(shapes):
    layout, sides, bias = rows(LENGTHS)
    found = attend_with_bias(*sides, layout, SCALE, bias.to(HALF))
    for image in range(len(LENGTHS)):
        own = own_rows(layout, image)
        q, k, v = (side[own].transpose(0, 1) for side in sides)
        added = bias[own].to(HALF)
        exact = (SCALE * q.double() @ k.double().mT + added).softmax(-1) @ v.double()
        torchs = scaled_dot_product_attention(q[None], k[None], v[None], added[None, None, None], scale=SCALE)[0]
        errors = [(each.double() - exact).square().mean().sqrt() for each in (found[own].transpose(0, 1), torchs)]
        assert errors[0] <= 1.3 * errors[1]
    assert shapes


@pytest.mark.parametrize("queries", ["class token", "all tokens"])
def test_the_attention_that_tokens_get_is_read_in_every_image(shapes, queries):
    layout, sides, bias = rows(LENGTHS)
    reader = AttentionReader(queries, torch.zeros(len(LENGTHS), 95), 1)
    attend_with_bias(*sides, layout, SCALE, bias, reader=reader)
    for image, length in enumerate(LENGTHS):
        own = own_rows(layout, image)
        q, k = (side[own].transpose(0, 1).float() for side in sides[:2])
        weights = (SCALE * q @ k.mT + bias[own]).softmax(-1)[:, :, 1:]
        expected = weights[:, 0].mean(0) if queries == "class token" else weights.sum((0, 1))
        torch.testing.assert_close(reader.received[image, : length - 1], expected)
        assert not reader.received[image, length - 1 :].any()
    assert any(images > 1 for images, _ in shapes)


def test_an_image_that_is_not_finite_changes_no_other():
    layout, sides, bias = rows(LENGTHS)
    expected = attend_with_bias(*sides, layout, SCALE, bias)
    for side in sides:
        side[own_rows(layout, 2)] = float("nan")
    found = attend_with_bias(*sides, layout, SCALE, bias)
    for image in range(len(LENGTHS)):
        own = own_rows(layout, image)
        assert torch.equal(found[own], expected[own]) == (image != 2)


def test_where_sums_depend_on_the_number_of_matrices_every_image_is_computed_alone(shapes, monkeypatch):
    own = torch.bmm

    def other_order(a, b):
        return own(a, b) if len(a) == HEADS else own(a, b) * (1 + 2**-6)

    layout, sides, bias = rows(LENGTHS)
    expected = attend_with_bias(*sides, layout, SCALE, bias)
    products._same_together.cache_clear()
    monkeypatch.setattr(torch, "bmm", other_order)
    try:
        shapes.clear()
        found = attend_with_bias(*sides, layout, SCALE, bias)
    finally:
        products._same_together.cache_clear()
    assert (5, 96) not in shapes and {length for images, length in shapes if images == 1} == {*LENGTHS}
    assert torch.equal(found, expected)
