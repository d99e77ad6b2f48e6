"""A whole reproduction on a tiny model: what is written, what is measured only once, what survives an interruption."""

import csv
import json

import pytest
import torch
from tiny_experiment import IMAGES, tiny

from adamerge.core.errors import BadImages, BadOption
from adamerge.evaluation import judge
from adamerge.experiments.reproduce import PARTS, Experiment, Section, choose, run, table1
from adamerge.experiments.reproduce import experiment as experiment_module
from adamerge.experiments.reproduce.build_experiment import _calibration_count
from adamerge.experiments.reproduce.report import markdown, opening
from adamerge.experiments.store import ResultStore
from adamerge.methods import adamerge, none, tome


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """All parts on the tiny model."""
    out = tmp_path_factory.mktemp("reproduced")
    return run(["all"], tiny(), out), out


def counted(monkeypatch) -> list[int]:
    """Notes every forward pass that is timed."""
    passes: list[int] = []
    original = experiment_module.time_logits

    def counting(model, images):
        passes.append(len(images))
        return original(model, images)

    monkeypatch.setattr(experiment_module, "time_logits", counting)
    return passes


def test_every_part_writes_its_json_and_its_tables(done):
    sections, out = done
    assert [section.part for section in sections] == list(PARTS)
    for section in sections:
        kept = Section.from_json(json.loads((out / f"{section.part}.json").read_text()))
        assert kept == Section.from_json(json.loads(json.dumps(section.to_json())))
        for grid in section.grids:
            with (out / f"{grid.name}.csv").open(newline="") as file:
                assert len(list(csv.DictReader(file))) == len(grid.rows)
    assert (out / "layers.png").stat().st_size > 1000
    assert not list(out.rglob(".*"))


def test_the_report_has_the_papers_figures_beside_ours_and_every_verdict(done):
    sections, out = done
    report = (out / "report.md").read_text()
    titles = [line for line in report.splitlines() if line.startswith("## ")]
    assert titles == [f"## {section.title}" for section in sections]
    row = next(r for r in sections[0].grids[0].rows if r["method"] == "PiToMe" and r["setting"] == "r=8")
    assert f"{row['top1']:.2f} (83.74)" in report
    assert f"{row['delta']:+.2f} (-1.45)" in report
    for section in sections:
        for claim in section.claims:
            assert claim.text.replace("|", "\\|") in report and claim.ours.replace("|", "\\|") in report
    with (out / "claims.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == sum(len(section.claims) for section in sections)


def test_the_report_starts_with_what_fails(done):
    sections, out = done
    first = (out / "report.md").read_text().split("\n\n")[1]
    claims = [claim for section in sections for claim in section.claims]
    for claim in claims:
        figure = claim.decisive or claim.ours
        assert (f"{claim.text}: {figure}" in first) == (claim.verdict == "does not hold")
    assert first.startswith(f"Of {len(claims)} claims")
    assert opening([]).startswith("Of 0 claims")


def test_blocks_that_the_model_lacks_are_said_to_be_missing(done):
    sections, _ = done
    texts = {claim.text: claim for section in sections for claim in section.claims}
    assert "3 blocks" in texts["Regime 3 (r_max >= 20): layers >= 10 are inactive, E[r_l] = 0"].ours
    assert texts["AdaMerge >= DSM at every tier, at matched cost"].verdict == "not applicable"
    assert "do not apply to this model" in opening(sections)


def test_runs_of_a_deterministic_library_do_not_differ(monkeypatch):
    passes = counted(monkeypatch)
    experiment = tiny(runs=3)
    (runs,) = experiment.repeat({"AdaMerge": experiment.calibrated(adamerge(6))}, "runs").values()
    assert sum(passes) == IMAGES * (1 + 3), "every run is a run"
    assert all(torch.equal(run.kl, runs[0].kl) for run in runs)
    row = table1._row(experiment, "~15.9G", "AdaMerge", "r_max=6", runs, None)
    assert row["top1_std"] == 0


def test_a_second_run_measures_nothing(done, monkeypatch):
    sections, out = done
    passes = counted(monkeypatch)
    monkeypatch.setattr(experiment_module, "calibrate", lambda *_, **__: pytest.fail("calibrated again"))
    again = run(["all"], tiny(), out)
    assert passes == []
    assert [s.claims for s in again] == [s.claims for s in sections]
    assert [s.grids for s in again] == [s.grids for s in sections]


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path, monkeypatch):
    passes = counted(monkeypatch)
    measure = Experiment.measure

    def fail_at_the_third_tier(self, recipes, label, **options):
        if "14.9G" in label:
            raise KeyboardInterrupt
        return measure(self, recipes, label, **options)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Experiment, "measure", fail_at_the_third_tier)
        run(["table1"], tiny(), tmp_path)
    tier, extra = 6 * IMAGES, IMAGES
    assert sum(passes) == 2 * tier + extra
    passes.clear()
    run(["table1"], tiny(), tmp_path)
    # The unmerged model's answers are not kept on disk, so it runs once more.
    assert sum(passes) == 4 * tier + 6 * IMAGES + extra


def test_other_settings_do_not_reuse_what_was_measured(tmp_path):
    store = ResultStore(tmp_path)
    first = tiny(store=store)
    (kept,) = first.measure({"ToMe": tome(2)}).values()
    names = {**first.names, "model": "another"}
    assert first.settings != Experiment(first.model, first.data, first.calibration, names).settings
    other = tiny(store=store)
    other.calibration = other.calibration + 1
    assert other.settings != first.settings
    (again,) = tiny(store=store).measure({"ToMe": tome(2)}).values()
    torch.testing.assert_close(again.kl, kept.kl, rtol=0, atol=0)
    assert torch.equal(again.r, kept.r) and again.seconds == kept.seconds


def test_a_model_with_another_head_does_not_reuse_what_was_measured(tmp_path):
    first = tiny(store=ResultStore(tmp_path))
    first.measure({"ToMe": tome(2)})
    other = tiny(store=ResultStore(tmp_path))
    weights = other.model.state_dict()
    noise = torch.randn(weights["head.weight"].shape, generator=torch.Generator().manual_seed(3))
    other.model.load_state_dict({**weights, "head.weight": noise})
    (reused,) = other.measure({"ToMe": tome(2)}).values()
    fresh = tiny()
    fresh.model.load_state_dict(other.model.state_dict())
    (expected,) = fresh.measure({"ToMe": tome(2)}).values()
    assert torch.equal(reused.kl, expected.kl)


def test_a_damaged_result_is_measured_again(tmp_path):
    tiny(store=ResultStore(tmp_path)).measure({"ToMe": tome(2)})
    for file in tmp_path.iterdir():
        file.write_bytes(b"half a fi")
    again = tiny(store=ResultStore(tmp_path)).measure({"ToMe": tome(2)})
    assert again["ToMe"].merged.tolist() == [6.0] * IMAGES


def test_the_unmerged_model_runs_once_for_many_recipes(monkeypatch):
    passes = counted(monkeypatch)
    experiment = tiny()
    experiment.measure({"a": tome(1), "b": tome(2)})
    experiment.measure({"c": tome(3), "again": tome(1)})
    assert sum(passes) == IMAGES * (1 + 2 + 1)
    assert experiment.unmerged.kl.abs().max() < 1e-6
    assert sum(passes) == IMAGES * 4


def test_merging_nothing_is_the_unmerged_model():
    experiment = tiny()
    (outcome,) = experiment.measure({"none": none()}).values()
    assert torch.equal(outcome.top1, experiment.unmerged.top1)
    assert outcome.kl.abs().max() < 1e-5
    assert outcome.gmacs == experiment.full_gmacs


def test_an_outcome_says_what_evaluate_says():
    from adamerge.evaluation import evaluate

    experiment = tiny()
    recipe = experiment.calibrated(adamerge(6))
    (outcome,) = experiment.measure({"it": recipe}).values()
    judged = evaluate(experiment.model, experiment.data, recipe, progress=False)
    assert torch.equal(outcome.top1, judged.top1) and torch.equal(outcome.r, judged.r)
    torch.testing.assert_close(outcome.kl, judged.kl, rtol=1e-3, atol=1e-5)
    assert torch.equal(outcome.paper, judged.cost.paper) and torch.equal(outcome.true, judged.cost.true)


def test_the_divergence_points_from_the_unmerged_to_the_merged_probabilities():
    experiment, (full, merged) = tiny(), torch.randn(2, 3, 10, generator=torch.Generator().manual_seed(0)).unbind()
    tally = experiment_module._Tally()
    tally.add(merged, full.log_softmax(1), torch.zeros(3).long(), torch.full((3, 3), 16))
    tally.seconds.append((3, 1.0))
    expected = judge(full, merged, torch.zeros(3).long())[4]
    assert expected.mean() > 0.1
    torch.testing.assert_close(tally.outcome(experiment.prices, none()).kl, expected, rtol=1e-4, atol=0)


def test_calibration_subsets_are_nested_and_of_the_size_asked_for():
    experiment = tiny()
    seen = [experiment.calibrated(adamerge(6), share=share).stats for share in (0.2, 0.4, 1.0)]
    assert [stats.images for stats in seen if stats is not None] == [2, 4, 10]
    assert seen[0] != seen[1]


def test_parts_come_in_the_order_of_the_report_and_unknown_ones_are_refused():
    assert choose(["layers", "table1"]) == ["table1", "layers"]
    assert choose(["all"]) == list(PARTS)
    with pytest.raises(BadOption, match=r"reproduce takes table1, .* or all; unknown: table9"):
        choose(["table9"])
    with pytest.raises(BadOption, match="none was given"):
        choose([])


def test_no_images_are_refused():
    experiment = tiny()
    experiment.data = []
    with pytest.raises(BadImages, match="no images to evaluate on"):
        experiment.measure({"ToMe": tome(1)})


def test_a_report_covers_only_parts_of_the_same_settings(tmp_path, monkeypatch):
    run(["proposition"], tiny(), tmp_path)
    other = tiny()
    other.names["data"] = "other images"
    monkeypatch.setitem(PARTS, "layers", lambda experiment, out: Section("layers", "Layer-wise"))
    run(["layers"], other, tmp_path)
    report = (tmp_path / "report.md").read_text()
    assert "Layer-wise" in report and "Proposition" not in report
    run(["proposition"], other, tmp_path)
    report = (tmp_path / "report.md").read_text()
    assert report.index("Layer-wise") < report.index("Proposition")


def test_calibration_images_are_one_percent_unless_there_is_a_folder_for_them():
    count, notes = _calibration_count(50_000, False, None)
    assert count == 500 and "500 images of the evaluation data itself" in notes[0] and "1 %" in notes[0]
    assert _calibration_count(3_000, False, None)[0] == 64
    assert _calibration_count(1_000, True, None) == (1_000, [])
    count, notes = _calibration_count(12_000, True, None)
    assert count == 2048 and "--calibration-images" in notes[0]
    assert _calibration_count(12_000, True, 5_000) == (5_000, [])
    with pytest.raises(BadOption, match="at least 2"):
        _calibration_count(100, True, 1)


def test_the_papers_tables_agree_with_each_other():
    """Table 2 is the difference of two columns of Table 1, and the deltas are to 85.19."""
    from adamerge.experiments.reproduce.table2 import PAPER_GAPS

    gaps = [tier.paper["AdaMerge"].top1 - tier.paper["ToMe"].top1 for tier in table1.TIERS]
    assert gaps == pytest.approx(PAPER_GAPS)
    for tier in table1.TIERS:
        for figures in tier.paper.values():
            assert 100 * (1 - figures.gmacs / 17.447) == pytest.approx(figures.cut, abs=0.11)


def test_a_bar_in_a_claim_does_not_break_the_table(done):
    sections, _ = done
    lines = [line for line in markdown(sections).splitlines() if "s_i-s_j" in line and line.startswith("|")]
    assert lines and all(line.replace("\\|", "").count("|") in (5, 6) for line in lines)
