"""Every figure of a comparison, from logits and times that were made by hand."""

import pytest
import torch
from timed_models import MERGED, UNMERGED, Clock, TimedModel

import adamerge.experiments.compare as comparison
from adamerge.evaluation import judge
from adamerge.experiments.bootstrap import intervals
from adamerge.experiments.comparison_rows import ComparisonRow, headings, make_rows, texts, to_markdown
from adamerge.experiments.store import StoredResult
from adamerge.flops import meter
from adamerge.search.variants import Variant


def test_a_comparison_of_a_model_whose_answers_and_times_are_known(tmp_path, monkeypatch):
    """Two of three batches are timed beside the unmerged model, and the first of them is the warm-up."""
    monkeypatch.setattr(comparison, "TIMED", 1)
    monkeypatch.setattr(comparison, "_draw", lambda rows, path: None)
    draw = torch.Generator().manual_seed(0)
    full, merged = torch.randn(6, 9, generator=draw), torch.randn(6, 9, generator=draw)
    merged[:1] = full[:1]
    labels = merged.argmax(1)
    labels[3:] = (labels[3:] + 1) % 9
    timed = TimedModel(full, merged, Clock(monkeypatch))
    data = list(zip(timed.images.split([1, 3, 2]), labels.split([1, 3, 2]), strict=True))
    native = {"few": Variant("tome", {"r": 1}), "more": Variant("tome", {"r": 2})}
    rows = comparison.compare(
        timed.model, timed.images, data, (), (), native=native, out=tmp_path, name="tiny", progress=False
    )
    top1, top5, full_top1, agreement, kl = (one.double() for one in judge(full, merged, labels))
    assert 0 < top1.mean() < top5.mean() < 1 and full_top1.mean() != top1.mean()
    for row, number in zip(rows[1:], (3, 6), strict=True):
        assert (row.top1, row.top5, row.agreement) == (top1.mean(), top5.mean(), agreement.mean())
        assert row.delta_top1 == pytest.approx(100 * (top1 - full_top1).mean().item())
        assert row.kl == pytest.approx(kl.mean().item())
        assert row.speedup == UNMERGED / MERGED and row.images_per_second == 1 / MERGED
        assert (row.merged_mean, row.merged_std, row.images) == (number, 0, 6)
    unmerged = meter(timed.model).unmerged()
    first = rows[0]
    assert first.gmacs_true == unmerged.true.item() / 1e9 and first.gmacs_paper == unmerged.paper.item() / 1e9
    assert first.cut_true == first.cut_paper == 0 < rows[1].cut_true < rows[2].cut_true
    assert rows[1].cut_true == pytest.approx(1 - rows[1].gmacs_true / first.gmacs_true)
    assert rows[1].cut_paper == pytest.approx(1 - rows[1].gmacs_paper / first.gmacs_paper)
    assert (first.speedup, first.images_per_second) == (1, 1 / UNMERGED)


def result(method: str, kl: list[float], top1: list[float], met: bool = True, **facts) -> StoredResult:
    known = {
        "method": method,
        "options": "{}",
        "budget": "cut 20 %",
        "cost": "true",
        "target_cut": 0.2,
        "knob": 3.25,
        "met": met,
        "device": "a device",
        "dtype": "float32",
        "versions": "{}",
        "date": "2026-01-01",
        "timed": 12,
        "seconds": 3.0,
        "full_seconds": 6.0,
        "full_true": 10e9,
        "full_paper": 8e9,
        **facts,
    }
    number = len(kl)
    tensors = {
        "top1": torch.tensor(top1),
        "top5": torch.ones(number) * 0.75,
        "full_top1": torch.tensor([1.0, 1.0, 0.0, 0.0]),
        "agreement": torch.tensor([1.0, 1.0, 1.0, 0.0]),
        "kl": torch.tensor(kl, dtype=torch.float64),
        "true": torch.tensor([7e9, 8e9, 9e9, 8e9], dtype=torch.float64),
        "paper": torch.tensor([6e9] * 4, dtype=torch.float64),
        "merged": torch.tensor([1, 3, 1, 3]),
    }
    return StoredResult(known, tensors)


@pytest.fixture
def rows() -> list[ComparisonRow]:
    rival = result("tome", [0.4, 0.4, 0.4, 0.4], [1.0, 0.0, 0.0, 0.0], met=False)
    ours = result("ours", [0.1, 0.2, 0.3, 0.4], [1.0, 1.0, 1.0, 0.0])
    other = result("ours", [0.5] * 4, [1.0, 0.0, 0.0, 0.0], budget="native", target_cut=None, knob=None)
    return make_rows([rival, ours, other], "tome", "a model")


def test_a_row_has_the_means_and_the_differences_to_the_rival_of_its_budget(rows):
    rival, ours, other = rows
    assert (ours.top1, ours.top5, ours.agreement, ours.images) == (0.75, 0.75, 0.75, 4)
    assert ours.delta_top1 == 25 and ours.kl == pytest.approx(0.25)
    assert ours.top1_vs_rival == 50 and ours.kl_vs_rival == pytest.approx(-0.15)
    assert (ours.gmacs_true, ours.gmacs_paper) == (8, 6)
    assert ours.cut_true == pytest.approx(0.2) and ours.cut_paper == pytest.approx(0.25)
    assert (ours.merged_mean, ours.merged_std) == (2, 1)
    assert (ours.speedup, ours.images_per_second) == (2, 4)
    assert (ours.rival, ours.rival_met, rival.rival, other.rival) == ("tome", False, "", "")
    assert rival.kl_vs_rival is None and other.kl_vs_rival is None and rival.rival_met is None
    found = intervals(torch.tensor([[0.1, -0.3], [0.2, -0.2], [0.3, -0.1], [0.4, 0.0]], dtype=torch.float64))
    assert (ours.kl_low, ours.kl_high) == (pytest.approx(found[0].low), pytest.approx(found[0].high))
    assert (ours.kl_vs_rival_low, ours.kl_vs_rival_high) == (pytest.approx(found[1].low), pytest.approx(found[1].high))
    assert ours.top1_vs_rival_low is not None and ours.top1_vs_rival_high is not None
    assert ours.top1_vs_rival_low < 50 < ours.top1_vs_rival_high
    assert ours.delta_top1_low < 25 < ours.delta_top1_high


def test_the_cells_of_a_row_are_under_their_headings(rows):
    cells = dict(zip(headings(rows), texts(rows[1]), strict=True))
    assert cells["method"] == "ours" and cells["budget"] == "cut 20 %" and cells["knob"] == "3.25"
    assert (cells["cut true"], cells["cut paper"], cells["top-1"], cells["agrees"]) == (
        "20.0%",
        "25.0%",
        "75.00%",
        "75.00%",
    )
    assert cells["Δ top-1"].startswith("+25.00 [") and cells["KL"].startswith("0.2500 [")
    assert cells["merged"] == "2.0 ± 1.0" and cells["speed-up"] == "2.00×"
    assert cells["Δ top-1 vs tome"].startswith("+50.00 [") and cells["Δ KL vs tome"].startswith("-0.1500 [")
    assert cells["Δ KL vs tome"].endswith("] ≈"), "the rival missed its target"
    assert texts(rows[0])[1] == "cut 20 % ≈" and texts(rows[0])[-2:] == ("", "")
    assert texts(rows[2])[2] == ""


def test_the_page_says_the_conditions_and_what_was_left_out(rows):
    text = to_markdown(rows, ["ats, cut 20 %: out of reach"])
    assert text.startswith("# a model: methods at equal true cost\n\n4 images, float32 on a device; unmerged 8 GMACs")
    assert text.endswith("Left out:\n\n* ats, cut 20 %: out of reach\n")
    assert "Left out" not in to_markdown(rows)
