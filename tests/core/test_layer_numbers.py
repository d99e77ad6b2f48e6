"""Numbers for each layer must be as many as there are blocks, for every budget."""

import pytest

from adamerge.core.budget import Fixed, Threshold, ZScore
from adamerge.core.errors import BadOption, BadStats
from adamerge.core.stats import LayerStats

STATS = LayerStats((0.1, 0.2), (0.1, 0.1), (0.5, 0.5))


@pytest.mark.parametrize("budget", [Fixed((1.0, 2.0)), ZScore((1.0, 2.0), STATS), Threshold((1.0, 2.0), STATS)])
def test_as_many_numbers_as_blocks(budget):
    budget.check_depth(2)
    for depth in (1, 3):
        with pytest.raises(BadOption, match=f"gives 2 numbers, one for each layer, and the model has {depth} blocks"):
            budget.check_depth(depth, with_stats=False)


@pytest.mark.parametrize("budget", [ZScore(3.0, STATS), Threshold(3.0, STATS)])
def test_statistics_must_cover_every_block_unless_they_are_to_be_measured(budget):
    budget.check_depth(2)
    budget.check_depth(3, with_stats=False)
    with pytest.raises(BadStats, match="stats cover 2 layers but layer 2 was asked for"):
        budget.check_depth(3)
    with pytest.raises(BadStats, match="has none"):
        budget.with_stats(None).check_depth(2)
    budget.with_stats(None).check_depth(2, with_stats=False)
