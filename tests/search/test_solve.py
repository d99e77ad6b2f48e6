"""The solver meets its target for every method, says so where it cannot, and leaves the model as it found it."""

import re
from itertools import combinations, pairwise

import pytest
import torch
from hosts.families import build, pictures
from search.mean_cost import mean_cost

import adamerge
from adamerge.core.errors import BadImages, BadOption
from adamerge.flops import meter
from adamerge.methods import METHODS, tome
from adamerge.patching.apply import stack_of
from adamerge.search.solve import KnobCost, KnobCosts, _narrow, make_recipe, solve
from adamerge.search.target import Target
from adamerge.search.variants import VARIANTS, find_variant

# With 256 tokens one token more or less is a small step; the delay leaves a shallow model something to merge in.
OPTIONS = {"dsm": {"delay": 1}}
KNOBS = [name for name, method in METHODS.items() if method.knob is not None]


@pytest.fixture(scope="module")
def model():
    return build("vit", patch_size=4, depth=5)


@pytest.fixture(scope="module")
def images():
    return pictures(4)


@pytest.mark.parametrize("cost", ["true", "paper"])
@pytest.mark.parametrize("name", KNOBS)
def test_every_method_meets_its_target(model, images, name, cost):
    found = solve(model, images, METHODS[name], 0.25, cost=cost, options=OPTIONS.get(name))
    full = getattr(meter(model).unmerged(), cost).item()
    reached = mean_cost(model, images, found.recipe, cost)
    assert found.met
    assert reached == pytest.approx(0.75 * full, rel=0.005)
    assert found.gmacs == pytest.approx(reached / 1e9, rel=1e-6)
    assert found.cut == pytest.approx(1 - reached / full, abs=1e-6)
    assert found.target_cut == pytest.approx(0.25)


@pytest.mark.parametrize("name", KNOBS)
def test_the_cost_falls_from_gentle_to_strong(model, images, name):
    """Statistics move a little when the knob does, hence the slack for adaptive methods.

    A knob at which nothing merges costs the unmerged model: less than a few merges and their decisions may cost.
    """
    method = METHODS[name]
    costs_at = KnobCosts(model, images, method, "true", OPTIONS.get(name, {}), None)
    with torch.no_grad():
        steps = [method.gentle + share * (method.strong - method.gentle) for share in (0, 0.05, 0.1, 0.2, 0.5, 1)]
        costs = [costs_at.measure(step).macs for step in steps]
    adamerge.remove(model)
    slack = 1.01 if name in ("adamerge", "dymu", "ats") else 1.0
    if name in ("adamerge", "dsm", "dymu", "pitome", "random", "tofu", "tome", "vid_tldr"):
        assert method.gentle == 0 and costs[0] == costs_at.full
    else:
        assert costs[1] <= costs[0]
    assert all(later <= slack * before for before, later in pairwise(costs[1:]))
    assert costs[-1] < 0.9 * costs[0]


def test_a_cost_in_gmacs_is_the_same_as_the_cut_it_means(model, images):
    full = meter(model).unmerged().true.item() / 1e9
    assert solve(model, images, METHODS["tome"], Target(gmacs=0.7 * full)) == solve(
        model, images, METHODS["tome"], Target(cut=0.3)
    )


def test_options_pass_through_and_statistics_come_with_the_recipe(model, images):
    plain = solve(model, images, METHODS["tome"], 0.2, options={"proportional_attention": False})
    assert plain.knob is not None and plain.recipe == tome(plain.knob, proportional_attention=False)
    sequential = solve(model, images, METHODS["adamerge"], 0.2, how="sequential")
    assert sequential.recipe.stats is not None and sequential.recipe.stats.how == "sequential"


def test_fixed_budgets_run_on_one_image_and_adaptive_ones_on_all(model, images):
    seen: list[int] = []
    handle = model.patch_embed.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    solve(model, images, METHODS["tome"], 0.2)
    # The first image alone, and the blank one that prices are read with.
    assert set(seen) == {1}
    seen.clear()
    solve(model, images, METHODS["ats"], 0.3)
    assert len(images) in seen
    seen.clear()
    solve(model, images, METHODS["dsm"], 0.2, options={"delay": 1, "windows": True})
    assert len(images) in seen, "how many pairs share a window depends on the image"
    handle.remove()


def test_a_target_between_two_steps_gives_the_nearest_and_says_so(images):
    coarse = build("vit")
    found = solve(coarse, images, METHODS["evit"], 0.15, tolerance=0.001)
    assert not found.met
    assert abs(found.cut - 0.15) < 0.1
    wide = solve(coarse, images, METHODS["evit"], 0.15, tolerance=0.1)
    assert wide.met


class OneStep(KnobCosts):
    """A cost of 10 for a knob below a step, and of 4 from it on."""

    def __init__(self, step: float):
        self.step = step

    def measure(self, knob: float) -> KnobCost:
        return KnobCost(knob, tome(1), 10.0 if knob < self.step else 4.0)


@pytest.mark.parametrize("step", [0.15, 0.3, 0.7, 0.85])
def test_of_two_costs_on_either_side_the_nearer_is_taken_wherever_the_search_ends(step):
    costs = OneStep(step)
    for goal, nearer in ((9.0, 10.0), (5.0, 4.0)):
        assert _narrow(costs, costs.measure(0.0), costs.measure(1.0), goal, 0.001).macs == nearer


def test_what_is_out_of_reach_is_refused_with_what_is_in_reach(model, images):
    with pytest.raises(BadOption) as caught:
        solve(model, images, METHODS["dsm"], 0.5, options={"delay": 4})
    assert re.fullmatch(
        r"dsm cannot meet cut 50 % on this model: r from 0 to 98 reaches [\d.]+ to [\d.]+ GMACs in the true count "
        r"\(cuts of -?[\d.]+ % to [\d.]+ %\), and [\d.]+ are asked for; choose a target in between",
        str(caught.value),
    )
    with pytest.raises(BadOption, match=r"^tome cannot meet 100 GMACs on this model: r from 0 to 98 reaches "):
        solve(model, images, METHODS["tome"], Target(gmacs=100))


@pytest.mark.parametrize(
    ("target", "text"),
    [
        (dict(), "a target is either a cut or a cost; got cut=None and gmacs=None"),
        (dict(cut=0.1, gmacs=1.0), "a target is either a cut or a cost; got cut=0.1 and gmacs=1.0"),
        (dict(cut=1.0), "cut is the share of the cost to save and must be between 0 and 1; got 1.0"),
        (dict(cut=-0.1), "cut is the share of the cost to save and must be between 0 and 1; got -0.1"),
        (dict(cut=float("nan")), "cut must be a finite number; got nan"),
        (dict(gmacs=0.0), "gmacs is a cost and must be above 0; got 0.0"),
    ],
)
def test_targets_that_mean_nothing_are_refused(target, text):
    with pytest.raises(BadOption, match=f"^{re.escape(text)}$"):
        Target(**target)


def test_mistakes_are_named(model, images, unchecked):
    with pytest.raises(BadOption, match=r"^none has no knob that sets its cost and can meet no target; leave it out$"):
        solve(model, images, METHODS["none"], 0.2)
    with pytest.raises(BadOption, match=r"^cost must be one of true, paper; got 'false'$"):
        solve(model, images, METHODS["tome"], 0.2, cost="false")  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        BadOption, match=r"tome cannot be made with \{'q': 1, 'r': 0\}: .*unexpected keyword argument 'q'"
    ):
        solve(model, images, METHODS["tome"], 0.2, options={"q": 1})
    with pytest.raises(BadOption, match="there is no variant 'tomato'; choose from adamerge, "):
        find_variant("tomato")
    with pytest.raises(BadImages, match="there are no images to measure the cost on; pass at least one batch"):
        solve(model, [], METHODS["tome"], 0.2)


def test_the_model_is_left_as_it_was_found(images):
    model = adamerge.apply(build("vit", patch_size=8), tome(2)).train()
    blocks = model.blocks
    solve(model, images, METHODS["adamerge"], 0.2, tolerance=0.05)
    assert model.blocks is blocks and stack_of(model).recipe == tome(2)
    assert all(module.training for module in model.modules())


def test_the_variants_cover_every_method_and_no_two_are_the_same():
    assert {variant.method for variant in VARIANTS.values()} == set(METHODS) - {"none"}
    seen = []
    for variant in VARIANTS.values():
        method = METHODS[variant.method]
        seen.append(
            (make_recipe(method, {**variant.options, str(method.knob): method.gentle}), variant.method, variant.how)
        )
    assert all(one != other for one, other in combinations(seen, 2))
