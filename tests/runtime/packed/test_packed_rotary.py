"""Hosts that turn queries and keys by their places, on the packed runtime of a CPU."""

from typing import Any

import pytest
import torch
from hosts.families import RECIPES
from hosts.zoo import ZOO, Member
from marks import mostly_slow

import adamerge
from adamerge.methods import random
from adamerge.patching.apply import stack_of
from adamerge.presets import protect
from adamerge.runtime import reference
from adamerge.runtime.backend import PackedBackend
from adamerge.runtime.block_view import Rotation
from adamerge.runtime.packed.rotary import RowTurner
from adamerge.runtime.packed.state import pack

# The fourth has a table for each head, the second a gated MLP that oneDNN does not run.
NAMES = ("DINOv3", "EVA-02", "Perception_Encoder", "rotary_ViT_with_mixed_tables", "rotary_post-norm")
FOUND = {str(member): member for member in ZOO}
ROTARY = [FOUND[f"timm/{name}"] for name in NAMES] + [FOUND["transformers/DINOv3"]]
CHOSEN = {
    "before the block": RECIPES["adaptive"],
    "by keys": RECIPES["tome"],
    "by keys and class attention": lambda model, images: protect(static=True, r=2.5),
    "decided image by image": lambda model, images: random(2),
}


@pytest.mark.parametrize("recipe", mostly_slow(CHOSEN, ["before the block", "by keys"]))
@pytest.mark.parametrize("member", mostly_slow(ROTARY, [ROTARY[0], ROTARY[3]]), ids=str)
def test_plans_and_outputs_are_those_of_the_reference(member: Member, recipe):
    member.require()
    model, images = member.build(), member.images(3)
    chosen = CHOSEN[recipe](model, images)
    with torch.inference_mode():
        expected = member.see(adamerge.apply(model, chosen, "reference"), images)
        before = adamerge.trace(model)
        adamerge.apply(model, chosen, "packed")
        assert isinstance(stack_of(model).choose_backend(torch.zeros(1, 20, 8)), PackedBackend)
        found = member.see(model, images)
        after = adamerge.trace(model)
        alone = [member.see(model, image) for image in images.split(1)]
    assert expected.std() > 0.01 and before.merged.sum() > 0
    assert torch.equal(before.r, after.r) and torch.equal(before.slots(), after.slots())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    if chosen.ragged:
        assert torch.equal(torch.cat(alone), found)


class Tabled:
    """What is read of the view of a rotary block."""

    def __init__(self, interleaved: bool):
        self.interleaved = interleaved

    def rotation(self, tables: tuple[torch.Tensor, ...]) -> Rotation:
        return Rotation(*tables, interleaved=self.interleaved)

    def turn(self, x: torch.Tensor, rows: tuple[torch.Tensor, ...]) -> torch.Tensor:
        cos, sin = rows
        if self.interleaved:
            other = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
        else:
            other = torch.cat((-x[..., 4:], x[..., :4]), -1)
        return x * cos + other * sin


@pytest.mark.parametrize("heads", [0, 2])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_turned_as_by_the_reference(interleaved, heads, dtype, unchecked):
    torch.manual_seed(0)
    view: Any = Tabled(interleaved)
    tables = tuple(torch.randn(*([heads] if heads else []), 10, 8) for _ in range(2))
    tokens = torch.randn(3, 11, 4)
    query, key = torch.randn(2, 3, 11, 2, 8, dtype=dtype)
    state = reference.replace(reference.start(tokens, prefix=1), tables=tables)
    turner = RowTurner()
    found = turner.turn(query.flatten(0, 1), key.flatten(0, 1), pack(tokens, 1), view, tables)
    assert all(turned.dtype is dtype for turned in found)
    for turned, heads_of in zip(found, (query, key), strict=True):
        assert torch.equal(turned.view(3, 11, 2, 8), reference.turn(state, view, heads_of))
    # Other tables are read anew.
    again, _ = turner.turn(query.flatten(0, 1), key.flatten(0, 1), pack(tokens, 1), view, (tables[1], tables[0]))
    assert not torch.equal(again, found[0])
