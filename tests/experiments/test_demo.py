"""The table of the demonstration marks the winner and fits a terminal; its plot gets the same figures."""

import pytest
import torch
from rich.console import Console
from timed_models import MERGED, UNMERGED, Clock, TimedModel

from adamerge.evaluation import judge
from adamerge.experiments.demo import CUTS, PRESET, PUBLISHED, TOME, TUNED, best_of, draw_tradeoff, make_table, measure
from adamerge.methods import tome


def rows(kl: dict[str, float]) -> list[dict]:
    """The rows of a demonstration with these divergences at the first cut, and reversed ones at the second."""
    found = [{"method": "none", "target_cut": 0.0, "images": 168, "top1": 0.863, "agreement": 1.0, "kl": 0.0, "cut": 0}]
    for cut, values in zip(CUTS, (list(kl.values()), list(kl.values())[::-1]), strict=True):
        for method, value in zip(kl, values, strict=True):
            row = {"method": method, "target_cut": cut, "cut": cut, "top1": 0.8, "agreement": 1 - value / 10}
            found.append({**row, "kl": value, "speedup": 1.234})
    return found


KL = {TOME: 0.05, PUBLISHED: 1.0, PRESET: 1e-4, TUNED: 1e-7}


def test_the_winner_of_each_cut_is_the_method_that_changes_the_output_least():
    first, second = CUTS
    assert best_of(rows(KL), first)["method"] == TUNED
    assert best_of(rows(KL), second)["method"] == TOME


def test_the_table_fits_eighty_columns_and_marks_one_winner_for_each_cut():
    console = Console(width=200, record=True)
    console.print(make_table(rows(KL)))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[1] for line in lines if "best │" in line] == ["tuned", "ToMe"]


def test_the_plot_is_drawn_from_the_rows(tmp_path):
    path = draw_tradeoff(rows(KL), tmp_path / "p.png")
    other = draw_tradeoff(rows(KL | {PRESET: 0.3}), tmp_path / "q.png")
    assert path.read_bytes() != other.read_bytes()


def test_a_row_of_a_model_whose_answers_and_times_are_known(monkeypatch):
    full, merged = torch.randn(2, 6, 9, generator=torch.Generator().manual_seed(0)).unbind()
    merged[:1] = full[:1]
    labels = torch.tensor([*merged[:4].argmax(1), 0, 0])
    timed = TimedModel(full, merged, Clock(monkeypatch))
    data = list(zip(timed.images.split(3), labels.split(3), strict=True))
    _, row = measure(timed.model, data, {(TOME, 0.2): tome(1)}, lambda what, steps: None)
    top1, _, full_top1, agreement, kl = judge(full, merged, labels)
    assert (row["top1"], row["agreement"]) == (top1.double().mean(), agreement.double().mean())
    assert row["kl"] == pytest.approx(kl.mean().item()) and top1.sum() != full_top1.sum()
    assert row["speedup"] == UNMERGED / MERGED
