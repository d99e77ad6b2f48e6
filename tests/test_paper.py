"""The paper's claims, each recomputed: ToMe as a special case, Proposition 1, the published costs, whole networks."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from core import reference
from hosts.families import build, measured, pictures
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

import adamerge
from adamerge.core.budget import Fixed
from adamerge.core.combine import BySize
from adamerge.core.evidence import Evidence, Heads
from adamerge.core.recipe import Recipe
from adamerge.core.salience import Uniform
from adamerge.flops import meter
from adamerge.methods import adamerge as published
from adamerge.methods import tome


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- C1: ToMe is the case of uniform salience -----------------------------------------------------------------------


def adamerge_as_tome(r: int) -> Recipe:
    """AdaMerge, without salience or adaptivity, at ToMe's place with ToMe's links."""
    like = tome(r)
    return replace(
        published(r=r),
        site=like.site,
        salience=Uniform(),
        links=like.links,
        budget=Fixed(r),
        order=like.order,
        proportional_attention=like.proportional_attention,
        weight=BySize(),
    )


@pytest.mark.parametrize("family", ["vit", "deit_distilled", "dinov2_registers", "average_pool"])
@pytest.mark.parametrize("r", [1, 3, 99])
def test_adamerge_without_salience_or_adaptivity_is_tome_on_a_model(family, r):
    model, images = build(family), pictures()
    outcomes = []
    for recipe in (tome(r), adamerge_as_tome(r)):
        with torch.no_grad():
            out = adamerge.apply(model, recipe)(images)
        outcomes.append((out, [layer.plan for layer in adamerge.trace(model).layers]))
    (a, plans_a), (b, plans_b) = outcomes
    assert torch.equal(a, b)
    for one, other in zip(plans_a, plans_b, strict=True):
        assert torch.equal(one.slot, other.slot) and torch.equal(one.count, other.count)


@pytest.mark.parametrize("seed", range(5))
def test_weighting_by_a_uniform_salience_changes_no_plan(seed):
    """The weaker half of C1 on plain features: AdaMerge's score with salience 1 ranks by similarity alone."""
    x = noise(3, 12, 6, seed=seed)
    evidence = Evidence(raw=x, size=torch.ones(3, 12, dtype=torch.float64), layer=0, depth=1)
    uniform = replace(published(r=4), salience=Uniform()).decide(evidence)
    similar = published(r=4, direction="off").decide(evidence)
    assert torch.equal(uniform.plan.slot, similar.plan.slot)
    assert not torch.equal(published(r=4).decide(evidence).plan.slot, similar.plan.slot)


# --- ToMe, written again from its description -----------------------------------------------------------------------


def slow_tome(key: Tensor, size: Tensor, r: int, protected: int) -> list[list[int]]:
    """One image: which old tokens each new token is made of, in ToMe's order, prefix included.

    Even tokens are sources, odd ones destinations, counted from the first token of the sequence; the first token (and
    the distillation token, which is odd) takes no part; the r most similar pairs merge; sources that stay come first.
    """
    tokens = len(key)
    k = key.mean(1)
    k = k / k.norm(dim=-1, keepdim=True)
    sources = [i for i in range(0, tokens, 2) if i >= protected]
    targets = [j for j in range(1, tokens, 2) if j >= protected]
    pairs = []
    for i in sources:
        if targets:
            similarity = [float(k[i] @ k[j]) for j in targets]
            best = max(range(len(targets)), key=lambda t: (similarity[t], -t))
            pairs.append((-similarity[best], i, targets[best]))
    chosen = sorted(pairs)[: min(r, (tokens - protected) // 2)]
    gone = {i: j for _, i, j in chosen}
    front = list(range(protected))
    order = front + [i for i in sources if i not in gone] + targets
    return [[t] + [i for i, j in gone.items() if j == t] for t in order]


def slow_tome_network(model: Any, image: Tensor, r: int, proportional: bool) -> tuple[Tensor, list[int]]:
    """A class-token model with ToMe between attention and MLP of every block, one image, written as a loop."""
    x = model.norm_pre(model._pos_embed(model.patch_embed(image[None])))[0]
    size, counts = torch.ones(len(x), dtype=x.dtype), []
    protected = model.num_prefix_tokens
    for block in model.blocks:
        attn = block.attn
        qkv = attn.qkv(block.norm1(x)).reshape(len(x), 3, attn.num_heads, attn.head_dim)
        q, k, v = attn.q_norm(qkv[:, 0]), attn.k_norm(qkv[:, 1]), qkv[:, 2]
        heads = []
        for h in range(attn.num_heads):
            scores = q[:, h] @ k[:, h].T / attn.head_dim**0.5
            if proportional:
                scores = scores + size.log()
            heads.append(scores.softmax(-1) @ v[:, h])
        x = x + block.ls1(attn.proj(torch.cat(heads, -1)))
        groups = slow_tome(k, size, r, protected)
        weights = [size[g] / size[g].sum() for g in groups]
        x = torch.stack([(w[:, None] * x[g]).sum(0) for g, w in zip(groups, weights, strict=True)])
        size = torch.stack([size[g].sum() for g in groups])
        counts.append(len(x) - protected)
        x = x + block.ls2(block.mlp(block.norm2(x)))
    return model.forward_head(model.norm(x)[None])[0], counts


@pytest.mark.parametrize("family", ["vit", "deit_distilled", "deit3", "dinov2_registers", "qk_norm"])
@pytest.mark.parametrize("proportional", [True, False], ids=["proportional", "equal"])
@pytest.mark.parametrize("r", [2, 5])
def test_tome_is_tome_as_described_in_its_paper(family, proportional, r):
    """Three layers, so that a wrong order of tokens shows in the next layer's parity; in float64."""
    model, images = build(family).double(), pictures().double()
    with torch.no_grad():
        expected = [slow_tome_network(model, image, r, proportional) for image in images]
        out = adamerge.apply(model, tome(r, proportional_attention=proportional))(images)
    assert adamerge.trace(model).counts.tolist() == [counts for _, counts in expected]
    torch.testing.assert_close(out, torch.stack([logits for logits, _ in expected]), atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("prefix", [0, 1, 2])
@pytest.mark.parametrize("patches", [1, 2, 7, 8])
@pytest.mark.parametrize("r", [1, 3])
def test_tomes_groups_on_random_keys(prefix, patches, r):
    """`r` within ToMe's bound, half of the unprotected tokens."""
    r = min(r, patches // 2)
    key = noise(4, prefix + patches, 2, 3, seed=patches)
    evidence = Evidence(
        raw=noise(4, patches, 6, seed=1),
        size=torch.ones(4, patches, dtype=torch.float64),
        layer=0,
        depth=1,
        prefix=prefix,
        heads=Heads(key, key, key, 1.0),
    )
    plan = tome(r).decide(evidence).plan
    for image in range(4):
        groups = slow_tome(key[image], torch.ones(prefix + patches), r, prefix)[prefix:]
        expected = [next(s for s, g in enumerate(groups) if prefix + i in g) for i in range(patches)]
        if r > 0:
            assert plan.slot[image].tolist() == expected
        assert plan.count[image] == len(groups)


@pytest.mark.parametrize("prefix", [0, 1, 2])
@pytest.mark.parametrize("patches", [2, 7, 15])
def test_tome_never_merges_more_than_half_of_the_unprotected_tokens(prefix, patches):
    """Its own bound: r <= (tokens - protected) // 2."""
    key = noise(2, prefix + patches, 2, 3, seed=0)
    evidence = Evidence(
        raw=noise(2, patches, 6, seed=1),
        size=torch.ones(2, patches, dtype=torch.float64),
        layer=0,
        depth=1,
        prefix=prefix,
        heads=Heads(key, key, key, 1.0),
    )
    assert tome(99).decide(evidence).plan.count.tolist() == [patches - patches // 2] * 2


# --- AdaMerge's whole network, written again ------------------------------------------------------------------------


def slow_network(model: Any, image: Tensor, recipe: Recipe, **options) -> tuple[Tensor, list[int]]:
    """A class-token model with AdaMerge before every block, one image, merges by the loops of `reference`."""
    stats, prefix = recipe.stats, model.num_prefix_tokens
    x = model.norm_pre(model._pos_embed(model.patch_embed(image[None])))[0]
    size, r = torch.ones(len(x) - prefix, dtype=x.dtype), []
    for layer, block in enumerate(model.blocks):
        at = {} if stats is None else dict(mean=stats.mean[layer], std=stats.std[layer])
        step = reference.merge(x[prefix:].tolist(), size.tolist(), **at, **options["merge"])
        r.append(step.r)
        x = torch.cat([x[:prefix], torch.tensor(step.tokens, dtype=x.dtype)])
        size = torch.stack([size[torch.tensor(step.slot) == s].sum() for s in range(step.count)])
        attn = block.attn
        qkv = attn.qkv(block.norm1(x)).reshape(len(x), 3, attn.num_heads, attn.head_dim)
        q, k, v = attn.q_norm(qkv[:, 0]), attn.k_norm(qkv[:, 1]), qkv[:, 2]
        extra = torch.cat([torch.ones(prefix), size]).log() if options["proportional"] else torch.zeros(len(x))
        heads = [
            (q[:, h] @ k[:, h].T / attn.head_dim**0.5 + extra).softmax(-1) @ v[:, h] for h in range(attn.num_heads)
        ]
        x = x + block.ls1(attn.proj(torch.cat(heads, -1)))
        x = x + block.ls2(block.mlp(block.norm2(x)))
    return model.forward_head(model.norm(x)[None])[0], r


PUBLISHED = dict(affinity="dot", split="sequential", direction="published", averaging="salience")
NETWORKS = {
    "published": (PUBLISHED, False),
    "flipped": (dict(affinity="cosine", split="alternating", direction="protecting", averaging="salience_size"), True),
    "by size": ({**PUBLISHED, "averaging": "size", "direction": "off", "affinity": "scaled"}, True),
}


@pytest.mark.parametrize("family", ["vit", "deit_distilled", "deit3", "dinov2", "qk_norm", "pre_norm"])
@pytest.mark.parametrize("options, proportional", NETWORKS.values(), ids=NETWORKS)
def test_adamerge_is_the_paper_written_as_loops_through_the_whole_network(family, options, proportional):
    """In float64, each image by itself, adaptive counts; the library runs them as one batch."""
    model, images = build(family).double(), pictures(4).double()
    knobs = dict(alpha=1.5, temperature=0.8)
    shape = published(6.0, **knobs, **options, proportional_attention=proportional)
    recipe = shape.with_stats(measured(model, images, shape))
    with torch.no_grad():
        expected = [
            slow_network(model, i, recipe, merge={**options, **knobs, "r_max": 6.0}, proportional=proportional)
            for i in images
        ]
        out = adamerge.apply(model, recipe)(images)
    assert adamerge.trace(model).r.tolist() == [r for _, r in expected]
    assert adamerge.trace(model).r.double().std() > 0
    torch.testing.assert_close(out, torch.stack([logits for logits, _ in expected]), atol=1e-8, rtol=1e-8)


# --- Proposition 1 --------------------------------------------------------------------------------------------------


def gap(x: Tensor, y: Tensor, s: float, t: float) -> float:
    """How much more the plain mean loses than the salience-weighted one: s|x-m|² + t|y-m|²."""

    def loss(m: Tensor) -> float:
        return float(s * (x - m).square().sum() + t * (y - m).square().sum())

    return loss((x + y) / 2) - loss((s * x + t * y) / (s + t))


@pytest.mark.parametrize("s, t", [(1.0, 0.0), (0.9, 0.1), (0.3, 0.7), (0.5, 0.5), (0.01, 0.02)])
def test_proposition_one_holds_with_its_exact_constant(s, t):
    """(s-t)² / 4(s+t) · |x-y|², with no remainder."""
    x, y = noise(8, seed=1), noise(8, seed=2)
    distance = float((x - y).square().sum())
    assert gap(x, y, s, t) == pytest.approx((s - t) ** 2 / (4 * (s + t)) * distance, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("s, t", [(1.0, 0.0), (0.9, 0.1), (0.3, 0.7)])
def test_the_papers_leading_term_is_twice_the_gap_of_the_normalised_loss(s, t):
    """The paper says (s-t)² / 2(s+t)² · |x-y|² plus a remainder; it is half of that and there is no remainder."""
    x, y = noise(8, seed=1), noise(8, seed=2)
    leading = (s - t) ** 2 / (2 * (s + t) ** 2) * float((x - y).square().sum())
    assert leading / (gap(x, y, s, t) / (s + t)) == pytest.approx(2, rel=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_the_salience_weighted_mean_is_the_best_of_all_tokens(seed):
    """What the weights are for: no other merged token has a smaller loss."""
    x, y = noise(5, seed=seed), noise(5, seed=seed + 50)
    s, t = 0.8, 0.15
    best = (s * x + t * y) / (s + t)

    def loss(m: Tensor) -> float:
        return float(s * (x - m).square().sum() + t * (y - m).square().sum())

    for other in range(20):
        assert loss(best) < loss(best + 0.01 * noise(5, seed=100 + other))


# --- costs ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vit_base():
    """The prices of ViT-B/16; its parameters take no memory."""
    return meter(VisionTransformer(depth=12).eval())


def counts_of(r: int) -> Tensor:
    return 196 - r * torch.arange(1, 13)[None]


PAPER = {3: 15.93, 4: 15.43, 5: 14.93, 6: 14.43, 7: 13.94, 8: 13.44}


def test_the_unmerged_cost_is_the_papers(vit_base):
    assert vit_base.unmerged().paper.item() / 1e9 == pytest.approx(17.447, abs=5e-4)


@pytest.mark.parametrize("r, giga", PAPER.items())
def test_the_papers_costs_of_tome_come_out_to_the_digit(vit_base, r, giga):
    assert f"{vit_base.cost(counts_of(r), tome(r)).paper.item() / 1e9:.2f}" == f"{giga:.2f}"


def true_blocks(r: int) -> int:
    """ToMe's blocks by hand: attention at n tokens, MLP at n - r."""
    n, d, total = 197, 768, 0
    for _ in range(12):
        total += 4 * n * d * d + 2 * n * n * d + 8 * (n - r) * d * d
        n -= r
    return total


def matching(r: int) -> int:
    """Keys of 64 channels, every even token with every odd one, the prefix left out."""
    n, total = 196, 0
    for _ in range(12):
        total += (n // 2) * (n - n // 2) * 64
        n -= r
    return total


def test_tome_really_costs_less_than_the_paper_says():
    assert f"{true_blocks(3) / 1e9:.2f}" == "15.76"
    assert f"{true_blocks(8) / 1e9:.2f}" == "12.99"


@pytest.mark.parametrize("r", range(9))
def test_the_true_cost_is_blocks_embedding_head_and_decision(vit_base, r):
    embedding, head = 196 * (16 * 16 * 3) * 768, 768 * 1000
    # A recipe that merges nothing decides nothing.
    expected = true_blocks(r) + embedding + head + (matching(r) if r else 0)
    assert vit_base.cost(counts_of(r), tome(r)).true.item() == expected


@pytest.mark.parametrize("r", [0, 4, 13])
def test_adamerge_pays_for_its_affinity_and_its_matching(vit_base, r):
    """It merges before the block, so a block costs what the merged tokens cost; d = 768 channels are compared."""
    n, d, blocks, decision = 196, 768, 0, 0
    for _ in range(12):
        decision += n * n * d + (n // 2) * (n - n // 2) * d if r else 0
        n -= r
        blocks += 12 * (n + 1) * d * d + 2 * (n + 1) ** 2 * d
    cost = vit_base.cost(counts_of(r), published(r=r))
    assert cost.paper.item() == blocks
    assert cost.true.item() == blocks + decision + 196 * 768 * 768 + 768 * 1000
