"""The packed runtime in plain torch gives the reference's results, and layouts describe their arrays."""

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from hosts.families import FAMILIES, RECIPES, build, pictures
from hypothesis import given
from hypothesis import strategies as some

import adamerge
from adamerge.core.combine import BySalience, MeanNorm
from adamerge.core.evidence import Evidence
from adamerge.core.match import Bipartite, Tokens
from adamerge.core.recipe import Recipe
from adamerge.core.salience import Centrality, ClassAttention
from adamerge.core.types import PerToken
from adamerge.methods import adamerge as as_published
from adamerge.methods import ats, dsm, tofu, tome
from adamerge.presets import protect
from adamerge.runtime import reference
from adamerge.runtime.packed import products as by_products
from adamerge.runtime.packed.attention import attend_each
from adamerge.runtime.packed.forward import merge_on_cpu
from adamerge.runtime.packed.layout import pad, ragged_layout, round_up_rows, token_index, uniform_layout, unpad
from adamerge.runtime.packed.state import pack

CPU = torch.device("cpu")
# One combines padded tokens, one drops tokens, one keeps norms, one reads places, one compares keys and not the tokens
# that its salience reads.
MORE: dict[str, Recipe] = {
    "tofu": tofu(2),
    "ats": ats(9),
    "preset": protect(r=2.5),
    "dsm": dsm(2.5, 1),
    "centrality and keys": replace(tome(2), salience=Centrality("cosine"), weight=BySalience()),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_plans_and_outputs_are_those_of_the_reference(family, recipe):
    model, images = build(family), pictures(4)
    chosen = RECIPES[recipe](model, images)
    with torch.inference_mode():
        expected = adamerge.apply(model, chosen, "reference")(images)
        before = adamerge.trace(model)
        found = adamerge.apply(model, chosen, "packed")(images)
    after = adamerge.trace(model)
    assert torch.equal(before.r, after.r) and torch.equal(before.slots(), after.slots())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(after.layers, before.layers, strict=True):
        torch.testing.assert_close(ours.redundancy, theirs.redundancy, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("recipe", MORE)
@pytest.mark.parametrize("family", ["vit", "dinov2_registers"])
def test_every_combine_part_gives_the_results_of_the_reference(family, recipe):
    model, images, chosen = build(family), pictures(4), MORE[recipe]
    if recipe == "preset":
        chosen = chosen.with_stats(adamerge.calibrate(model, images, chosen, progress=False))
    with torch.inference_mode():
        expected = adamerge.apply(model, chosen, "reference")(images)
        before = adamerge.trace(model)
        found = adamerge.apply(model, chosen, "packed")(images)
    after = adamerge.trace(model)
    assert before.merged.sum() > 0 and torch.equal(before.slots(), after.slots())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(after.layers[-1].size, before.layers[-1].size)


@pytest.mark.parametrize("runtime", ["reference", "packed"])
@pytest.mark.parametrize("recipe", MORE)
def test_a_batch_without_images_gives_outputs_without_images(recipe, runtime):
    model, images, chosen = build("vit"), pictures(4), MORE[recipe]
    if recipe == "preset":
        chosen = chosen.with_stats(adamerge.calibrate(model, images, chosen, progress=False))
    with torch.inference_mode():
        expected = model(images[:0])
        found = adamerge.apply(model, chosen, runtime)(images[:0])
    assert found.shape == expected.shape == (0, expected.shape[1])
    trace = adamerge.trace(model)
    assert trace.counts.shape == trace.redundancy.shape == (0, len(trace.layers))
    assert trace.slots().shape == (0, trace.patches)
    assert str(trace) == f"0 images, {trace.patches} patch tokens + {trace.prefix} prefix"


@dataclass(frozen=True)
class OfChangedEvidence:
    """Salience of evidence that differs in one field from what the runtime gave."""

    after_attention: bool

    def __call__(self, evidence: Evidence) -> PerToken:
        changed = replace(evidence, layer=0)
        assert torch.equal(changed.tokens, evidence.tokens) and changed.layer == 0
        if not self.after_attention:
            return Centrality()(changed)
        assert evidence.heads is not None
        return ClassAttention()(replace(changed, heads=replace(evidence.heads, scale=1.0)))

    def macs(self, n: torch.Tensor, at: object) -> torch.Tensor:
        return 0 * n


@pytest.mark.parametrize("after_attention", [False, True])
def test_a_part_may_replace_fields_of_the_evidence(after_attention):
    model, images = build("vit"), pictures(4)
    chosen = replace(as_published(r_max=4), salience=OfChangedEvidence(after_attention))
    chosen = replace(chosen, site="after_attention" if after_attention else "before_block")
    chosen = chosen.with_stats(adamerge.calibrate(model, images, chosen, progress=False))
    with torch.inference_mode():
        expected = adamerge.apply(model, chosen, "reference")(images)
        before = adamerge.trace(model)
        found = adamerge.apply(model, chosen, "packed")(images)
    assert before.merged.sum() > 0 and torch.equal(before.slots(), adamerge.trace(model).slots())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("length", [8.0, 1e4, 1e30])
def test_the_mean_of_opposite_tokens_is_not_rescaled(length):
    """A mean without a direction: the factor that would restore the length is infinite, and 0 times it is NaN."""
    recipe = replace(tome(1), site="before_block", combine=MeanNorm())
    assert isinstance(recipe.links, Bipartite)
    recipe = replace(recipe, links=replace(recipe.links, metric=Tokens()))
    # Two patch tokens in each image, behind a class token of ones: the first becomes part of the second.
    patches = [[[length, 0], [-length, 0]], [[length, 2e-38], [-length, 2e-38]], [[3, 4], [5, 0]]]
    x = torch.cat([torch.ones(3, 1, 2), torch.tensor(patches)], 1)
    found = merge_on_cpu(pack(x, 1), recipe, 1)
    # Rescaled from (4, 2) to the mean length of 5.
    expected = torch.tensor([[0, 0], [0, 2e-38], [20**0.5, 5**0.5]])
    assert found.layout.counts == [1, 1, 1]
    torch.testing.assert_close(found.x[1::2], expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(found.x, reference.merge(reference.start(x, 1), recipe, 1).x.flatten(0, 1))


@given(some.lists(some.integers(1, 70), min_size=1, max_size=4), some.booleans(), some.booleans())
def test_attention_stays_within_an_image_however_it_is_computed(lengths, biased, products):
    where, random = ragged_layout([n - 1 for n in lengths], 1, CPU), torch.Generator().manual_seed(sum(lengths))
    query, key, value = torch.randn(3, round_up_rows(where.total), 3, 8, generator=random, dtype=torch.float64)
    size = 1 + torch.rand(len(query), generator=random).double() if biased else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(by_products, "MOST_TOKENS_BY_PRODUCTS", 256 if products else 0)
        found = attend_each(query, key, value, where, 0.3, size)
    for begin, end in pairwise(where.offsets.tolist()):
        q, k, v = (side[begin:end].transpose(0, 1) for side in (query, key, value))
        weights = (0.3 * q @ k.mT).exp() * (1 if size is None else size[begin:end])
        expected = weights / weights.sum(-1, keepdim=True) @ v
        torch.testing.assert_close(found[begin:end], expected.transpose(0, 1))
    assert len(found) == len(query) and not found[where.total :].any()


@given(some.lists(some.integers(0, 9), min_size=1, max_size=5), some.integers(0, 3))
def test_unpad_undoes_pad(counts, prefix):
    where = replace(ragged_layout(counts, prefix, CPU), prefix=0)
    rows = torch.arange(2 * where.total).view(-1, 2)
    assert torch.equal(unpad(pad(rows, where, where.longest, -1), token_index(where)), rows)


@given(some.lists(some.integers(0, 9), min_size=1, max_size=5), some.integers(0, 3))
def test_pad_copies_every_patch_and_no_prefix_token(counts, prefix):
    where = ragged_layout(counts, prefix, CPU)
    assert where.total == sum(counts) + prefix * len(counts) and where.longest == max(counts) + prefix
    assert where.patches.tolist() == counts and where.uniform == (len(set(counts)) == 1)
    rows = pad(torch.arange(where.total), where, where.most, -1)
    for image, count in enumerate(counts):
        begin = int(where.offsets[image]) + prefix
        assert rows[image].tolist() == [*range(begin, begin + count), *[-1] * (where.most - count)]


def test_rows_are_rounded_up_by_few_and_take_few_values():
    found = {total: round_up_rows(total) for total in range(20_000)}
    assert all(0 <= rows - total <= max(7, total / 50) for total, rows in found.items())
    # oneDNN caches 1,024 compiled products; a block needs four for each number of rows.
    assert len({rows for total, rows in found.items() if total <= 1576}) <= 170


def test_a_uniform_layout_equals_the_ragged_layout_of_equal_counts():
    assert torch.equal(uniform_layout(3, 5, 1, CPU).offsets, ragged_layout([4, 4, 4], 1, CPU).offsets)


def test_one_image_in_the_memory_layout_of_a_convolution_becomes_rows():
    tokens = torch.randn(2, 8, 5).mT
    assert pack(tokens, 0).x.is_contiguous()
    assert pack(tokens[:1], 0).x.is_contiguous()
    assert torch.equal(pack(tokens[:1], 0).x, tokens[0])
