"""Edges of the kernels: ties between tiles, means without a direction, rows behind the last that stay unwritten."""

from collections.abc import Iterator

import pytest
import torch
from awkward import DEVICE, FULL, HALF, noise, sources

from adamerge.runtime.block_view import NormParams
from adamerge.runtime.packed.layout import ragged_layout
from adamerge.runtime.triton.kernels.affinity import affinity
from adamerge.runtime.triton.kernels.affinity_one_program import affinity_one_program
from adamerge.runtime.triton.kernels.affinity_row_resident import affinity_row_resident
from adamerge.runtime.triton.kernels.choice import Choice, ColumnSums, Entropy, Policy, Rule
from adamerge.runtime.triton.kernels.decide import decide
from adamerge.runtime.triton.kernels.linear import linear
from adamerge.runtime.triton.kernels.match import Split, match
from adamerge.runtime.triton.kernels.mean_key_unit import mean_key_unit
from adamerge.runtime.triton.kernels.merge import merge
from adamerge.runtime.triton.kernels.residual import add
from adamerge.runtime.triton.kernels.select import PaddedLinks, select


@pytest.fixture
def unwritten_is_nan() -> Iterator[None]:
    """torch fills new memory with NaN, so that what a kernel does not write is NaN afterwards."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


ROWS = torch.tensor([5], dtype=torch.int32, device=DEVICE)


def only_first(array: torch.Tensor | None, number: int) -> bool:
    assert array is not None
    return bool(array[:number].isfinite().all() and array[number:].isnan().all())


def test_rows_behind_the_last_are_not_written(unwritten_is_nan):
    x = noise(9, 32)
    assert all(only_first(each, 5) for each in add(x, x, norm=NormParams(None, None, 1e-6), inverse=True, counted=ROWS))
    assert only_first(mean_key_unit(noise(9, 2, 32), ROWS), 5)
    assert only_first(linear(x, noise(16, 32, seed=1), None, rows=ROWS), 5)


def written(array: torch.Tensor) -> list[bool]:
    """Which entries a kernel wrote; torch fills new whole numbers with the largest one."""
    empty = array.isnan() if array.is_floating_point() else array == torch.iinfo(array.dtype).max
    return (~empty).tolist()


# Images of 3, 1 and 5 patches, each behind a class token: the row behind the last patch is the next class token.
SMALL = ragged_layout([3, 1, 5], 1, DEVICE)
PATCHES = [place > 0 for n in (3, 1, 5) for place in range(n + 1)]
# The first half of the patches are sources, and all go to the first target.
SOURCES = torch.tensor([[1, 0, 0, 0, 0], [0] * 5, [1, 1, 0, 0, 0]], dtype=torch.bool, device=DEVICE)
TARGETS = torch.tensor([[1] * 5, [0] * 5, [2] * 5], device=DEVICE)
HISTORY = torch.zeros(3, 5, dtype=torch.int32, device=DEVICE)


def as_rows(padded: torch.Tensor, other: float = 0) -> torch.Tensor:
    """Padded numbers of patches as rows, with another number in the place of class tokens."""
    aside = padded.new_full((1,), other)
    return torch.cat([part for row, n in zip(padded, (3, 1, 5), strict=True) for part in (aside, row[:n])])


@pytest.mark.parametrize("given", ["nothing", "columns", "entropy", "attention"])
def test_a_decision_is_written_at_the_patches_of_its_image_and_reads_no_others(unwritten_is_nan, given):
    def decided(other: float) -> Choice:
        value, sums = as_rows(noise(3, 5), other), as_rows(noise(3, 5, seed=1).abs(), other)
        by = {"nothing": None, "columns": ColumnSums(sums[None], 16), "entropy": Entropy(sums), "attention": sums[None]}
        size, partner = as_rows(torch.ones(3, 5, device=DEVICE), other), as_rows(TARGETS.int())
        policy = Policy(Split(False), "first", weigh="salience_size")
        return decide(value, partner, size, HISTORY, SMALL, policy, Rule("fixed", 1), by[given])

    made, again = decided(0.0), decided(1e4)
    assert made.count.tolist() == [2, 1, 4]
    assert all(written(each) == PATCHES for each in (made.slot, made.weight, made.salience))
    assert torch.equal(made.redundancy, again.redundancy)
    torch.testing.assert_close(made.salience, again.salience, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(made.weight, again.weight, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("keep", [False, True])
def test_a_selection_is_written_at_the_patches_of_its_image(unwritten_is_nan, keep):
    ones = torch.ones(3, 5, device=DEVICE)
    links = PaddedLinks(noise(3, 5), TARGETS, SOURCES, ones, None if keep else ones)
    made = select(links, 1, HISTORY, SMALL, sources_first=False)
    assert made.count.tolist() == [2, 1, 4]
    assert all(written(each) == PATCHES for each in (made.slot, made.weight, made.salience))


def test_held_rows_are_written_at_the_patches_of_their_image(unwritten_is_nan):
    """In blocks of 64 rows: the first image has five, the second one, which is full."""
    where, split = ragged_layout([257, 64], 1, DEVICE), Split(True, 1)
    x = noise(where.total, 32, dtype=torch.float16)
    inverse = x.float().norm(dim=1).reciprocal()
    sums, rows, value, partner = affinity_row_resident(x, inverse, where, split, 1.0, cosine=False)
    long, short = [False] + [True] * 257, [False] + [True] * 64
    assert rows == 64 and [written(part) for part in sums] == [long + short] + [long + [False] * 65] * 4
    of_sources = sources(where, split).tolist()
    assert written(value) == of_sources and written(partner) == of_sources


@pytest.mark.parametrize(
    ("counts", "dtype"), [([3, 40], FULL), ([70, 3], FULL), ([5, 64], HALF), ([130, 5], HALF), ([200, 5], HALF)]
)
def test_sums_and_partners_are_written_at_the_patches_of_their_image(unwritten_is_nan, counts, dtype):
    """In one tile and in several; by one program for an image with one quadrant, or with more."""
    where, split = ragged_layout(counts, 1, DEVICE), Split(True, 1)
    sums, rows, value, partner = affinity(noise(where.total, 32, dtype=dtype), None, where, split, "dot")
    for number, part in enumerate(sums):
        assert written(part) == [place > 0 and number * rows < n for n in counts for place in range(n + 1)]
    of_sources = sources(where, split).tolist()
    assert written(value) == of_sources and written(partner) == of_sources


def test_partners_by_keys_are_written_at_the_sources_of_their_image(unwritten_is_nan):
    where, split = ragged_layout([3, 1, 40], 1, DEVICE), Split(True, 1)
    of_sources = sources(where, split).tolist()
    assert [written(each) for each in match(noise(where.total, 32), where, split)] == [of_sources] * 2


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # The interpreter's arithmetic is numpy's, which warns.
@pytest.mark.parametrize("wrong", [float("inf"), float("-inf"), float("nan")])
def test_an_image_whose_redundancy_is_not_finite_merges_nothing(wrong):
    """As in `core.budget`; the z-score of an infinite redundancy would merge all that the rule may merge."""
    value = as_rows(torch.full((3, 5), 9.0, device=DEVICE))
    value[1] = wrong
    numbers = torch.tensor([0.0, 1.0, 20.0, 1.0], dtype=torch.float64, device=DEVICE)
    rule, partner = Rule("zscore", numbers=numbers), as_rows(TARGETS.int())
    size = torch.ones_like(value)
    made = decide(value, partner, size, HISTORY, SMALL, Policy(Split(False)), rule)
    # Of three, one and five patches, one, none and two could merge.
    assert made.count.tolist() == [3, 1, 3] and not made.redundancy[0].isfinite()


def choice(slot: list[int], counts: list[int], weight: list[float]) -> Choice:
    """The choice for images of four patches without a prefix."""
    gone, goal, origin = [], [], []
    for image, count in enumerate(counts):
        mine = slot[4 * image : 4 * image + 4]
        first = [mine.index(place) for place in range(count)]
        away = [i for i in range(4) if i not in first]
        gone += away + [0] * (4 - len(away))
        goal += [mine[i] for i in away] + [0] * (4 - len(away))
        origin += first + [0] * (4 - count)
    slots, gones, goals, origins = (
        torch.tensor(each, dtype=torch.int32, device=DEVICE) for each in (slot, gone, goal, origin)
    )
    weights = torch.tensor(weight, device=DEVICE)
    number = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
    nothing = torch.zeros(len(counts), device=DEVICE)
    return Choice(
        slots, gones, goals, origins, number, weights, weights, nothing, torch.zeros(len(counts), 4, dtype=torch.int32)
    )


def test_merged_rows_behind_the_last_image_are_not_written(unwritten_is_nan):
    where = ragged_layout([4, 4], 0, DEVICE)
    made = choice([0, 1, 0, 1, 0, 0, 1, 2], [2, 3], [1.0] * 8)
    norm = NormParams(None, None, 1e-6)
    y, normed, size, logs, offsets = merge(noise(8, 32), torch.ones(8, device=DEVICE), where, made, norm=norm)
    assert offsets.tolist() == [0, 2, 5]
    assert size[:5].tolist() == [2.0, 2.0, 2.0, 1.0, 1.0]
    assert all(only_first(each, 5) for each in (y, normed, size, logs))


# The interpreter says that a factor overflows; the kernel does not use it.
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("length", [1.0, 1e4])
def test_the_mean_of_opposite_tokens_is_zero_and_not_nan(length):
    """Its length is 0, and the factor that would restore the length is infinite."""
    where = ragged_layout([4], 0, DEVICE)
    x = torch.zeros(4, 32, device=DEVICE)
    x[:, 0] = torch.tensor([length, 1.0, -length, 3.0])
    made = choice([0, 1, 0, 2], [3], [1.0] * 4)
    y = merge(x, torch.ones(4, device=DEVICE), where, made, length="mean")[0]
    assert y[:3, 0].tolist() == [0.0, 1.0, 3.0] and not y[:3].isnan().any()


@pytest.mark.parametrize("split", [Split(False), Split(True, 1, half=True)], ids=str)
def test_ties_between_tiles_go_to_the_lower_place(split):
    """A tile has 32 targets; here there are 40, all alike."""
    where = ragged_layout([80], 0, DEVICE)
    features = torch.full((80, 16), 0.25, device=DEVICE)
    partner = match(features, where, split)[1]
    lowest = int(split.sides(80, DEVICE)[1][0])
    assert partner[sources(where, split)].tolist() == [lowest] * 40


def test_ties_between_quadrants_go_to_the_lower_place():
    """One program has two quadrants of 128 tokens each."""
    where, split = ragged_layout([200], 0, DEVICE), Split(True, 1)
    features = torch.full((200, 16), 0.25, dtype=HALF, device=DEVICE)
    partner = affinity_one_program(features, where, split, 1.0, cosine=False)[3]
    assert partner[sources(where, split)].tolist() == [0] * 100
