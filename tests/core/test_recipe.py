"""A recipe decides as the paper's equations do, with all options."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import reference
import torch
from examples import AFFINITIES, AVERAGES, DIRECTIONS, OPTIONS, SPLITS, formula, noise, seeds, seen
from hypothesis import given, settings
from hypothesis import strategies as st

from adamerge.core.budget import Fixed, Keep, Threshold, ZScore
from adamerge.core.combine import Average, BySize, Drop
from adamerge.core.errors import BadOption
from adamerge.core.evidence import Evidence, Heads
from adamerge.core.match import Bipartite, Keys, SameWindow, Sequential, SimilarityOnly
from adamerge.core.plan import fold
from adamerge.core.recipe import Recipe
from adamerge.core.salience import Uniform
from adamerge.core.stats import LayerStats
from adamerge.methods import adamerge, ats, none, random, tofu, tome

STATS = LayerStats((0.3,), (0.1,))


def merged(recipe: Recipe, evidence: Evidence) -> torch.Tensor:
    decision = recipe.decide(evidence)
    return recipe.combine(evidence.raw, decision, evidence)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o.values()))
@settings(max_examples=8)
@given(
    n=st.integers(3, 9),
    d=st.integers(2, 5),
    r=st.none() | st.integers(1, 6),
    r_max=st.floats(1, 8),
    alpha=st.floats(-2, 2),
    temperature=st.floats(0.25, 4),
    seed=seeds,
)
def test_a_whole_merge_step_is_the_papers_written_as_loops(options, n, d, r, r_max, alpha, temperature, seed):
    x, size = noise(2, n, d, seed=seed), noise(2, n, seed=seed + 1).abs() * 3 + 1
    if r is None:
        recipe = adamerge(r_max, STATS, alpha=alpha, temperature=temperature, **options)
    else:
        recipe = adamerge(r=r, **options)
    evidence = seen(x, size=size)
    decision = recipe.decide(evidence)
    y = recipe.combine(x, decision, evidence)
    for image in range(2):
        expected = reference.merge(
            x[image].tolist(),
            size[image].tolist(),
            r=r,
            r_max=r_max,
            mean=0.3,
            std=0.1,
            alpha=alpha,
            temperature=temperature,
            **options,
        )
        assert decision.salience[image].tolist() == pytest.approx(expected.salience, abs=1e-6)
        assert decision.links.redundancy[image].item() == pytest.approx(expected.redundancy, abs=1e-6)
        assert decision.plan.count[image] == expected.count == n - expected.r
        assert decision.plan.slot[image].tolist() == expected.slot
        flat = [c for token in expected.tokens for c in token]
        assert y[image, : expected.count].flatten().tolist() == pytest.approx(flat, abs=1e-6)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("affinity", AFFINITIES)
@settings(max_examples=6)
@given(counts=st.lists(st.integers(3, 9), min_size=2, max_size=4), seed=seeds)
def test_an_image_gets_the_same_merge_alone_and_padded_in_a_batch(split, direction, affinity, counts, seed):
    """D14, with arbitrary values in the padding."""
    n = max(counts)
    recipe = adamerge(6.0, STATS, split=split, direction=direction, affinity=affinity, averaging="salience_size")
    images = [noise(1, c, 4, seed=seed + k) for k, c in enumerate(counts)]
    sizes = [noise(1, c, seed=seed + 50 + k).abs() + 1 for k, c in enumerate(counts)]
    x = torch.cat([torch.cat([i, 30 * noise(1, n - i.shape[1], 4, seed=seed + 99)], 1) for i in images])
    size = torch.cat([torch.nn.functional.pad(s, (0, n - s.shape[1])) for s in sizes])
    together = seen(x, count=torch.tensor(counts), size=size)
    decision, y = recipe.decide(together), merged(recipe, together)
    for image, (alone, own) in enumerate(zip(images, sizes, strict=True)):
        single = seen(alone, size=own)
        expected, token = recipe.decide(single), merged(recipe, single)
        count = int(expected.plan.count[0])
        assert decision.plan.count[image] == count
        assert decision.plan.slot[image].tolist() == expected.plan.slot[0].tolist() + [-1] * (n - counts[image])
        torch.testing.assert_close(y[image, :count], token[0, :count], atol=1e-9, rtol=1e-9)


def slots(recipe: Recipe) -> list[list[int]]:
    return recipe.decide(seen(formula())).plan.slot.tolist()


# Two images of nine tokens of four small whole numbers, and the slots they must get.
GOLDEN = [
    (dict(r=2), [[4, 0, 2, 1, 2, 3, 4, 5, 6], [6, 6, 0, 1, 2, 3, 4, 5, 6]]),
    (dict(r=3), [[3, 2, 1, 0, 1, 2, 3, 4, 5], [5, 5, 0, 3, 1, 2, 3, 4, 5]]),
    (dict(r=99), [[2, 1, 0, 2, 0, 1, 2, 3, 4], [4, 4, 1, 2, 0, 1, 2, 3, 4]]),
    (dict(r=0), [[0, 1, 2, 3, 4, 5, 6, 7, 8], [0, 1, 2, 3, 4, 5, 6, 7, 8]]),
    (dict(r=3, split="alternating"), [[1, 0, 0, 1, 2, 3, 1, 4, 5], [0, 0, 1, 2, 3, 4, 5, 5, 0]]),
    (dict(r=2, direction="protecting"), [[0, 1, 2, 4, 2, 3, 4, 5, 6], [6, 0, 1, 4, 2, 3, 4, 5, 6]]),
    (dict(r=2, direction="off"), [[0, 1, 2, 4, 2, 3, 4, 5, 6], [0, 6, 1, 4, 2, 3, 4, 5, 6]]),
    (dict(r=2, affinity="scaled"), [[4, 0, 2, 1, 2, 3, 4, 5, 6], [0, 6, 3, 1, 2, 3, 4, 5, 6]]),
    (dict(r=2, affinity="cosine"), [[4, 0, 2, 1, 2, 3, 4, 5, 6], [0, 6, 1, 4, 2, 3, 4, 5, 6]]),
    (
        dict(r=3, split="alternating", direction="protecting", affinity="cosine"),
        [[2, 0, 1, 2, 3, 3, 2, 4, 5], [0, 1, 3, 2, 2, 3, 4, 5, 1]],
    ),
    (dict(r_max=5.0, stats=STATS), [[2, 1, 0, 2, 0, 1, 2, 3, 4], [0, 7, 1, 2, 3, 4, 5, 6, 7]]),
    (dict(r_max=5.0, stats=STATS, temperature=0.1), [[2, 1, 0, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 7, 8]]),
    (
        dict(r_max=6.0, stats=STATS, split="alternating", direction="off"),
        [[1, 0, 0, 1, 2, 2, 1, 3, 3], [0, 0, 2, 1, 1, 2, 3, 3, 0]],
    ),
]


@pytest.mark.parametrize("options, expected", GOLDEN, ids=[str({**o, "stats": ""}) for o, _ in GOLDEN])
def test_the_plan_of_a_small_input_is_known(options, expected):
    assert slots(adamerge(**options)) == expected
    decision = adamerge(**options).decide(seen(formula()))
    assert decision.plan.count.tolist() == [max(row) + 1 for row in expected]


def test_the_partners_of_a_small_input_are_known():
    sequential, alternating = (
        adamerge(r=1, split=s).decide(seen(formula())).links for s in ("sequential", "alternating")
    )
    assert sequential.partner.tolist() == [[6, 5, 4, 6, 4, 5, 6, 7, 8], [8, 8, 5, 6, 4, 5, 6, 7, 8]]
    assert alternating.partner.tolist() == [[3, 1, 1, 3, 5, 5, 3, 7, 7], [1, 1, 5, 3, 3, 5, 7, 7, 1]]


def test_the_small_input_has_no_ties_that_rounding_could_decide():
    """A golden plan is worth something only where no two scores are close."""
    for options in OPTIONS:
        for image in formula().tolist():
            s = reference.salience(image, options["affinity"])
            _, score = reference.links(image, s, options["split"], options["direction"])
            ranked = sorted(score.values())
            assert all(b - a > 1e-6 or a == b == 0 for a, b in itertools.pairwise(ranked)), options


@pytest.mark.parametrize("options", [{}, dict(split="alternating", averaging="salience_size", affinity="cosine")])
def test_a_whole_merge_step_has_the_gradient_of_its_equation(options):
    recipe = adamerge(r=3, **options)
    x = noise(2, 8, 3, seed=3).requires_grad_()
    assert torch.autograd.gradcheck(lambda a: merged(recipe, seen(a)), (x,))


def test_the_gradient_of_a_padded_batch_is_finite_and_none_goes_into_the_padding():
    x = noise(2, 6, 3, seed=0).requires_grad_()
    evidence = seen(x, count=torch.tensor([4, 6]))
    merged(adamerge(6.0, LayerStats((0.0,), (0.1,))), evidence)[0, :2].square().sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()
    assert x.grad[0, :4].abs().sum() > 0
    assert (x.grad[0, 4:] == 0).all() and (x.grad[1] == 0).all()


@pytest.mark.parametrize("averaging", AVERAGES)
def test_the_gradient_is_finite_where_trained_tokens_leave_salience_almost_zero(averaging):
    """The dot products of trained tokens are far apart, so that softmax gives most tokens less than 1e-38."""
    length = torch.linspace(9, 20, 12)
    pairs = torch.cat([length[:, None], torch.eye(12)], 1)
    x = torch.cat([pairs, pairs])[None].requires_grad_()
    recipe = adamerge(r=12, averaging=averaging)
    merged(recipe, seen(x)).square().sum().backward()
    salience = recipe.salience(seen(x)).detach()
    assert ((salience > 0) & (salience < 1e-38)).any(), "the example has such tokens"
    assert x.grad is not None and x.grad.isfinite().all()


def test_published_adamerge_is_the_default():
    assert adamerge(9.0, STATS) == adamerge(
        9.0,
        STATS,
        alpha=1.0,
        temperature=1.0,
        affinity="dot",
        split="sequential",
        direction="published",
        averaging="salience",
        proportional_attention=False,
    )
    assert adamerge(9.0).site == "before_block" and adamerge(9.0).order == "kept"


def test_tome_is_what_its_paper_says():
    recipe = tome(8)
    assert recipe.site == "after_attention" and recipe.order == "sources_first" and recipe.proportional_attention
    assert recipe.salience == Uniform() and recipe.weight == BySize() and isinstance(recipe.links, Bipartite)
    assert recipe.links.metric == Keys() and recipe.budget == Fixed(8)
    assert not tome(8, proportional_attention=False).proportional_attention


def test_merging_nothing_is_a_recipe_too():
    x = noise(2, 7, 4, seed=0)
    heads = Heads(noise(2, 7, 2, 2, seed=1), noise(2, 7, 2, 2, seed=2), noise(2, 7, 2, 2, seed=3), 1.0)
    assert none().decide(replace(seen(x), heads=heads)).plan.is_identity


def test_pruning_keeps_the_survivors_as_they_are():
    x = noise(2, 9, 4, seed=0)
    recipe = replace(adamerge(r=3), combine=Drop())
    decision = recipe.decide(seen(x))
    y = recipe.combine(x, decision, seen(x))
    for image in range(2):
        assert torch.equal(y[image], x[image][decision.kept[image]])
    assert decision.kept.sum(1).tolist() == [6, 6]
    assert torch.equal(Average()(x, decision, seen(x)), fold(x, decision.plan, decision.weight))


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(split="random"), "split must be one of sequential, alternating; got 'random'"),
        (dict(direction="up"), "direction must be one of published, protecting, off; got 'up'"),
        (dict(averaging="mean"), "averaging must be one of salience, size, salience_size; got 'mean'"),
        (dict(affinity="l2"), "affinity must be one of dot, scaled, cosine; got 'l2'"),
    ],
)
def test_an_unknown_choice_is_refused_with_the_choices(unchecked, options, message):
    with pytest.raises(BadOption, match=message):
        adamerge(r=3, **options)


def test_either_r_or_r_max_must_be_given():
    with pytest.raises(BadOption, match=r"give either r_max \(adaptive\) or r \(fixed\); got r_max=None and r=None"):
        adamerge()
    with pytest.raises(BadOption, match=r"give either r_max \(adaptive\) or r \(fixed\); got r_max=9.0 and r=3"):
        adamerge(9.0, r=3)


@pytest.mark.parametrize(
    "name, value, choices",
    [("site", "after_mlp", "before_block, after_attention"), ("order", "random", "kept, sources_first")],
)
def test_an_unknown_site_or_order_is_refused(unchecked, name, value, choices):
    with pytest.raises(BadOption, match=f"{name} must be one of {choices}; got '{value}'"):
        replace(adamerge(r=3), **{name: value})


@pytest.mark.parametrize(
    "make, options, message",
    [
        (replace, {"salience": 3}, "the field 'salience' of Recipe must be a salience part; got 3"),
        (replace, {"combine": Uniform()}, r"the field 'combine' of Recipe must be a combine part; got Uniform\(\)"),
        (replace, {"budget": None}, "the field 'budget' of Recipe must be a budget part; got None"),
        (tome, {"proportional_attention": "false"}, "'proportional_attention' of Recipe must be true or false; got"),
        (adamerge, {"stats": 3}, "the field 'stats' of ZScore must be a LayerStats part or null; got 3"),
        (random, {"seed": 1.5}, "the field 'seed' of AtRandom must be a whole number; got 1.5"),
        (tofu, {"until": "a"}, "until, a share of the depth, must be a finite number; got 'a'"),
        (tofu, {"until": float("nan")}, "until, a share of the depth, must be a finite number; got nan"),
        (SameWindow, {}, "until, a share of the depth, must be <= 1; got 2"),
        (ats, {"first": 7}, "first, a share of the depth, must be <= 1; got 7"),
        (ats, {"first": -1}, "first, a share of the depth, must be >= 0; got -1"),
        (Keep, {"stages": (0.5, 1e308)}, r"a stage, a fraction of the depth, must be <= 1; got 1e\+308"),
    ],
)
def test_a_recipe_with_a_wrong_value_is_refused_where_it_is_made(unchecked, make: Any, options, message):
    first = {replace: tome(2), Keep: 0.5}.get(make, 2)
    with pytest.raises(BadOption, match=message):
        make(first, **options)


def test_statistics_can_be_exchanged_in_an_adaptive_recipe_only():
    assert adamerge(9.0).with_stats(STATS) == adamerge(9.0, STATS)
    assert adamerge(9.0, STATS).with_stats(None).stats is None
    assert adamerge(r=3).stats is None
    with pytest.raises(BadOption, match="only adaptive budgets have statistics; this recipe's is Fixed"):
        tome(3).with_stats(STATS)


def test_an_ablation_is_one_replace_away():
    """Adaptive counts with ToMe's links before the block would need keys there; the tokens do."""
    recipe = replace(adamerge(8.0, STATS), links=Bipartite(Sequential(), Keys(), SimilarityOnly()))
    with pytest.raises(BadOption, match="reads attention keys, which do not exist before the block"):
        recipe.decide(seen(formula()))
    assert replace(tome(4), budget=ZScore(8.0, STATS)).stats == STATS


def test_a_layer_that_merges_nothing_calls_no_part():
    """Parts that would fail without heads are not called."""
    late = replace(tome(3), budget=Fixed(3, delay=1))
    evidence = seen(noise(2, 6, 4, seed=0))
    assert [late.may_merge(layer, 2) for layer in range(2)] == [False, True]
    decision = late.decide(evidence)
    assert decision.plan.is_identity and not decision.links.source.any()
    scheduled = replace(tome(3), budget=Threshold((0.0, 2.0)))
    assert [scheduled.may_merge(layer, 2) for layer in range(2)] == [False, True]
    assert scheduled.decide(evidence).plan.is_identity
    adaptive = replace(tome(3), budget=ZScore((0.0, 2.0)))
    assert [adaptive.may_merge(layer, 2) for layer in range(2)] == [False, True]
    assert adaptive.decide(evidence).plan.is_identity


@pytest.mark.parametrize(
    "budget", [Fixed(0), Fixed((0.0,)), Fixed(0.5), ZScore(0.0), ZScore(0.9), Threshold(0.0)], ids=repr
)
def test_a_layer_that_merges_nothing_reads_no_token_however_its_budget_is_written(budget):
    """Without heads and without statistics: neither is needed."""
    decision = replace(tome(3), budget=budget).decide(seen(noise(2, 6, 4, seed=0)))
    assert decision.plan.is_identity and not decision.links.source.any()
    assert decision.links.redundancy.tolist() == [0.0, 0.0] and decision.salience.eq(1).all()


def test_a_decision_may_be_given_the_links_that_were_found_before():
    evidence, recipe = seen(formula()), adamerge(r=3)
    assert torch.equal(recipe.decide(evidence, recipe.link(evidence)).plan.slot, recipe.decide(evidence).plan.slot)
    measured = replace(recipe, budget=Fixed(0)).decide(evidence, recipe.link(evidence))
    assert measured.plan.is_identity
    assert torch.equal(measured.links.redundancy, recipe.decide(evidence).links.redundancy)


def test_padded_images_survive_a_layer_that_merges_nothing():
    evidence = seen(noise(2, 6, 4, seed=0), count=torch.tensor([4, 6]))
    plan = replace(tome(3), budget=Fixed(3, delay=1)).decide(evidence).plan
    assert plan.count.tolist() == [4, 6] and plan.slot[0].tolist() == [0, 1, 2, 3, -1, -1]


def test_a_recipe_from_json_decides_the_same():
    recipe = adamerge(7.0, STATS, split="alternating", direction="protecting")
    assert slots(Recipe.from_json(recipe.to_json())) == slots(recipe)
