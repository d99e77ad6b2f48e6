"""Rotary tables follow their tokens."""

from typing import Any

import pytest
import torch
from torch import Tensor

from adamerge.core.errors import BadOption
from adamerge.hosts.call_convention import CallConvention
from adamerge.methods import adamerge as published
from adamerge.methods import tome
from adamerge.runtime import reference
from adamerge.runtime.block_view import BlockShape


class Noting:
    """A block that does nothing but note the rows its queries and keys are turned by."""

    fused, scale, dropout = True, 0.5, 0.0
    shape = BlockShape(8, 2, 4, 0, 0, 0)

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        part = x.unflatten(-1, (2, 4))
        return part, part, part

    def turn(self, x: Tensor, rows: tuple[Tensor, ...]) -> Tensor:
        self.seen.append(rows[0])
        return x * rows[0]

    def project(self, attended: Tensor) -> Tensor:
        return 0.1 * attended.flatten(-2)

    def mlp(self, x: Tensor) -> Tensor:
        return 0 * x


@pytest.mark.parametrize("recipe", [tome(3), published(r=3)], ids=["after attention", "before the block"])
@pytest.mark.parametrize("heads", [0, 2])
def test_a_merged_token_is_turned_by_the_row_of_the_first_patch_it_stands_for(recipe, heads):
    torch.manual_seed(0)
    table = torch.arange(10.0)[:, None].expand(10, 4) + 1
    if heads:
        table = torch.stack([table, -table])
    view: Any = Noting()
    state = reference.start(torch.randn(2, 11, 8), prefix=1)
    for _ in range(3):
        state = reference.step(reference.replace(state, tables=(table,)), view, recipe, 3)
        rows, key_rows = view.seen[-2:]
        assert torch.equal(rows, key_rows)
    merges_before = state.steps if recipe.site == "before_block" else state.steps[:-1]
    history = reference.keep_all(2, 10, torch.device("cpu"))
    for step in merges_before:
        history = history.then(step.plan)
    assert history.width < 10
    for image in range(2):
        for token in range(history.width):
            first = int((history.slot[image] == token).nonzero()[0])
            expected = torch.tensor([first + 1.0, -first - 1.0] if heads else [first + 1.0])
            assert torch.equal(rows[image, token, :, 0], expected)


def test_prefix_tokens_are_not_turned():
    view: Any = Noting()
    state = reference.replace(reference.start(torch.randn(2, 7, 8), prefix=3), tables=(torch.full((4, 4), 9.0),))
    query = torch.ones(2, 7, 2, 4)
    turned = reference.turn(state, view, query)
    assert turned[:, :3].unique().tolist() == [1] and turned[:, 3:].unique().tolist() == [9]


def test_tables_keep_the_precision_of_the_queries():
    view: Any = Noting()
    state = reference.replace(reference.start(torch.randn(1, 4, 8), prefix=0), tables=(torch.ones(4, 4),))
    assert reference.turn(state, view, torch.ones(1, 4, 2, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_a_view_that_cannot_turn_is_named():
    class Plain(Noting):
        pass

    view: Any = Plain()
    view.turn = None
    state = reference.replace(reference.start(torch.randn(1, 4, 8), prefix=0), tables=(torch.ones(4, 4),))
    with pytest.raises(BadOption, match=r"handed rotary tables to a block whose view, Plain, has no `turn`"):
        reference.attention(state, view, tome(1))


def test_tables_for_each_image_are_refused():
    convention = CallConvention("rope")
    assert (
        convention.rotary_tables((), {"rope": None}) == ()
        and len(convention.rotary_tables((), {"rope": torch.zeros(4, 8)})) == 1
    )
    with pytest.raises(BadOption, match=r"the same for all images; got \[\(2, 1, 4, 8\)\]. Switch patch dropout off"):
        convention.rotary_tables((), {"rope": torch.zeros(2, 1, 4, 8)})
