"""Edges of the kernels: ties between tiles, means without a direction, rows behind the last that stay unwritten."""

from collections.abc import Iterator

import pytest
import torch
from awkward import DEVICE, noise, sources

from adamerge.runtime.block_view import NormParams
from adamerge.runtime.packed.layout import ragged_layout
from adamerge.runtime.triton.kernels.choice import Choice
from adamerge.runtime.triton.kernels.linear import linear
from adamerge.runtime.triton.kernels.match import Split, match
from adamerge.runtime.triton.kernels.mean_key_unit import mean_key_unit
from adamerge.runtime.triton.kernels.merge import merge
from adamerge.runtime.triton.kernels.residual import add


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
