"""Column sums and partners from one pass over the tokens are those of the whole affinity matrix."""

from itertools import pairwise, product

import pytest
import torch
from awkward import DEVICE, LENGTHS, layout, noise, sources
from marks import mostly_slow

from adamerge.runtime.packed.layout import Layout, ragged_layout
from adamerge.runtime.triton.kernels.affinity import affinity, affinity_reference
from adamerge.runtime.triton.kernels.affinity_one_program import affinity_one_program, worthwhile
from adamerge.runtime.triton.kernels.affinity_row_resident import affinity_row_resident, fits_registers
from adamerge.runtime.triton.kernels.match import Split
from adamerge.runtime.triton.kernels.residual import add

PAIRS = list(product(["dot", "cosine"], [Split(False), Split(True, 0), Split(True, 1)]))


def summed(parts: torch.Tensor, rows: int, where: Layout) -> torch.Tensor:
    """The sums of an image's parts."""
    sums = torch.zeros(where.total, device=parts.device)
    bounds = where.offsets.tolist()
    for begin, end in pairwise(bounds):
        base = begin + where.prefix
        sums[base:end] = parts[: -(-(end - base) // rows), base:end].sum(0)
    return sums


def inverses(x: torch.Tensor) -> torch.Tensor:
    """One over the length of each token."""
    inverse = add(x, None, inverse=True)[2]
    assert inverse is not None
    return inverse


@pytest.mark.parametrize("kind", ["dot", "scaled", "cosine"])
@pytest.mark.parametrize("name, width", [(name, 96) for name in LENGTHS] + [("registers", 1280), ("edges", 200)])
@pytest.mark.parametrize("dtype, together", [(torch.float32, False), (torch.float16, False), (torch.float16, True)])
def test_salience_and_partner(name, width, kind, dtype, together, monkeypatch):
    where, split = layout(name), Split(kind == "scaled", 1)
    fits = together and where.longest - where.prefix <= 256
    monkeypatch.setattr("adamerge.runtime.triton.kernels.affinity.worthwhile", lambda *_: fits)
    x = noise(where.total, width, dtype=dtype) * 0.3
    inverse = None if name == "vit" else inverses(x)
    check(x, inverse, where, split, kind)


@pytest.mark.parametrize("split", [Split(False), Split(True, 0), Split(True, 1)], ids=str)
@pytest.mark.parametrize("kind", ["dot", "cosine"])
def test_one_program_an_image_at_the_edges_of_its_quadrants(kind, split):
    where = ragged_layout([1, 2, 127, 128, 129, 192, 193, 256], 1, DEVICE)
    x = noise(where.total, 96, dtype=torch.float16) * 0.3
    assert worthwhile(x, where) or DEVICE.type == "cuda"
    check(x, None, where, split, kind, affinity_one_program(x, where, split, 1.0, kind == "cosine"))


@pytest.mark.parametrize(
    "kind, split", mostly_slow(PAIRS, [("dot", Split(False)), ("cosine", Split(True, 1))]), ids=str
)
def test_held_rows_at_the_edges_of_their_tiles(kind, split):
    where = ragged_layout([1, 64, 257, 384, 385, 512, 513, 576, 577, 640], 1, DEVICE)
    x = noise(where.total, 96, dtype=torch.float16) * 0.3
    assert fits_registers(x, where)
    check(x, inverses(x), where, split, kind)


def test_a_source_unlike_all_targets_gets_one_of_them_and_not_what_is_behind_the_last():
    """All products with targets are negative; one with nothing would be 0."""
    where, split = ragged_layout([257, 258], 1, DEVICE), Split(True, 1)
    sign = torch.where(sources(where, split), 1, -1)[:, None]
    x = noise(where.total, 96, dtype=torch.float16).abs() * 0.3 * sign
    assert fits_registers(x, where)
    check(x, inverses(x), where, split, "dot")


@pytest.mark.parametrize("longest", mostly_slow([257, 384, 400, 513, 576], [257, 400]))
def test_rows_are_the_same_in_a_batch_with_a_longer_image(longest):
    """The tiles of an image do not depend on the longest image of the batch."""
    alone, among = ragged_layout([longest], 1, DEVICE), ragged_layout([longest, 640], 1, DEVICE)
    x = noise(among.total, 96, dtype=torch.float16) * 0.3
    inverse, split = inverses(x), Split(True, 1)
    one = affinity_row_resident(x[: alone.total], inverse[: alone.total], alone, split, 1.0, cosine=False)
    both = affinity_row_resident(x, inverse, among, split, 1.0, cosine=False)
    assert torch.equal(summed(*one[:2], alone), summed(*both[:2], among)[: alone.total])
    mask = sources(alone, split)
    assert all(torch.equal(a[mask], b[: alone.total][mask]) for a, b in zip(one[2:], both[2:], strict=True))


@pytest.mark.parametrize("kind", ["dot", "cosine"])
def test_rows_too_long_to_be_held_take_two_passes(kind):
    where = ragged_layout([641, 3], 1, DEVICE)
    x = noise(where.total, 96, dtype=torch.float16) * 0.3
    assert not fits_registers(x, where)
    check(x, None, where, Split(True, 1), kind)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # The interpreter's arithmetic is numpy's, which warns.
@pytest.mark.parametrize("broken", mostly_slow([0, 1, 2], [1]))
def test_a_broken_image_spoils_no_other_that_is_held(broken):
    def rows(x, where, split):
        parts, height, value, partner = affinity_row_resident(x, inverses(x), where, split, 1.0, cosine=False)
        return summed(parts, height, where)[None], height, value, partner

    spoils_no_other(rows, [300, 40, 540], broken)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # The interpreter's arithmetic is numpy's, which warns.
@pytest.mark.parametrize("broken", [0, 1, 2, 3])
def test_a_broken_image_spoils_no_other(broken):
    spoils_no_other(
        lambda x, where, split: affinity_one_program(x, where, split, 1.0, False), [40, 150, 100, 196], broken
    )


def spoils_no_other(affine, counts, broken):
    where, split = ragged_layout(counts, 1, DEVICE), Split(False)
    x = noise(where.total, 96, dtype=torch.float16) * 0.3
    begin, end = where.offsets[broken : broken + 2].tolist()
    others = torch.ones(where.total, dtype=torch.bool, device=DEVICE)
    others[begin:end] = False
    others[where.offsets[:-1].long()] = False
    spoiled = x.clone()
    spoiled[begin:end] = float("nan")
    clean, dirty = (affine(features, where, split) for features in (x, spoiled))
    assert torch.equal(clean[0][0][others], dirty[0][0][others])
    mask = others & sources(where, split)
    assert torch.equal(clean[2][mask], dirty[2][mask]) and torch.equal(clean[3][mask], dirty[3][mask])
    assert dirty[3][sources(where, split)].max() < max(counts) and dirty[3][sources(where, split)].min() >= 0


def test_few_images_or_large_ones_are_cut_into_blocks():
    processors = 2 if DEVICE.type == "cpu" else torch.cuda.get_device_properties(DEVICE).multi_processor_count
    many, large, few = ([7] * processors, [257] * processors, [7] * ((processors - 1) // 2))

    def together(counts, dtype=torch.float16):
        where = ragged_layout(counts, 1, DEVICE)
        return worthwhile(noise(where.total, 32, dtype=dtype), where)

    assert together(many) and not together(many, torch.float32)
    assert not together(large) and not together(few)


def test_single_precision_short_rows_and_long_ones_are_not_held():
    def fits(longest, dtype=torch.float16):
        where = ragged_layout([longest, 1], 1, DEVICE)
        return fits_registers(noise(where.total, 32, dtype=dtype), where)

    assert fits(257) and fits(640)
    assert not fits(256) and not fits(641) and not fits(300, torch.float32)


def check(x, inverse, where, split, kind, found=None):
    parts, rows, value, partner = found or affinity(x, inverse, where, split, kind)
    sums, expected, expected_partner = affinity_reference(x.cpu(), where, split, kind)
    mask = sources(where, split)
    patches = torch.ones(where.total, dtype=torch.bool)
    for begin in where.offsets[:-1].tolist():
        patches[begin : begin + where.prefix] = False
    torch.testing.assert_close(summed(parts, rows, where)[patches].cpu(), sums[patches], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(value[mask].cpu(), expected[mask.cpu()], rtol=0, atol=1e-5)
    assert torch.equal(partner[mask].cpu(), expected_partner[mask.cpu()])
