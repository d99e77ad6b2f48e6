"""`adamerge.applied` merges inside a `with` block, and leaves the model as it was."""

import pytest
import torch
from hosts.families import build, pictures
from torch import nn

import adamerge
from adamerge.core.errors import BadStats, NotApplied
from adamerge.core.stats import LayerStats
from adamerge.methods import adamerge as published
from adamerge.methods import tome

ADAPTIVE = published(6.0, LayerStats((0.3,) * 3, (0.1,) * 3))


def run(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(pictures(2))


def modules(model: nn.Module) -> list[tuple[str, int, dict]]:
    """Every module with the methods that were patched on it."""
    return [
        (name, id(module), {k: v for k, v in vars(module).items() if callable(v)})
        for name, module in model.named_modules()
    ]


def test_the_model_merges_inside_and_is_the_same_afterwards():
    model = build("vit").train()
    before, whole, mode = run(model.eval()), modules(model), model.training
    with adamerge.applied(model, ADAPTIVE) as given:
        assert given is model
        assert not torch.equal(run(model), before)
        assert adamerge.trace(model).counts.shape == (2, 3)
    assert torch.equal(run(model), before) and modules(model) == whole and model.training is mode
    with pytest.raises(NotApplied):
        adamerge.trace(model)


def test_blocks_nest_and_a_recipe_from_before_comes_back():
    model = adamerge.apply(build("vit"), tome(1))
    one = run(model)
    with adamerge.applied(model, ADAPTIVE):
        adaptive = run(model)
        with adamerge.applied(model, tome(3), "packed"):
            assert not torch.equal(run(model), adaptive)
        assert torch.equal(run(model), adaptive)
        adamerge.remove(model)
    assert torch.equal(run(model), one) and not torch.equal(one, adaptive)


def test_after_an_error_the_model_is_the_same():
    model = build("vit")
    before = run(model)
    with pytest.raises(KeyError), adamerge.applied(model, tome(2)):
        raise KeyError
    assert torch.equal(run(model), before)
    with pytest.raises(BadStats, match="has none"), adamerge.applied(model, published(6.0)):
        pytest.fail("a recipe that cannot run has to be refused before the block")
    assert torch.equal(run(model), before)
