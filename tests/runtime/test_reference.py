"""The reference backend: histories are right, padding changes no token, and attention counts sizes if asked to."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from adamerge.core.budget import ZScore
from adamerge.core.combine import BySize
from adamerge.core.match import Bipartite, Tokens
from adamerge.core.plan import Plan, fold, keep_all
from adamerge.core.recipe import Recipe
from adamerge.core.stats import LayerStats
from adamerge.methods import adamerge, tome
from adamerge.runtime import reference
from adamerge.runtime.block_view import BlockShape


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@dataclass(frozen=True)
class Bare:
    """A block that is nothing but two heads of attention on the tokens themselves."""

    fused: bool = False
    scale: float = 0.7
    dropout: float = 0.0
    heads: int = 2

    @property
    def shape(self) -> BlockShape:
        return BlockShape(4, 2, 2, 0, 0, 0)

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        split = x.unflatten(-1, (self.heads, -1))
        return split, 0.5 * split, split + 1

    def project(self, attended: Tensor) -> Tensor:
        return attended.flatten(-2)

    def mlp(self, x: Tensor) -> Tensor:
        return 0.1 * x


def on_tokens(recipe: Recipe) -> Recipe:
    """ToMe's choices without its keys, so that merges can be chained without attention."""
    assert isinstance(recipe.links, Bipartite)
    return replace(recipe, site="before_block", links=replace(recipe.links, metric=Tokens()))


def adaptive(*mean: float) -> ZScore:
    return ZScore(5.0, LayerStats(mean, (0.1,) * len(mean)))


NEVER, ALWAYS = 99.0, -99.0

CHAINS = {
    "adamerge": replace(adamerge(5.0, LayerStats((0.5, 0.5, 0.5), (0.1, 0.1, 0.1))), weight=BySize()),
    "late": replace(adamerge(5.0, LayerStats((NEVER, ALWAYS, 0.5), (0.1, 0.1, 0.1))), weight=BySize()),
    "fixed": replace(adamerge(r=3), weight=BySize()),
    "tome": on_tokens(tome(3)),
    "adaptive in ToMe's order": replace(on_tokens(tome(3)), budget=adaptive(0.6, 0.6, 0.6)),
    "late in ToMe's order": replace(on_tokens(tome(3)), budget=adaptive(NEVER, ALWAYS, ALWAYS)),
}


@pytest.mark.parametrize("recipe", CHAINS.values(), ids=CHAINS)
@pytest.mark.parametrize("prefix", [0, 1, 2])
def test_the_history_folds_the_first_patches_into_the_last_tokens(recipe, prefix):
    """Three merges with nothing between them, averaged by size, are one merge by their history."""
    x = noise(4, prefix + 15, 6)
    x[1] = x[1, :1] + 0.05 * x[1]
    state = reference.start(x, prefix)
    for _ in range(3):
        state = reference.merge(state, recipe, 3)
    assert state.history.count.tolist() != [15] * 4
    size = torch.ones(4, 15, dtype=torch.float64)
    expected = fold(x[:, prefix:], state.history, size)
    held = torch.arange(state.history.width) < state.history.count[:, None]
    torch.testing.assert_close(state.x[:, prefix:][held], expected[held])
    assert torch.equal(state.x[:, :prefix], x[:, :prefix])
    assert state.size.sum(1).tolist() == [15.0] * 4
    out = reference.finish(state)
    assert out.shape == x.shape and torch.equal(out[:, :prefix], x[:, :prefix])
    for image in range(4):
        for patch, slot in enumerate(state.history.slot[image].tolist()):
            assert torch.equal(out[image, prefix + patch], state.x[image, prefix + slot])


@pytest.mark.parametrize("recipe", CHAINS.values(), ids=CHAINS)
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
@pytest.mark.parametrize("proportional", [True, False], ids=["proportional", "equal"])
def test_an_image_runs_the_same_alone_and_padded_among_others(recipe, fused, proportional):
    """D14 through three whole blocks."""
    recipe, view = replace(recipe, proportional_attention=proportional), Bare(fused)
    x = noise(4, 1 + 15, 6, seed=1)
    x[1] = x[1, :1] + 0.05 * x[1]

    def outcome(x: Tensor) -> tuple[Tensor, list[list[int]]]:
        state = reference.start(x, 1)
        for _ in range(3):
            state = reference.step(state, view, recipe, 3)
        return reference.finish(state), torch.stack([s.plan.count for s in state.steps], 1).tolist()

    together, counts = outcome(x)
    for image in range(4):
        alone, count = outcome(x[image : image + 1])
        assert count == counts[image : image + 1]
        torch.testing.assert_close(alone, together[image : image + 1], atol=1e-9, rtol=1e-9)


def merged_state(prefix: int = 1) -> reference.State:
    """Two images of 3 and 2 tokens, of sizes 2 1 1 and 3 1."""
    plan = Plan(torch.tensor([[0, 0, 1, 2], [0, 0, 0, 1]]), torch.tensor([3, 2]), 3, ragged=True)
    size = torch.tensor([[2.0, 1, 1], [3, 1, 0]], dtype=torch.float64)
    state = reference.start(noise(2, prefix + 4, 4), prefix)
    history, place = state.history.then(plan), torch.tensor([[0, 2, 3], [0, 3, 0]])
    return replace(state, x=noise(2, prefix + 3, 4), size=size, place=place, history=history, count=plan.count)


def test_proportional_attention_adds_the_log_of_the_size_and_padding_gets_no_attention():
    bias = reference.bias(merged_state(), proportional=True)
    inf = float("inf")
    assert bias is not None and bias.shape == (2, 1, 1, 4)
    expected = torch.tensor([[1.0, 2, 1, 1], [1, 3, 1, 0]], dtype=torch.float64).log()
    assert torch.equal(bias[:, 0, 0], expected)
    equal = reference.bias(merged_state(), proportional=False)
    assert equal is not None and equal[:, 0, 0].tolist() == [[0, 0, 0, 0], [0, 0, 0, -inf]]


def test_attention_needs_no_bias_before_the_first_merge():
    """So that the host's own fused attention runs, bit for bit."""
    state = reference.start(noise(2, 5, 4), 1)
    assert reference.bias(state, proportional=True) is None
    assert reference.bias(state, proportional=False) is None


def test_a_bias_without_padding_is_only_for_proportional_attention():
    state = replace(merged_state(), count=None)
    assert reference.bias(state, proportional=False) is None
    assert reference.bias(state, proportional=True) is not None


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
def test_a_token_of_size_two_is_attended_like_two_equal_tokens(fused):
    """What proportional attention is for."""
    view, x = Bare(fused), noise(1, 4, 4)
    twice = torch.cat([x, x[:, 1:2]], 1)
    size = torch.tensor([[1.0, 2, 1, 1]], dtype=torch.float64)
    expected = reference.attend(view, *view.qkv(twice), None)[:, :4]
    out = reference.attend(view, *view.qkv(x), size.log()[:, None, None, :])
    torch.testing.assert_close(out, expected)


def test_attention_is_the_softmax_of_the_scaled_scores():
    view, x = Bare(), noise(2, 5, 4)
    out = reference.attend(view, *view.qkv(x), None)
    for image in range(2):
        for head in range(2):
            q = x[image, :, 2 * head : 2 * head + 2]
            weights = (0.7 * q @ (0.5 * q).T).softmax(-1)
            torch.testing.assert_close(out[image, :, head], weights @ (q + 1))


def test_gradients_in_bfloat16_on_a_cpu_come_from_two_products(monkeypatch):
    """The backward pass of torch's fused attention is slow there."""
    x, view = noise(2, 5, 4).bfloat16(), Bare(fused=True)
    fused = reference.attend(view, *view.qkv(x), None)
    monkeypatch.setattr(reference, "scaled_dot_product_attention", None)
    products = reference.attend(view, *view.qkv(x.clone().requires_grad_()), None)
    torch.testing.assert_close(products, fused, rtol=0.02, atol=0.02)
    for other in (x, x.float().requires_grad_()):
        with pytest.raises(TypeError, match="not callable"):
            reference.attend(view, *view.qkv(other), None)


def test_the_gradient_of_padded_attention_is_finite():
    x = merged_state().x.requires_grad_()
    state = replace(merged_state(), x=x)
    for proportional in (True, False):
        out, _ = reference.attention(state, Bare(), replace(adamerge(r=0), proportional_attention=proportional))
        out.x.square().sum().backward()
        assert x.grad is not None and x.grad.isfinite().all()


def test_what_stands_in_the_padding_changes_no_token():
    state, view = merged_state(), Bare()
    other = state.x.clone()
    other[1, 3] = 1e3
    recipe = adamerge(r=0)
    held = torch.tensor([[True] * 4, [True, True, True, False]])
    a, _ = reference.attention(state, view, recipe)
    b, _ = reference.attention(replace(state, x=other), view, recipe)
    assert torch.equal(a.x[held], b.x[held])
    assert torch.equal(reference.finish(a), reference.finish(b))


def test_a_merge_before_the_block_and_one_after_attention_are_at_their_places():
    """The first changes what attention sees, the second what the MLP sees."""
    x = noise(2, 1 + 8, 6)

    class Recorder(Bare):
        def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            seen.append(("attention", x.shape[1]))
            return super().qkv(x)

        def mlp(self, x: Tensor) -> Tensor:
            seen.append(("mlp", x.shape[1]))
            return super().mlp(x)

    seen: list[tuple[str, int]] = []
    reference.step(reference.start(x, 1), Recorder(), adamerge(r=2), 1)
    reference.step(reference.start(x, 1), Recorder(), tome(2), 1)
    assert seen == [("attention", 7), ("mlp", 7), ("attention", 9), ("mlp", 7)]


def test_a_state_starts_with_everyone_of_size_one():
    state = reference.start(noise(2, 7, 4).half(), 2)
    assert state.size.dtype == torch.float32 and state.size.tolist() == [[1.0] * 5] * 2
    assert state.layer == 0 and state.count is None
    assert torch.equal(state.history.slot, keep_all(2, 5, torch.device("cpu")).slot)


def test_a_fraction_leaves_some_layers_idle_and_those_have_redundancy_zero():
    state, view = reference.start(noise(2, 1 + 8, 4), 1), Bare()
    for _ in range(4):
        state = reference.step(state, view, tome(0.5), 4)
    assert [step.plan.is_identity for step in state.steps] == [True, False, True, False]
    assert [bool(step.redundancy.any()) for step in state.steps] == [False, True, False, True]
