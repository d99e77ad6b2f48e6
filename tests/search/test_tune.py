"""The tuner meets its budget, repeats exactly, goes on where it stopped and finds nothing worse than its start."""

import json
import re

import pytest
import torch
from hosts.families import build, pictures
from search.mean_cost import mean_cost

import adamerge
from adamerge import presets
from adamerge.core.errors import BadImages, BadOption
from adamerge.core.recipe import Recipe
from adamerge.flops import meter
from adamerge.patching.apply import stack_of
from adamerge.search.evaluator import Evaluator, gather_images
from adamerge.search.options import TuningOptions
from adamerge.search.tuner import TuningReport, tune_with_report

FINE = {"patch_size": 8, "depth": 4}


def report(model, images, cut: float | None = None, **options) -> TuningReport:
    """What tuning found, without a progress bar."""
    return tune_with_report(model, images, TuningOptions(cut=cut, progress=False, **options))


@pytest.fixture(scope="module")
def model():
    return build("vit", **FINE)


@pytest.fixture(scope="module")
def images():
    return pictures(12)


@pytest.fixture(scope="module")
def found(model, images):
    return report(model, images, 0.3, tries=12)


def tuned_on(images):
    return images[torch.arange(len(images)) % 4 != 3]


def test_the_cost_is_met_on_the_images_it_was_tuned_on(model, images, found):
    full = meter(model).unmerged().true.item()
    reached = mean_cost(model, tuned_on(images), found.recipe)
    assert reached == pytest.approx(0.7 * full, rel=0.006)
    assert found.gmacs == pytest.approx(reached / 1e9, rel=1e-3)
    assert found.images == 9 and found.check_images == 3


def test_sweeps_are_counted_and_one_sweep_calibrates(model, images):
    evaluator = Evaluator(model, [images])
    assert evaluator.sweeps == 0
    stats = evaluator.sweep(presets.best(model, images, cut=0.3)).recipe.stats
    assert evaluator.sweeps == 1 and stats is not None
    assert (stats.how, stats.passes) == ("sequential", 1)


def test_the_loss_is_the_divergence_of_the_applied_model(model, images, found):
    """The search sweeps layer by layer; what it promises is what `apply` then does."""
    with torch.no_grad():
        full = model(tuned_on(images)).double().log_softmax(1)
        adamerge.apply(model, found.recipe)
        merged = model(tuned_on(images)).double().log_softmax(1)
        adamerge.remove(model)
    kl = (full.exp() * (full - merged)).sum(1).mean().item()
    assert found.loss == pytest.approx(kl, rel=1e-3)


def test_the_same_seed_gives_the_same_recipe(model, images, found):
    again = report(model, images, 0.3, tries=12)
    assert again.recipe == found.recipe and again.loss == found.loss


def test_tuning_loses_no_more_than_the_preset(model, images, found):
    evaluator = Evaluator(model, gather_images(model, tuned_on(images)))
    untuned = evaluator.sweep(presets.best(model, tuned_on(images), 0.3), calibrate=False)
    assert found.loss <= 1.05 * untuned.loss.mean().item()


def test_a_stopped_search_goes_on_without_trying_again(model, images, tmp_path, found, monkeypatch):
    journal = tmp_path / "tried.jsonl"
    report(model, images, 0.3, tries=5, resume=journal)
    swept: list[object] = []
    plain = Evaluator.sweep
    monkeypatch.setattr(Evaluator, "sweep", lambda self, recipe, **k: swept.append(recipe) or plain(self, recipe, **k))
    known = {line for line in journal.read_text().splitlines()[1:]}
    finished = report(model, images, 0.3, tries=12, resume=journal)
    assert finished.recipe == found.recipe
    assert known <= set(journal.read_text().splitlines())
    # The last two sweeps calibrate the winner and check it.
    assert len(swept) - 2 == len(journal.read_text().splitlines()) - 1 - len(known)


def test_a_journal_of_another_search_is_refused(model, images, tmp_path):
    journal = tmp_path / "tried.jsonl"
    report(model, images, 0.3, tries=1, resume=journal)
    with pytest.raises(
        BadOption, match=r"is the journal of another search: it differs in target; give another file to resume from"
    ):
        report(model, images, 0.2, tries=1, resume=journal)
    journal.write_text("not a journal")
    with pytest.raises(BadOption, match="is not the journal of a search"):
        report(model, images, 0.3, tries=1, resume=journal)


def test_out_of_time_the_best_so_far_is_taken(model, images):
    quick = report(model, images, 0.3, time_limit=0)
    assert quick.tried == 1 and quick.cut == pytest.approx(0.3, abs=0.005)


@pytest.mark.parametrize("family", ["average_pool", "average_pool_with_class_token", "map_pool", "dinov2_registers"])
def test_models_without_class_token_or_with_other_heads_are_tuned(images, family):
    model = build(family, **FINE)
    found = report(model, images, 0.3, tries=4)
    assert found.cut == pytest.approx(0.3, abs=0.005)
    assert found.loss > 0


def test_a_backbone_is_tuned_by_its_features(images):
    model = build("dinov2_registers", num_classes=0, **FINE)
    evaluator = Evaluator(model, gather_images(model, images))
    assert evaluator.loss == "features" and evaluator.reads_patches
    found = report(model, images, 0.3, tries=3)
    assert 0 < found.loss < 1 and found.cut == pytest.approx(0.3, abs=0.005)


def test_merging_early_without_sizes_in_the_attention_is_tried(model, images, tmp_path):
    journal = tmp_path / "tried.jsonl"
    report(model, images, 0.3, tries=12, resume=journal)
    tried = [json.loads(line)[0] for line in journal.read_text().splitlines()[1:]]
    early = [recipe for recipe in tried if not recipe["proportional_attention"]]
    assert early
    for recipe in early:
        *rest, _ = recipe["budget"]["r"]
        assert rest == sorted(rest, reverse=True) and rest[-1] > 0


def test_the_last_layer_is_spared_only_where_the_head_reads_it(images):
    assert not Evaluator(build("vit"), [images]).reads_patches
    assert Evaluator(build("average_pool"), [images]).reads_patches
    assert Evaluator(build("average_pool_with_class_token"), [images]).reads_patches


def test_a_cost_may_be_given_in_gmacs_or_the_papers_count(model, images):
    full = meter(model).unmerged()
    found = report(model, images, gmacs=0.8 * full.true.item() / 1e9, tries=1)
    assert found.cut == pytest.approx(0.2, abs=0.005)
    paper = report(model, images, 0.2, cost="paper", tries=1)
    assert paper.gmacs == pytest.approx(0.8 * full.paper.item() / 1e9, rel=0.005)


def test_a_static_recipe_merges_the_same_number_in_every_image(model, images):
    found = report(model, images, 0.3, static=True, tries=4)
    assert found.cut == pytest.approx(0.3, abs=0.005) and found.check_cut == found.cut
    assert not found.recipe.ragged and found.recipe.stats is None
    adamerge.apply(model, found.recipe)
    with torch.no_grad():
        model(images)
    assert len(adamerge.trace(model).counts.unique(dim=0)) == 1
    adamerge.remove(model)
    assert not presets.best(model, images, 0.3, static=True).ragged


def test_the_model_is_left_as_it_was_found(images):
    model = adamerge.apply(build("vit", **FINE), adamerge.methods.tome(2)).train()
    blocks = model.blocks
    recipe = adamerge.tune(model, images, 0.3, tries=1, progress=False)
    assert model.blocks is blocks and stack_of(model).recipe == adamerge.methods.tome(2)
    assert all(module.training for module in model.modules())
    assert isinstance(recipe, Recipe) and recipe.stats is not None and recipe.stats.images == 9


def test_a_recipe_is_one_file_that_apply_takes(model, images, found, tmp_path):
    path = tmp_path / "recipe.json"
    found.recipe.save(path)
    assert Recipe.load(path) == found.recipe
    assert json.loads(path.read_text())["recipe"]["part"] == "Recipe"
    adamerge.apply(model, path)
    assert stack_of(model).recipe == found.recipe
    adamerge.apply(model, str(path))
    adamerge.remove(model)


def test_a_file_that_is_no_recipe_is_refused(model, tmp_path):
    with pytest.raises(BadOption, match=r"cannot read the recipe .*none\.json: .* Make it with `adamerge tune`"):
        adamerge.apply(model, tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(BadOption, match=r"bad\.json: unknown part None"):
        Recipe.load(tmp_path / "bad.json")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (dict(cut=0.3, gmacs=1.0), "give one of cut, gmacs and latency_ratio, to say what it may cost"),
        (dict(cut=1.5), "cut is the share of the cost to save and must be between 0 and 1; got 1.5"),
        (dict(gmacs=100.0), "100 GMACs is no saving: the unmerged model costs "),
        (dict(latency_ratio=2.0), "latency_ratio is a share of the unmerged time and must be between 0 and 1; got 2.0"),
        (dict(cost="half"), "cost must be one of true, paper; got 'half'"),
        (dict(merge_every=1.5), "merge_every must be a whole number >= 1: 2 merges at every second block; got 1.5"),
        (dict(tries=0), "tries must be a whole number >= 1; got 0"),
        (dict(time_limit=-1), "time_limit must be >= 0; got -1"),
        (dict(loss="l2"), "loss must be one of kl, features; got 'l2'"),
        (dict(cut=0.95), "but merging every second token at each layer still leaves "),
    ],
)
def test_mistakes_are_named(model, images, unchecked, options, text):
    with pytest.raises(BadOption, match=re.escape(text)):
        adamerge.tune(model, images, progress=False, **options)


def test_too_few_images_are_refused(model, images):
    with pytest.raises(BadImages, match="tuning needs at least 8 images, a few hundred are good; got 3"):
        adamerge.tune(model, images[:3])
    with pytest.raises(BadImages, match="there are no images to tune on"):
        adamerge.tune(model, [])
