"""Proposition 1 with its exact constant: half the paper's leading term, no remainder; the sign depends on the loss."""

import pytest
import torch
from tiny_experiment import tiny

from adamerge.experiments.reproduce.proposition import Pairs, draw, losses, section


@pytest.mark.parametrize("closeness", [1.0, 1e-2])
def test_the_gap_is_exactly_the_formula_for_every_reading_of_the_loss(closeness):
    for _, gap, exact in losses(draw(closeness)).values():
        torch.testing.assert_close(gap, exact, rtol=1e-6, atol=1e-10)


def test_a_pair_worked_out_by_hand():
    """x = 0, y = 2, saliences 3 and 1: the plain mean 1 costs 3 + 1, the weighted mean 0.5 costs 0.75 + 2.25."""
    x, y = torch.tensor([[0.0]], dtype=torch.float64), torch.tensor([[2.0]], dtype=torch.float64)
    s, t = torch.tensor([3.0], dtype=torch.float64), torch.tensor([1.0], dtype=torch.float64)
    pair = Pairs(x, y, s, t)
    assert pair.gap(s, t).item() == 4.0 - 3.0
    _, gap, exact = losses(pair)["weighted by salience"]
    assert gap.item() == exact.item() == 1.0
    assert pair.papers_term.item() == 0.5
    assert losses(pair)["the same, normalised"][1].item() == 0.25
    assert losses(pair)["plain squared errors"][1].item() == -0.5


def test_the_verdicts(tmp_path):
    found = section(tiny(), tmp_path)
    assert [claim.verdict for claim in found.claims] == ["holds", "does not hold", "holds"]
    assert "gap / term = 0.5000" in found.claims[1].ours
    assert "no remainder" in found.claims[1].ours
    ratios = [round(row["ratio"], 6) for row in found.grids[0].rows]
    assert ratios[1:] == [0.5, -1.0]
