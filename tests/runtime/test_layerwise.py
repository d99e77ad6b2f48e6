"""The layer-by-layer runner gives what the reference backend gives, one batch at a time."""

from dataclasses import dataclass, replace

import pytest
import torch
from hosts.families import DEPTH, build, pictures
from torch import Tensor

from adamerge.core.budget import Threshold, ZScore
from adamerge.core.errors import BadOption
from adamerge.core.evidence import Evidence
from adamerge.core.parts import part
from adamerge.core.recipe import Recipe
from adamerge.core.stats import LayerStats
from adamerge.core.types import PerToken
from adamerge.hosts.base import find_host
from adamerge.methods import adamerge, none, tome
from adamerge.patching.probes import embed
from adamerge.runtime import reference
from adamerge.runtime.layerwise import HostBlock, calibrate_layers, measure_unmerged, run_layers
from adamerge.search.evaluator import Evaluator

# Statistics with which an adaptive recipe reads the tokens and merges none.
UNREACHABLE = LayerStats((1e9,) * DEPTH, (1.0,) * DEPTH)
ADAPTIVE = {
    "before the block": adamerge(6.0),
    "after attention": replace(tome(0), budget=ZScore(6.0)),
    "thresholds": replace(tome(0), budget=Threshold(3.0)),
    "an idle layer": replace(tome(0), budget=Threshold((3.0, 0.0, 2.0))),
}


@pytest.fixture
def model():
    return build("vit").double()


@pytest.fixture
def states(model) -> list[reference.State]:
    with torch.no_grad():
        return [embed(find_host(model), model, batch)[0] for batch in pictures(5).double().split(2)]


@pytest.fixture
def blocks(model) -> list[HostBlock]:
    return [HostBlock(view) for view in find_host(model).views]


def stepped(state: reference.State, blocks: list[HostBlock], recipe: Recipe) -> reference.State:
    for block in blocks:
        state = reference.step(state, block.view, recipe, len(blocks))
    return state


def same(a: reference.State, b: reference.State) -> None:
    assert torch.equal(a.x, b.x) and torch.equal(a.size, b.size) and torch.equal(a.history.slot, b.history.slot)
    for one, other in zip(a.steps, b.steps, strict=True):
        assert torch.equal(one.redundancy, other.redundancy) and torch.equal(one.salience, other.salience)


@torch.no_grad()
@pytest.mark.parametrize("recipe", [none(), tome(3), adamerge(r=2.5), tome(0.5)], ids=["none", "tome", "ours", "idle"])
def test_every_batch_gets_what_it_gets_alone(states, blocks, recipe):
    for state, expected in zip(run_layers(states, blocks, recipe), states, strict=True):
        same(state, stepped(expected, blocks, recipe))


@torch.no_grad()
@pytest.mark.parametrize("recipe", ADAPTIVE.values(), ids=ADAPTIVE)
def test_a_calibrating_run_merges_as_the_calibrated_recipe_does(states, blocks, recipe):
    found, stats = calibrate_layers(states, blocks, recipe)
    for state, expected in zip(found, states, strict=True):
        same(state, stepped(expected, blocks, recipe.with_stats(stats)))


@torch.no_grad()
@pytest.mark.parametrize("name", ["before the block", "after attention"])
def test_measuring_merges_nothing_and_reads_what_a_merge_would_read(states, blocks, name):
    recipe = ADAPTIVE[name]
    looking = [stepped(state, blocks, recipe.with_stats(UNREACHABLE)) for state in states]
    assert all(step.plan.is_identity for state in looking for step in state.steps)
    expected = torch.cat([torch.stack([step.redundancy for step in state.steps], 1) for state in looking])
    measured = measure_unmerged(states, blocks, recipe)
    assert torch.equal(measured, expected) and measured.all()
    assert all(state.steps == () for state in states)


@torch.no_grad()
def test_measuring_leaves_idle_layers_out(states, blocks):
    recipe = replace(tome(0), budget=ZScore((6.0, 0.0, 0.5)))
    measured = measure_unmerged(states, blocks, recipe)
    assert measured[:, 0].all() and not measured[:, 1:].any()


@part
@dataclass(frozen=True)
class ByKeyLength:
    """A weight that reads the attention keys."""

    def __call__(self, evidence: Evidence, salience: PerToken) -> Tensor:
        return evidence.keys.norm(dim=-1)


@torch.no_grad()
def test_a_part_that_reads_keys_after_the_links_are_known_gets_them(states, blocks):
    recipe = replace(ADAPTIVE["thresholds"], weight=ByKeyLength())
    found, stats = calibrate_layers(states, blocks, recipe)
    for state, expected in zip(found, states, strict=True):
        same(state, stepped(expected, blocks, recipe.with_stats(stats)))


def test_a_sweep_of_the_tuner_gives_keys_to_a_part_that_reads_them(model):
    recipe = replace(ADAPTIVE["thresholds"], weight=ByKeyLength())
    images = list(pictures(5).double().split(2))
    assert Evaluator(model, images).sweep(recipe).counts.amin() < 16


@torch.no_grad()
def test_only_an_adaptive_recipe_is_calibrated(states, blocks):
    with pytest.raises(BadOption, match=r"only adaptive budgets have statistics; this recipe's is Fixed\(r=3"):
        calibrate_layers(states, blocks, tome(3))


@torch.no_grad()
def test_calibration_tells_of_every_layer_it_has_done(states, blocks):
    told: list[int] = []
    calibrate_layers(states, blocks, ADAPTIVE["an idle layer"], lambda: told.append(1))
    assert len(told) == DEPTH
