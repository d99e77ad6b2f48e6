"""Weights that are kept for oneDNN follow every change of the model's weights."""

import gc
import weakref
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from hosts.families import RECIPES, build, pictures
from torch import nn

import adamerge
from adamerge.runtime.packed import kept_weights, onednn

pytestmark = pytest.mark.skipif(not onednn.available(), reason="this torch has no oneDNN")


def in_place(model: Any) -> None:
    with torch.no_grad():
        model.blocks[1].mlp.fc1.weight.mul_(1.5)


def through_data(model: Any) -> None:
    model.blocks[1].mlp.fc1.weight.data.mul_(1.5)


def one_row_through_data(model: Any) -> None:
    model.blocks[1].attn.qkv.weight.data[5] += 1


def one_column_through_data(model: Any) -> None:
    weight = model.blocks[1].mlp.fc2.weight.data
    weight[:, -3] += torch.linspace(-3, 3, len(weight))


def other_data(model: Any) -> None:
    model.blocks[1].attn.proj.weight.data = 1.5 * model.blocks[1].attn.proj.weight.data


def other_parameter(model: Any) -> None:
    model.blocks[1].mlp.fc2.weight = nn.Parameter(1.5 * model.blocks[1].mlp.fc2.weight.detach())


def loaded(model: Any) -> None:
    model.load_state_dict({name: 1.1 * value for name, value in model.state_dict().items()})


def bias_through_data(model: Any) -> None:
    model.blocks[1].mlp.fc1.bias.data[3] += 1


def other_activation(model: Any) -> None:
    model.blocks[1].mlp.act.approximate = "tanh"
    model.blocks[1].mlp.fc1.bias.data += 1


def other_eps(model: Any) -> None:
    model.blocks[1].norm2.eps = 1.0


def replaced_module(model: Any) -> None:
    model.blocks[1].mlp.act = nn.SiLU()


def replaced_forward(model: Any) -> None:
    layer = model.blocks[1].mlp.fc2
    layer.forward = lambda x: 2 * nn.functional.linear(x, layer.weight, layer.bias)


@pytest.mark.parametrize(
    "change",
    [
        other_activation,
        other_eps,
        replaced_module,
        replaced_forward,
        in_place,
        through_data,
        one_row_through_data,
        one_column_through_data,
        other_data,
        other_parameter,
        loaded,
        bias_through_data,
    ],
)
def test_a_changed_weight_is_used_at_the_next_call(change: Callable[[Any], None]):
    model, images = build("vit"), pictures(2)
    adamerge.apply(model, RECIPES["tome"](model, images), "packed")
    with torch.inference_mode():
        before = model(images)
    change(model)
    with torch.inference_mode():
        after, expected = model(images), deepcopy(model)(images)
    assert torch.equal(after, expected) and not torch.allclose(after, before)


def test_a_weight_is_packed_once_and_forgotten_with_the_model(monkeypatch):
    made, real = [], kept_weights._made
    monkeypatch.setattr(kept_weights, "_made", lambda *args: made.append(weakref.ref(packed := real(*args))) or packed)
    model, images = build("vit"), pictures(2)
    adamerge.apply(model, RECIPES["tome"](model, images), "packed")
    with torch.inference_mode():
        first, second = model(images), model(images)
    assert len(made) == 4 * len(model.blocks) and torch.equal(first, second)
    del model
    gc.collect()
    assert not any(ref() is not None for ref in made)


def test_weights_made_in_inference_mode_give_the_same_bits():
    with torch.inference_mode():
        model, images = build("vit"), pictures(2)
        adamerge.apply(model, RECIPES["tome"](model, images), "packed")
        before = model(images)
        in_place(model)
        after = model(images)
    assert not torch.allclose(before, after)
