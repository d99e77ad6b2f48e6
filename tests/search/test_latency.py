"""A latency gives a cut, measured once.  Times are read off the costs here: no test waits for a clock."""

import json
from typing import Any

import pytest
from hosts.families import build, measured, pictures

from adamerge.core.errors import BadOption
from adamerge.core.recipe import Recipe
from adamerge.methods import adamerge as published
from adamerge.runtime.backend import Backend, BackendSelector, PackedBackend
from adamerge.search import latency
from adamerge.search.evaluator import Evaluator, SweepResult, gather_images
from adamerge.search.options import TuningOptions
from adamerge.search.scaling import sweep_preset
from adamerge.search.target import Target
from adamerge.search.tuner import TuningReport, tune_with_report

DEEP = 8


@pytest.fixture(scope="module")
def model():
    return build("vit", patch_size=8, depth=4)


@pytest.fixture(scope="module")
def deep():
    return build("vit", patch_size=8, depth=DEEP)


@pytest.fixture(scope="module")
def images():
    return pictures(12)


class Clock:
    """Takes the share of the cost for the share of the time, plus `overhead`; keeps the recipes that it timed."""

    def __init__(self, overhead: float = 0.1):
        self.overhead = overhead
        self.timed: list[Recipe] = []

    def __call__(self, evaluator: Evaluator, recipe: Recipe) -> float:
        self.timed.append(recipe)
        return evaluator.sweep(recipe, calibrate=False).macs.mean().item() / evaluator.full + self.overhead


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(latency, "relative_latency", clock)
    return clock


def report(model, images, **options) -> TuningReport:
    return tune_with_report(model, images, TuningOptions(progress=False, tries=2, **options))


def test_a_latency_out_of_reach_is_refused_with_what_was_measured(model, images, monkeypatch):
    monkeypatch.setattr(latency, "relative_latency", lambda evaluator, recipe: 1.25)
    with pytest.raises(
        BadOption, match=r"a latency ratio of 0\.0001 is out of reach on this device with 9 images at once: 1\.25"
    ):
        report(model, images, latency_ratio=0.0001)


def test_a_latency_within_reach_gives_a_cut(model, images, clock):
    evaluator = Evaluator(model, gather_images(model, images))
    assert latency.cut_for_latency(evaluator, 0.75) == pytest.approx(0.35, abs=0.03)
    assert all(recipe.ragged for recipe in clock.timed)


def test_a_static_recipe_is_timed_for_a_static_search(model, images, clock):
    """Static recipes run at other speeds than adaptive ones: their shapes are known beforehand."""
    found = report(model, images, latency_ratio=0.75, static=True)
    assert clock.timed and not any(recipe.ragged for recipe in clock.timed)
    assert found.cut == pytest.approx(0.35, abs=0.04)


def merging(recipe: Recipe) -> list[int]:
    return [layer for layer in range(DEEP) if recipe.may_merge(layer, DEEP)]


def test_where_decisions_take_long_fewer_blocks_merge(deep, images, monkeypatch):
    """Each block that merges takes 4 % of the unmerged time here."""
    clock, swept = Clock(0.0), []

    def sweep(evaluator: Evaluator, target: Target, static: bool, every: int) -> SweepResult:
        swept.append((sweep_preset(evaluator, target, static, every), target.cut, every))
        return swept[-1][0]

    monkeypatch.setattr(latency, "MERGE_EVERY", (1, 3))
    monkeypatch.setattr(latency, "relative_latency", lambda *given: clock(*given) + 0.04 * len(merging(given[1])))
    monkeypatch.setattr(latency, "sweep_preset", sweep)
    found = report(deep, images, latency_ratio=0.85)
    best, cut, every = min(swept, key=lambda each: each[0].loss.mean().item())
    assert [each[2] for each in swept] == [1, 3] and every == 3
    assert merging(found.recipe) == merging(best.recipe)
    assert found.cut == pytest.approx(cut, abs=0.01)


def test_a_schedule_that_cannot_be_fast_enough_is_passed_over(deep, images, monkeypatch):
    evaluator = Evaluator(deep, gather_images(deep, images))
    monkeypatch.setattr(latency, "relative_latency", lambda _, recipe: 0.7 if len(merging(recipe)) < 4 else 1.25)
    monkeypatch.setattr(latency, "CUTS", (0.1, 0.2))
    assert latency.schedule_for_latency(evaluator, 0.75) == (0.025, 3)


def test_merge_every_of_the_user_is_kept(deep, images, clock, tmp_path):
    journal = tmp_path / "tried.jsonl"
    found = report(deep, images, latency_ratio=0.85, merge_every=3, resume=journal).recipe
    assert all(0 < len(merging(recipe)) <= 5 for recipe in [found, *clock.timed])
    with pytest.raises(BadOption, match="is the journal of another search: it differs in merge_every"):
        report(deep, images, latency_ratio=0.85, merge_every=2, resume=journal)


def test_a_journal_of_an_older_version_has_the_cut_alone(model, images, clock, tmp_path):
    journal = tmp_path / "tried.jsonl"
    report(model, images, latency_ratio=0.75, resume=journal)
    head, measured_line, *rest = journal.read_text().splitlines()
    asked, (cut, _) = json.loads(measured_line)
    journal.write_text("\n".join([head, json.dumps([asked, cut]), *rest]) + "\n")
    clock.timed.clear()
    assert report(model, images, latency_ratio=0.75, resume=journal).cut == pytest.approx(cut, abs=0.01)
    assert clock.timed == []


def test_a_resumed_search_takes_the_cut_that_was_measured_from_its_journal(model, images, tmp_path, clock):
    """Times differ from run to run; measured again, the cut would, and the journal would be another search's."""
    journal = tmp_path / "tried.jsonl"
    first = report(model, images, latency_ratio=0.75, resume=journal)
    written, clock.overhead = journal.read_text(), 0.2
    clock.timed.clear()
    again = report(model, images, latency_ratio=0.75, resume=journal)
    assert clock.timed == [] and again.recipe == first.recipe
    assert journal.read_text() == written
    with pytest.raises(BadOption, match="is the journal of another search: it differs in target"):
        report(model, images, latency_ratio=0.8, resume=journal)


def test_a_search_that_stopped_right_after_measuring_has_its_cut_in_the_journal(model, images, tmp_path, clock):
    journal = tmp_path / "tried.jsonl"
    complete = report(model, images, latency_ratio=0.75, resume=journal)
    journal.write_text("".join(line + "\n" for line in journal.read_text().splitlines()[:2]))
    clock.timed.clear()
    assert report(model, images, latency_ratio=0.75, resume=journal).recipe == complete.recipe
    assert clock.timed == []


def test_the_backend_that_users_get_is_timed(model, images, monkeypatch):
    """On a CPU that is the packed one, for adaptive recipes too."""
    chosen: list[type] = []
    choose = BackendSelector.choose

    def choose_and_note(self: BackendSelector, *args: Any) -> Backend:
        backend = choose(self, *args)
        chosen.append(type(backend))
        return backend

    recipe = published(6.0, measured(model, images, published(6.0)))
    evaluator = Evaluator(model, gather_images(model, images))
    monkeypatch.setattr(BackendSelector, "choose", choose_and_note)
    assert latency.relative_latency(evaluator, recipe) > 0
    assert chosen == [PackedBackend] * latency.REPEATS
