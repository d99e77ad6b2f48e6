"""Decision and merge on the device are those of the reference, number for number."""

from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from awkward import DEVICE, layout, noise
from marks import mostly_slow
from torch import Tensor

from adamerge.core.budget import Fixed, Threshold
from adamerge.core.combine import BySize, MeanNorm
from adamerge.core.evidence import Evidence, Widths
from adamerge.core.plan import tally
from adamerge.core.recipe import Recipe
from adamerge.core.salience import ClassShare, scale_to_mean_one
from adamerge.core.stats import LayerStats
from adamerge.methods import adamerge, dymu, tome
from adamerge.presets import protect
from adamerge.runtime.block_view import NormParams
from adamerge.runtime.packed.layout import Layout, pad, ragged_layout
from adamerge.runtime.triton.kernels.affinity import affinity
from adamerge.runtime.triton.kernels.choice import Choice, ColumnSums, Rule
from adamerge.runtime.triton.kernels.decide import decide
from adamerge.runtime.triton.kernels.match import match
from adamerge.runtime.triton.kernels.merge import merge
from adamerge.runtime.triton.kernels.residual import add
from adamerge.runtime.triton.lowering import Lowered, lower

STATS = LayerStats((0.15,), (0.05,), (0.2,))
PROTECTED = LayerStats((-0.7,), (0.1,), (-0.7,))


@dataclass(frozen=True)
class GivenAttention(ClassShare):
    """The salience of the attention that `attention_by_head` gives, for padded images."""

    def __call__(self, evidence: Evidence) -> Tensor:
        assert evidence.count is not None
        where = ragged_layout(evidence.count.tolist(), evidence.prefix, DEVICE)
        return scale_to_mean_one(pad(attention_by_head(where).mean(0), where, where.most), evidence)


def attention_by_head(where: Layout) -> Tensor:
    """The attention that each token gets in two heads.  In the first image it is 0 everywhere."""
    given = noise(2, where.total, seed=5).abs()
    given[:, where.offsets[0] : where.offsets[1]] = 0
    return given


RECIPES = {
    "published": adamerge(9.5, STATS),
    "everything else": adamerge(
        9.5, STATS, affinity="cosine", split="alternating", direction="protecting", averaging="salience_size"
    ),
    "scaled, fixed": adamerge(r=3, affinity="scaled", averaging="size", direction="off"),
    "more than there are": adamerge(r=500),
    "fixed": replace(tome(2), site="before_block"),
    "threshold": replace(dymu(3.0, STATS), site="before_block"),
    "the preset": replace(protect(r=3.0), budget=Threshold(3.0, PROTECTED), salience=GivenAttention()),
    "the preset by size": replace(protect(0.5, static=True, r=3.0), weight=BySize(), salience=GivenAttention()),
    "no protection": replace(protect(0.0, static=True, r=500.0), salience=GivenAttention()),
}


@dataclass(frozen=True)
class TheTokens:
    """Compares the tokens, because these examples have no attention keys."""

    def __call__(self, evidence: Evidence) -> Tensor:
        return evidence.tokens

    def width(self, at: Widths) -> int:
        return at.dim


def decided(recipe: Recipe, x: Tensor, size: Tensor, where: Layout) -> tuple[Choice, Tensor]:
    """What the kernels decide, and the history they started from."""
    attention = attention_by_head(where) if isinstance(recipe.salience, GivenAttention) else None
    known = recipe if attention is None else replace(recipe, salience=ClassShare())
    lowered = lower(replace(known, site="after_attention") if _keys(known) else known, where.prefix, True)
    assert isinstance(lowered, Lowered)
    split, salience = lowered.policy.split, attention
    if lowered.affinity is None:
        features = torch.nn.functional.normalize(x, dim=1)
        value, partner = match(features, where, split)
    else:
        inverse = add(x, None, inverse=True)[2]
        assert inverse is not None
        parts, rows, value, partner = affinity(x, inverse, where, split, lowered.affinity)
        salience = ColumnSums(parts, rows)
    numbers = lowered.numbers(1, DEVICE)
    kind = "fixed" if numbers is None else "threshold" if numbers.shape[1] == 1 else "zscore"
    merges = lowered.budget.at(0) if isinstance(lowered.budget, Fixed) else 0
    rule = Rule(kind, merges, None if numbers is None else numbers[0])
    history = torch.arange(where.most, device=DEVICE).minimum(where.patches[:, None] - 1).clamp_min(0).int()
    return decide(value, partner, size, history, where, lowered.policy, rule, salience), history


def _keys(recipe: Recipe) -> bool:
    return type(recipe.links.metric).__name__ == "Keys"  # pyright: ignore[reportAttributeAccessIssue]


def expected(recipe: Recipe, x: Tensor, size: Tensor, where: Layout):
    if _keys(recipe):
        recipe = replace(recipe, links=replace(recipe.links, metric=TheTokens()))  # pyright: ignore
    raw = pad(x, where, where.most)
    evidence = Evidence(
        raw=raw, size=pad(size, where, where.most), layer=0, depth=1, prefix=where.prefix, count=where.patches.long()
    )
    return recipe.decide(evidence), evidence


# All recipes with short images, some with the 196 patches of a ViT.
SHORT = list(product(RECIPES, ["one", "edges", "no prefix", "registers"]))
LONG = list(product(RECIPES, ["vit"]))
LONG_ALWAYS = [("published", "vit"), ("threshold", "vit"), ("the preset", "vit")]


@pytest.mark.parametrize("recipe, name", mostly_slow(SHORT + LONG, SHORT + LONG_ALWAYS))
def test_plans_and_averages(recipe, name):
    recipe, where = RECIPES[recipe], layout(name)
    x, size = noise(where.total, 96) * 0.3, noise(where.total, seed=1).abs().mul(3).ceil()
    choice, history = decided(recipe, x, size, where)
    decision, evidence = expected(recipe, x, size, where)
    plan = decision.plan
    assert torch.equal(choice.count.long(), plan.count)
    slots = pad(choice.slot.long(), where, where.most, -1)
    valid = evidence.valid
    assert valid is not None and torch.equal(slots, torch.where(valid, plan.slot, -1))
    torch.testing.assert_close(choice.redundancy, decision.links.redundancy, rtol=1e-4, atol=1e-6)
    salience = pad(choice.salience, where, where.most)[valid]
    torch.testing.assert_close(salience, decision.salience[valid], rtol=1e-3, atol=1e-4)
    assert torch.equal(choice.history.long(), plan.slot.gather(1, history.long()))

    branch, norm = noise(where.total, 96, seed=2), NormParams(noise(96, seed=3), None, 1e-6)
    length = "mean" if isinstance(recipe.combine, MeanNorm) else None
    y, normed, new_size, logs, offsets = merge(x, size, where, choice, branch=branch, norm=norm, length=length)
    after = replace(where, offsets=offsets, longest=plan.width + where.prefix)
    summed = x + branch
    patches = recipe.combine(pad(summed, where, where.most), decision, evidence)
    real = torch.arange(plan.width, device=DEVICE) < plan.count[:, None]
    torch.testing.assert_close(pad(y, after, plan.width)[real], patches[real], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(pad(new_size, after, plan.width)[real], tally(evidence.size, plan)[real])
    end = int(offsets[-1])
    torch.testing.assert_close(logs[:end], new_size[:end].log2())
    assert normed is not None
    rows = torch.nn.functional.layer_norm(y[:end], (96,), norm.weight, None, 1e-6)
    torch.testing.assert_close(normed[:end], rows, rtol=1e-4, atol=1e-5)
    for image in range(where.images):
        old, new = int(where.offsets[image]), int(offsets[image])
        assert torch.equal(y[new : new + where.prefix], summed[old : old + where.prefix])


def test_tokens_that_do_not_merge_keep_every_bit():
    where = layout("edges")
    x = noise(where.total, 96)
    choice, _ = decided(RECIPES["published"], x, torch.ones_like(x[:, 0]), where)
    y, _, size, _, offsets = merge(x, torch.ones_like(x[:, 0]), where, choice)
    rows = {tuple(row.tolist()) for row in x}
    alone = size[: int(offsets[-1])] == 1
    assert alone.any() and all(tuple(row.tolist()) in rows for row in y[: int(offsets[-1])][alone])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # The interpreter's arithmetic is numpy's, which warns.
def test_an_image_that_is_not_a_number_merges_within_its_own_rows():
    where = layout("edges")
    clean = noise(where.total, 96)
    x = clean.clone()
    begin, end = where.offsets[:2].tolist()
    x[begin:end] = float("nan")
    for recipe in (RECIPES["published"], RECIPES["fixed"]):
        choice, _ = decided(recipe, x, torch.ones_like(x[:, 0]), where)
        other, _ = decided(recipe, clean, torch.ones_like(x[:, 0]), where)
        slots, expected_slots = (pad(each.slot, where, where.most, -1)[1:] for each in (choice, other))
        assert torch.equal(choice.count[1:], other.count[1:]) and torch.equal(slots, expected_slots)
        assert choice.count[0] == (other.count[0] if recipe is RECIPES["fixed"] else end - begin - where.prefix)
