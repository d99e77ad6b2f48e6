"""The kernels of decision and merge give what their references in plain torch give."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from awkward import DEVICE, LENGTHS, MIXED, layout, noise
from torch import Tensor

from adamerge.runtime.block_view import NormParams
from adamerge.runtime.packed.layout import Layout
from adamerge.runtime.triton.kernels.choice import Choice, ColumnSums, Entropy, Policy, Rule
from adamerge.runtime.triton.kernels.decide import decide
from adamerge.runtime.triton.kernels.decide_reference import decide_reference
from adamerge.runtime.triton.kernels.match import Split
from adamerge.runtime.triton.kernels.merge import merge, merge_reference

SPLITS = [Split(False), Split(True, 0), Split(True, 1, half=True)]
# Every mode of the kernel once: policy, rule, salience.
CASES = {
    "similarity, fixed": (Policy(SPLITS[2], sources_first=True), Rule("fixed", 4), None),
    "first, zscore": (Policy(SPLITS[0], "first", weigh="salience"), (0.0, 0.3, 20.0, 1.0), "columns"),
    "last, threshold": (Policy(SPLITS[1], "last", weigh="salience_size"), (0.2,), "columns"),
    "protect, threshold": (Policy(SPLITS[2], "protect", 0.75, "salience", True), (-0.9,), "class"),
    "protect with strength 0, keep": (Policy(SPLITS[2], "protect", 0.0, "keep"), (-0.9,), "class"),
    "sharpness, fixed": (Policy(SPLITS[2], weigh="salience_size"), Rule("fixed", 4), "entropy"),
    "more than there are": (Policy(SPLITS[0], weigh="keep"), Rule("fixed", 500), None),
}


def decided(case: str, name: str, by: Callable[..., Choice] = decide) -> tuple[Choice, Tensor, Layout]:
    """What `by` decides about random similarities, the sizes, and the layout."""
    policy, rule, salience = CASES[case]
    where = layout(name)
    size = noise(where.total, seed=1).abs().mul(3).ceil()
    if not isinstance(rule, Rule):
        numbers = torch.tensor(rule, dtype=torch.float64, device=DEVICE)
        rule = Rule("threshold" if len(rule) == 1 else "zscore", numbers=numbers)
    parts = noise(40, where.total, seed=2).abs()
    given = {None: None, "class": parts[:3], "columns": ColumnSums(parts, 16), "entropy": Entropy(parts[3])}[salience]
    history = torch.arange(where.most, device=DEVICE).minimum(where.patches[:, None] - 1).clamp_min(0).int()
    partner = partners(where, policy.split)
    choice = by(noise(where.total).tanh(), partner, size, history, where, policy, rule, given)
    return choice, size, where


def partners(where: Layout, split: Split) -> Tensor:
    """A random target for every source."""
    partner = torch.zeros(where.total, dtype=torch.int32, device=DEVICE)
    for begin, end in pairwise(where.offsets.tolist()):
        sources, targets = split.sides(end - begin - where.prefix, DEVICE)
        if len(targets):
            partner[begin + where.prefix + sources] = targets[(7 * sources) % len(targets)].int()
    return partner


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("case", CASES)
def test_decide(case, name):
    found, _, where = decided(case, name)
    expected, _, _ = decided(case, name, decide_reference)
    assert torch.equal(found.count, expected.count) and torch.equal(found.history, expected.history)
    torch.testing.assert_close(found.redundancy, expected.redundancy, rtol=1e-5, atol=1e-6)
    for image, (begin, end) in enumerate(pairwise(where.offsets.tolist())):
        base, kept = begin + where.prefix, int(found.count[image])
        lengths = {"slot": end - base, "gone": end - base - kept, "goal": end - base - kept, "origin": kept}
        for field, length in lengths.items():
            mine, theirs = (getattr(choice, field)[base : base + length] for choice in (found, expected))
            assert torch.equal(mine, theirs), field
        for field in ("weight", "salience"):
            mine, theirs = (getattr(choice, field)[base:end] for choice in (found, expected))
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["one", "edges", "no prefix", "registers", "vit"])
@pytest.mark.parametrize(
    "case, length", [("first, zscore", None), ("protect, threshold", "mean"), ("first, zscore", "largest")]
)
def test_merge(case, length, name):
    choice, size, where = decided(case, name)
    x, branch, gamma = noise(where.total, 48), noise(where.total, 48, seed=3), noise(48, seed=4)
    norm = NormParams(noise(48, seed=5), noise(48, seed=6), 1e-6)
    options: dict[str, Any] = dict(branch=branch, gamma=gamma, norm=norm, length=length)
    *found, offsets = merge(x, size, where, choice, **options)
    *expected, expected_offsets = merge_reference(x, size, where, choice, **options)
    assert torch.equal(offsets, expected_offsets)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine is not None and theirs is not None
        end = int(offsets[-1])
        torch.testing.assert_close(mine[:end], theirs[:end], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stream, half, factor", MIXED, ids=str)
def test_merging_tokens_with_a_branch_of_another_dtype(stream, half, factor):
    choice, size, where = decided("first, zscore", "edges")
    x, branch = noise(where.total, 48, dtype=stream), noise(where.total, 48, seed=3, dtype=half)
    gamma, norm = noise(48, seed=4, dtype=factor), NormParams(noise(48, seed=5), noise(48, seed=6), 1e-6, half)
    merged, normed, *_, offsets = merge(x, size, where, choice, branch=branch, gamma=gamma, norm=norm)
    end = int(offsets[-1])
    assert end < where.total
    # Adding in torch first: it promotes as the host does.
    expected, exact, *_ = merge_reference(
        x + gamma * branch, size, where, choice, norm=NormParams(norm.weight, norm.bias, norm.eps)
    )
    assert merged.dtype == expected.dtype == torch.float32 and exact is not None
    torch.testing.assert_close(merged[:end], expected[:end], rtol=1e-5, atol=1e-6)
    assert normed is not None and normed.dtype == half
    torch.testing.assert_close(normed[:end].float(), exact[:end], rtol=torch.finfo(half).eps, atol=1e-5)
    again = merge_reference(x, size, where, choice, branch=branch, gamma=gamma, norm=norm)
    assert again[0].dtype == torch.float32 and again[1] is not None and again[1].dtype == half


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_a_split_counts_the_sources_it_names(split):
    for n in range(12):
        sources, targets = split.sides(n, DEVICE)
        assert split.source_count(n) == len(sources)
        assert split.most_merges(n) == (min(len(sources), n - len(sources)) if split.half else len(sources))
        assert n < 2 or len(sources) + len(targets) == n
