"""Inputs of the core: features, evidence and plans, drawn at random or from a formula."""

import itertools
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from adamerge.core.evidence import Evidence
from adamerge.core.match import (
    Alternating,
    Bipartite,
    Links,
    SalientFirst,
    SalientLast,
    Sequential,
    SimilarityOnly,
    Tokens,
)
from adamerge.core.plan import Plan
from adamerge.core.salience import Centrality

SPLITS = {"sequential": Sequential(), "alternating": Alternating()}
DIRECTIONS = {"published": SalientFirst(), "protecting": SalientLast(), "off": SimilarityOnly()}
AFFINITIES = ("dot", "scaled", "cosine")
AVERAGES = ("salience", "size", "salience_size")
# All options of published AdaMerge.
OPTIONS: list[dict[str, Any]] = [
    dict(split=s, direction=d, averaging=a, affinity=f)
    for s, d, a, f in itertools.product(SPLITS, DIRECTIONS, AVERAGES, AFFINITIES)
]

seeds = st.integers(0, 10_000)


def noise(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def seen(
    x: Tensor,
    count: Tensor | None = None,
    size: Tensor | None = None,
    prefix: int = 0,
    layer: int = 0,
    depth: int | None = None,
) -> Evidence:
    """Tokens as evidence, each of size 1 and at the last layer where nothing else is said."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    size = torch.ones(x.shape[:2], dtype=dtype, device=x.device) if size is None else size
    return Evidence(raw=x, size=size, layer=layer, depth=depth or layer + 1, prefix=prefix, count=count)


def formula(images: int = 2, tokens: int = 9, channels: int = 4) -> Tensor:
    """Small whole numbers that look random and are the same on every machine."""
    b, i, c = torch.meshgrid(torch.arange(images), torch.arange(tokens), torch.arange(channels), indexing="ij")
    return ((i * i * (c + 1) + 7 * i + 3 * c * c + 5 * b * (i + c)) % 13 - 6).double()


def linked(x: Tensor, split: str = "sequential", direction: str = "published", affinity: str = "dot") -> Links:
    """The links of one image batch."""
    evidence = seen(x)
    matching = Bipartite(SPLITS[split], Tokens(), DIRECTIONS[direction])
    return matching(evidence, Centrality(affinity)(evidence))  # pyright: ignore[reportArgumentType]


@st.composite
def plans(draw: st.DrawFn, tokens: int | None = None, full: bool = False) -> Plan:
    """Any plan: every image with its own number of tokens, and every slot up to its count taken."""
    b = draw(st.integers(1, 3))
    n = draw(st.integers(1, 9)) if tokens is None else tokens
    rows, counts = [], []
    for _ in range(b):
        owned = n if full else draw(st.integers(1, n))
        count = draw(st.integers(1, owned))
        # The first `count` members of a shuffle open the slots; the rest join any of them.
        row = list(range(count)) + draw(
            st.lists(st.integers(0, count - 1), min_size=owned - count, max_size=owned - count)
        )
        rows.append(draw(st.permutations(row)) + [-1] * (n - owned))
        counts.append(count)
    return Plan(torch.tensor(rows), torch.tensor(counts), max(counts), ragged=min(counts) != max(counts))


def after(plan: Plan, draw: st.DrawFn) -> Plan:
    """A plan for the tokens that `plan` leaves."""
    rows, counts = [], []
    for owned in plan.count.tolist():
        count = draw(st.integers(1, owned))
        row = list(range(count)) + draw(
            st.lists(st.integers(0, count - 1), min_size=owned - count, max_size=owned - count)
        )
        rows.append(draw(st.permutations(row)) + [-1] * (plan.width - owned))
        counts.append(count)
    return Plan(torch.tensor(rows), torch.tensor(counts), max(counts), ragged=min(counts) != max(counts))


@st.composite
def chains(draw: st.DrawFn, length: int = 3) -> list[Plan]:
    """Plans that follow one another."""
    chain = [draw(plans())]
    while len(chain) < length:
        chain.append(after(chain[-1], draw))
    return chain


def members(plan: Plan, image: int, slot: int) -> list[int]:
    """The tokens of an image that share a slot."""
    return [i for i, s in enumerate(plan.slot[image].tolist()) if s == slot]
