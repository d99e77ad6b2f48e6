"""Bootstrap intervals agree with the closed form, repeat exactly, and cover what they should."""

import pytest
import torch

from adamerge.core.errors import BadOption
from adamerge.experiments import bootstrap
from adamerge.experiments.bootstrap import Interval, intervals, paired


def sample(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_a_large_sample_has_the_interval_of_the_normal_approximation():
    a, b = 0.3 + 2 * sample(2000, 1), sample(2000, 2)
    found = paired(a, b)
    difference = a - b
    half = 1.96 * difference.std(correction=0).item() / 2000**0.5
    assert found.mean == pytest.approx(difference.mean().item())
    assert found.low == pytest.approx(found.mean - half, abs=0.05 * half)
    assert found.high == pytest.approx(found.mean + half, abs=0.05 * half)


def test_pairs_are_drawn_together():
    """What two methods share over images is no uncertainty of their difference."""
    images = 100 * sample(50)
    found = paired(images + 1, images)
    assert (found.mean, found.low, found.high) == (pytest.approx(1), pytest.approx(1), pytest.approx(1))


def test_the_same_seed_gives_the_same_interval_and_another_seed_another():
    a, b = sample(40, 1), sample(40, 2)
    assert paired(a, b) == paired(a, b)
    assert paired(a, b, seed=1) != paired(a, b)
    assert paired(a, b, seed=1).mean == paired(a, b).mean


def test_a_column_has_the_same_interval_whatever_stands_beside_it():
    columns = torch.stack([sample(30, seed) for seed in range(3)], 1)
    alone = intervals(columns[:, 1:2])[0]
    beside = intervals(columns)[1]
    assert (beside.low, beside.high) == (pytest.approx(alone.low), pytest.approx(alone.high))


def test_chunks_do_not_change_the_interval(monkeypatch):
    a, b = sample(40, 1), sample(40, 2)
    whole = paired(a, b)
    monkeypatch.setattr(bootstrap, "CHUNK", 1000)
    small = paired(a, b)
    assert (small.low, small.high) == (pytest.approx(whole.low), pytest.approx(whole.high))


def test_the_interval_covers_the_truth_about_as_often_as_it_says(monkeypatch):
    """200 simulated data sets of 60 images; the percentile interval of a mean is a little narrow at this size."""
    monkeypatch.setattr(bootstrap, "RESAMPLES", 1000)
    data = 0.5 + torch.randn(60, 200, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    covered = sum(one.low <= 0.5 <= one.high for one in intervals(data))
    assert 0.89 <= covered / 200 <= 0.99


def test_whole_numbers_and_small_floats_are_compared_exactly():
    a = torch.tensor([1.0, 0.0, 1.0, 1.0])
    found = paired(a, torch.zeros(4))
    assert found.mean == 0.75 and 0 <= found.low <= 0.75 <= found.high <= 1
    assert paired(a[:1], a[:1]) == Interval(0.0, 0.0, 0.0)


def test_mistakes_are_named():
    with pytest.raises(BadOption, match=r"^an interval needs at least one image; got none$"):
        intervals(torch.empty(0, 2))


def test_other_images_on_the_other_side_are_refused(unchecked):
    with pytest.raises(BadOption, match=r"^paired needs the same images on both sides; got 3 and 2$"):
        paired(torch.zeros(3), torch.zeros(2))
