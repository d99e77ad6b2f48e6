"""Every method against loops that were written from its paper: plans and merged tokens of random images."""

import math
from collections.abc import Callable

import pytest
import torch
from methods import loops

from adamerge import LayerStats, methods
from adamerge.core.evidence import Evidence, Heads
from adamerge.core.match import Links
from adamerge.core.recipe import Recipe
from adamerge.search.families import protect

DEPTH, WIDTH, SIDE = 4, 13, 5


def noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def batch(layer: int, prefix: int, counts: tuple[int, ...], seed: int) -> Evidence:
    """Random images with tokens of several sizes; what is behind the last token of an image is large."""
    b, heads = len(counts), 2
    draw = torch.Generator().manual_seed(seed)
    count = torch.tensor(counts)
    padding = torch.arange(WIDTH) >= count[:, None]
    size = torch.randint(1, 4, (b, WIDTH), generator=draw).double().masked_fill(padding, 0)
    place = torch.stack([torch.randperm(SIDE * SIDE, generator=draw)[:WIDTH].sort().values for _ in counts])
    tokens = noise(b, WIDTH, 6, seed=seed).masked_fill(padding[..., None], 1e3)
    query, key, value = (noise(b, prefix + WIDTH, heads, 3, seed=seed + s) for s in (1, 2, 3))
    value = value * torch.linspace(0.2, 3, prefix + WIDTH)[torch.randperm(prefix + WIDTH, generator=draw), None, None]
    behind = torch.cat([torch.zeros(b, prefix, dtype=torch.bool), padding], 1)
    query, key, value = (x.masked_fill(behind[..., None, None], 1e3) for x in (query, key, value))
    bias = torch.cat([torch.zeros(b, prefix), size.clamp_min(1).log()], 1).masked_fill(behind, -math.inf)
    padded = len(set(counts)) > 1
    return Evidence(
        raw=tokens,
        size=size,
        layer=layer,
        depth=DEPTH,
        prefix=prefix,
        class_token=prefix > 0,
        count=count if padded else None,
        heads=Heads(query, key, value, 0.9, bias[:, None, None, :].double()),
        place=place,
        patches=SIDE * SIDE,
    )


def alone(evidence: Evidence, index: int) -> loops.Image:
    """One image of a batch, without its padding."""
    n, heads, prefix = int(evidence.counts[index]), evidence.heads, evidence.prefix
    assert heads is not None and heads.bias is not None and evidence.place is not None
    return loops.Image(
        tokens=evidence.raw[index, :n].tolist(),
        sizes=evidence.size[index, :n].tolist(),
        query=heads.query[index, : prefix + n].tolist(),
        key=heads.key[index, : prefix + n].tolist(),
        value=heads.value[index, : prefix + n].tolist(),
        bias=heads.bias[index, 0, 0, : prefix + n].tolist(),
        scale=heads.scale,
        prefix=prefix,
        layer=evidence.layer,
        depth=evidence.depth,
        places=evidence.place[index, :n].tolist(),
        side=SIDE,
    )


def thresholds(*values: float) -> LayerStats:
    return LayerStats((0.0,) * DEPTH, (1.0,) * DEPTH, values)


SIMILAR, NEAR = (0.5, 0.8, 0.6, 0.3), (-0.4, -0.2, -0.3, -0.6)
# The recipe, the loops, and whether images of a batch may have different numbers of tokens.
CASES: dict[str, tuple[Recipe, Callable[[loops.Image], list[loops.Group]], bool]] = {
    "tome": (methods.tome(4), lambda i: loops.tome(i, 4), True),
    "tome, all": (methods.tome(99), lambda i: loops.tome(i, 99), True),
    "dsm": (methods.dsm(3, 2), lambda i: loops.dsm(i, 3, 2, False), True),
    "dsm, windows": (methods.dsm(3, 1, windows=True), lambda i: loops.dsm(i, 3, 1, True), True),
    "dymu": (methods.dymu(3, thresholds(*SIMILAR)), lambda i: loops.dymu(i, SIMILAR[i.layer]), True),
    "tofu": (methods.tofu(4), lambda i: loops.tofu(i, 4), True),
    "pitome": (methods.pitome(3), lambda i: loops.pitome(i, 3, 0.9), True),
    "pitome, margin": (methods.pitome(2, margin=0.3), lambda i: loops.pitome(i, 2, 0.3), True),
    "pitome, ratio": (methods.pitome(ratio=0.7), lambda i: loops.pitome(i, 3, 0.9), False),
    "evit": (
        methods.evit(0.4),
        lambda i: loops.evit(i, 0.4 if i.layer in (1, 2, 3) else 1.0),
        False,
    ),
    "ats": (methods.ats(7), lambda i: loops.ats(i, 7, 0.25), True),
    "ats, later": (methods.ats(20, first=0.5), lambda i: loops.ats(i, 20, 0.5), True),
    "vid_tldr": (methods.vid_tldr(4), lambda i: loops.vid_tldr(i, 4), True),
    "preset": (
        protect(r=2.0).with_stats(thresholds(*NEAR)),
        lambda i: loops.protect(i, NEAR[i.layer], 0.75, True),
        True,
    ),
    "preset without a class token": (
        protect(r=2.0, class_token=False).with_stats(thresholds(*NEAR)),
        lambda i: loops.protect(i, NEAR[i.layer], 0.5, False),
        True,
    ),
}


def test_every_method_has_loops():
    elsewhere = {"adamerge", "random", "none"}
    assert set(methods.METHODS) - elsewhere <= {name.split(",")[0] for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_a_method_is_its_paper_written_as_loops(name):
    recipe, slow, ragged = CASES[name]
    merged = 0
    for layer in range(DEPTH):
        for prefix, counts in ((1, (13, 13)), (2, (13, 9, 2) if ragged else (13,))):
            evidence = batch(layer, prefix, counts, seed=10 * layer + prefix)
            decision = recipe.decide(evidence)
            found = recipe.combine(evidence.raw, decision, evidence)
            for index in range(len(counts)):
                groups = slow(alone(evidence, index))
                slots = {i: slot for slot, group in enumerate(groups) for i in group.members}
                n = counts[index]
                assert decision.plan.slot[index, :n].tolist() == [slots[i] for i in range(n)]
                assert decision.plan.count[index] == len(groups)
                expected = torch.tensor([group.token for group in groups], dtype=torch.float64)
                torch.testing.assert_close(found[index, : len(groups)], expected, rtol=1e-9, atol=1e-9)
                merged += n - len(groups)
    assert merged > 0


def test_evit_fuses_nothing_if_a_single_token_is_left_over():
    """Of 13 tokens 12 stay; the last one is the fused token already."""
    evidence = batch(2, 1, (13,), seed=0)
    assert methods.evit(0.9).decide(evidence).plan.is_identity


def test_thresholds_of_dymu_are_those_that_r_links_per_image_exceed():
    evidences = [batch(1, 1, (13, 13), seed=seed) for seed in (1, 2)]
    recipe = methods.dymu(2.5)
    links: list[Links] = [recipe.link(evidence)[1] for evidence in evidences]
    assert recipe.adaptive is not None
    threshold = recipe.adaptive.threshold(links, 1)
    similar = []
    for evidence in evidences:
        for index in range(2):
            image = alone(evidence, index)
            found = loops.most_similar(loops.head_means(image), *loops.tome_sides(image))
            similar += [similarity for similarity, _ in found.values()]
    assert sum(value > threshold for value in similar) == 10  # 2.5 in each of 4 images


@pytest.mark.parametrize("counts", [(13, 13), (13, 8, 1)])
def test_random_pairs_are_drawn_alike_for_every_image(counts):
    """Even tokens are sources, odd ones targets; an image with fewer tokens draws from its own targets."""
    evidence = batch(1, 1, counts, seed=0)
    links = methods.random(2).links(evidence, torch.ones_like(evidence.size))
    for index, n in enumerate(counts):
        sources = [i for i in range(0, n, 2)] if n > 1 else []
        assert links.source[index].nonzero().flatten().tolist() == sources
        assert all(links.partner[index, i] % 2 == 1 and links.partner[index, i] < n for i in sources)
    assert torch.equal(links.value[0], links.value[-1])
    assert links.value[0].unique().numel() == WIDTH, "the order is drawn, too"


def test_random_pairs_differ_between_layers_and_seeds_and_reach_every_target():
    def partners(layer: int, seed: int) -> list[int]:
        evidence = batch(layer, 1, (13,), seed=0)
        links = methods.random(2, seed=seed).links(evidence, torch.ones_like(evidence.size))
        return links.partner[0, ::2].tolist()

    drawn = [partners(layer, seed) for layer in range(DEPTH) for seed in range(8)]
    assert len({tuple(one) for one in drawn}) == len(drawn)
    assert {partner for one in drawn for partner in one} == {1, 3, 5, 7, 9, 11}
    assert partners(2, 3) == partners(2, 3)


def test_sizes_count_in_the_attention_where_the_paper_says_so():
    makers = {
        "adamerge": methods.adamerge(3.0),
        "tome": methods.tome(1),
        "pitome": methods.pitome(1),
        "dsm": methods.dsm(1),
        "tofu": methods.tofu(1),
        "evit": methods.evit(0.5),
        "ats": methods.ats(9),
        "dymu": methods.dymu(1),
        "vid_tldr": methods.vid_tldr(1),
        "random": methods.random(1),
        "none": methods.none(),
    }
    assert set(makers) == set(methods.METHODS)
    found = {name for name, recipe in makers.items() if recipe.proportional_attention}
    assert found == {"tome", "pitome", "dsm", "tofu", "dymu", "vid_tldr", "random"}
    for name in set(makers) - {"none"}:
        method = methods.METHODS[name]
        options = {str(method.knob): method.gentle}
        for wanted in (True, False):
            assert method(**options, proportional_attention=wanted).proportional_attention == wanted


def test_keeping_all_tokens_of_pitome_or_evit_decides_nothing():
    assert not methods.pitome(ratio=1.0).may_merge(0, DEPTH) and methods.pitome(ratio=0.99).may_merge(0, DEPTH)
    assert not methods.evit(1.0).may_merge(1, DEPTH) and methods.evit(0.99).may_merge(1, DEPTH)
    assert methods.dsm(1).budget == methods.dsm(1, 4).budget
    assert not methods.dsm(1).may_merge(3, 12) and methods.dsm(1).may_merge(4, 12)
