"""The statements about where merges happen come out true for the paper's own picture and false for others."""

import pytest

from adamerge.experiments.reproduce.claims import Claim
from adamerge.experiments.reproduce.layers import R_MAX, statements

# The figures that the paper gives, and the least that its words say about the others.
PAPERS = {
    9: [2.0, 2.0, 1.0, *[3.0] * 8, 5.18],
    11: [2.0, 2.0, 1.0, *[3.0] * 8, 5.5],
    14: [5.0, 4.71, 1.0, *[3.5] * 8, 3.12],
    17: [6.0, 5.87, 0.5, *[3.5] * 8, 0.84],
    20: [9.0, 8.0, 1.0, *[3.0] * 7, 0.0, 0.0],
    23: [9.0, 8.0, 1.0, *[3.0] * 7, 0.0, 0.0],
}


def verdicts(e: dict[int, list[float]]) -> list[str]:
    return [claim.verdict for claim in statements(e)]


def with_row(r_max: int, layer: int, value: float) -> dict[int, list[float]]:
    row = list(PAPERS[r_max])
    row[layer] = value
    return {**PAPERS, r_max: row}


def test_all_statements_hold_for_the_papers_own_figures():
    assert tuple(PAPERS) == R_MAX
    assert verdicts(PAPERS) == ["holds"] * 6


@pytest.mark.parametrize(
    ("changed", "number"),
    [
        ((11, 4, 9.0), 0),
        ((9, 0, 9.5), 1),
        ((14, 5, 6.0), 2),
        ((17, 11, 4.0), 3),
        ((23, 10, 0.3), 4),
        ((20, 3, 0.2), 5),
    ],
)
def test_each_statement_fails_when_the_figure_it_is_about_changes(changed, number):
    assert verdicts(with_row(*changed))[number] == "does not hold"


def test_inactive_layers_do_not_count_as_merging_least():
    assert verdicts(PAPERS)[5] == "holds"
    assert verdicts(with_row(20, 2, 0.0))[5] == "does not hold"


def test_statements_about_blocks_that_do_not_exist_do_not_apply():
    shallow = {r_max: [1.0, 2.0, 0.5] for r_max in R_MAX}
    found: list[Claim] = statements(shallow)
    absent = [claim for claim in found if claim.verdict == "not applicable"]
    assert len(absent) == 2
    assert all(claim.ours == "not applicable: the model has 3 blocks" for claim in absent)
    assert found[5].verdict == "holds"
    assert statements({r_max: [1.0, 2.0] for r_max in R_MAX})[5].verdict == "not applicable"


def test_a_model_that_merges_nothing_has_no_least_active_layer():
    claim = statements({r_max: [0.0] * 12 for r_max in R_MAX})[5]
    assert claim.ours == "not applicable: no layer merges anything"


def test_our_figures_stand_beside_the_papers():
    first, _, moderate, contracting, *_ = statements(PAPERS)
    assert "E[r_11] = 5.18" in first.paper and "E[r_11] = 5.18" in first.ours
    assert "4.71 and 5.87" in moderate.paper and "4.71 and 5.87" in moderate.ours
    assert contracting.ours == "E[r_11] = 3.12 and 0.84, from 5.18"
