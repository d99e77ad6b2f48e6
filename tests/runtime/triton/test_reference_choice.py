"""Decisions by a recipe's own parts never wait for the device, so that they can be captured as CUDA graphs."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from adamerge.core.recipe import Recipe
from adamerge.methods import ats, dsm, evit, pitome, random
from adamerge.runtime.packed.state import pack
from adamerge.runtime.trace import LayerTrace
from adamerge.runtime.triton import reference_choice
from adamerge.runtime.triton.kernels.choice import Choice
from adamerge.runtime.triton.kernels.select import PaddedLinks

RECIPES = {
    "pitome": pitome(r=2),
    "evit": evit(0.6),
    "ats": ats(9, first=0),
    "dsm in windows": dsm(2, 0, windows=True),
    "random": random(2),
}
LAYER, DEPTH = 1, 4


def _no_trace() -> LayerTrace:
    raise AssertionError("nobody asks for the trace")


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_nothing_is_read_from_the_device(recipe: Recipe, monkeypatch):
    """Fake tensors on a CUDA device have no values: whoever asks for one gets an error.  The kernels are left out."""
    seen: list[PaddedLinks] = []

    def select(links: PaddedLinks, merges: int | Tensor, *_, **__) -> Choice:
        seen.append(links)
        nothing: Any = None
        return Choice(*[nothing] * 9)

    def class_attention(query: Tensor, *_) -> Tensor:
        return query.new_empty(query.shape[1], query.shape[0], dtype=torch.float32)

    monkeypatch.setattr(reference_choice, "select", select)
    monkeypatch.setattr(reference_choice, "class_attention", class_attention)
    with FakeTensorMode():
        state = pack(torch.empty(3, 17, 32, device="cuda", dtype=torch.bfloat16), 1, True)
        # Once counts adapt to the image, only the device knows how many rows are used.
        layout = replace(state.layout, uniform=not recipe.ragged)
        state = replace(state, layout=layout, steps=(_no_trace,) * LAYER)
        query, key, value = torch.empty(51, 3, 4, 8, device="cuda", dtype=torch.bfloat16).unbind(1)
        attention = (query, key, value, 0.3)
        _, merges = reference_choice.choose_by_reference(state, recipe, DEPTH, attention, None)
    assert [links.source.shape for links in seen] == [(3, 16)]
    assert (merges is None) == (recipe.ragged or recipe.links == RECIPES["dsm in windows"].links)
