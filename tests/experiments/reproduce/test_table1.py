"""The rows of Table 1 are worked out from outcomes as by hand."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_experiment import outcome

from adamerge.experiments.reproduce import table1
from adamerge.experiments.reproduce.outcome import Outcome
from adamerge.experiments.reproduce.report import markdown
from adamerge.experiments.reproduce.section import Grid, Section

pytestmark = pytest.mark.usefixtures("unchecked")


def made(right: int, gmacs: float, seconds: float) -> Outcome:
    """An outcome of 100 images, `right` of them answered correctly, of which the last 60 took so many seconds."""
    cost = torch.full((100,), gmacs * 1e9, dtype=torch.float64)
    merges = torch.tensor([[1, 2]] * 50 + [[3, 2]] * 50)
    return replace(outcome(torch.arange(100) < right, merges), paper=cost, seconds=seconds, timed=60)


def row(*runs: Outcome) -> dict[str, Any]:
    """A row at the tier ~15.9G, beside the paper's figures for ToMe, of a model that answers 15 images per second."""
    experiment: Any = SimpleNamespace(unmerged=made(80, 4.0, 4.0), full_gmacs=4.0)
    return table1._row(experiment, "~15.9G", "ToMe", "r=3", runs, table1.TIERS[0].paper["ToMe"])


def test_a_method_in_half_the_time_has_a_speed_up_of_two():
    assert row(made(80, 4.0, 2.0))["speedup"] == 2.0
    assert row(made(80, 4.0, 8.0))["speedup"] == 0.5


def test_the_figures_of_several_runs_are_averaged():
    """30 and 60 images per second are 45 on average."""
    found = row(made(70, 3.0, 2.0), made(74, 3.0, 1.0))
    ours = {"top1": 72.0, "top1_std": 2.0, "delta": -8.0, "gmacs": 3.0, "cut": 25.0, "speedup": 3.0, "merges": 4.0}
    papers = {"top1": 84.69, "delta": -0.50, "gmacs": 15.93, "cut": 8.7, "speedup": 1.10}
    assert {name: found[name] for name in ours} == pytest.approx(ours)
    assert {name: found[f"paper_{name}"] for name in papers} == pytest.approx(papers)


def test_the_report_shows_the_speed_up_beside_the_papers():
    grid = Grid("table1", "Rows", table1.COLUMNS, (row(made(80, 4.0, 1.6)),))
    assert "| 2.50× (1.10×) |" in markdown([Section("table1", "Table 1", (grid,))])
