"""A plain block with oneDNN's linear layers gives the host's results; any other block runs its own layers."""

from typing import Any

import pytest
import torch
from hosts.families import RECIPES, build, pictures
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import adamerge
from adamerge.patching.apply import stack_of
from adamerge.runtime.packed import onednn
from adamerge.runtime.packed.layout import round_up_rows
from adamerge.runtime.packed.onednn import OneDnnView, with_onednn

pytestmark = pytest.mark.skipif(not onednn.available(), reason="this torch has no oneDNN")
FLOAT32 = torch.zeros(1)


def views(model: nn.Module):
    return stack_of(adamerge.apply(model, RECIPES["tome"](model, pictures(1)), "packed")).selector.views


@pytest.mark.parametrize("rows", [1, 3, 16, 17, 197])
@pytest.mark.parametrize("family", ["vit", "deit3"])
def test_the_results_are_those_of_the_host(family, rows):
    view = views(build(family))[0]
    quick = with_onednn(view, FLOAT32)
    x = torch.randn(rows, view.shape.dim, generator=torch.Generator().manual_seed(rows))
    with torch.inference_mode():
        for ours, theirs in zip(quick.qkv(x), view.qkv(x), strict=True):
            torch.testing.assert_close(ours, theirs)
        attended = x.unflatten(1, (view.shape.heads, view.shape.key_dim))
        torch.testing.assert_close(quick.project(attended), view.project(attended))
        torch.testing.assert_close(quick.mlp(x), view.mlp(x))
    assert isinstance(quick, OneDnnView) and view.mlp(x).std() > 0.1
    assert (quick.scale, quick.fused, quick.dropout) == (view.scale, view.fused, view.dropout)


def test_gelu_by_tanh_runs_in_onednn_too():
    model: Any = build("vit")
    for block in model.blocks:
        block.mlp.act = nn.GELU(approximate="tanh")
    view = views(model)[0]
    quick = with_onednn(view, FLOAT32)
    x = torch.randn(19, view.shape.dim, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        torch.testing.assert_close(quick.mlp(x), view.mlp(x))
    assert isinstance(quick, OneDnnView)


class RowsOfOneDnnCalls(TorchDispatchMode):
    """Records how many rows each linear layer gets in oneDNN; the product of tokens with each other is no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "_linear_pointwise" in str(func) and args[0] is not args[1]:
            self.rows.append(len(args[0]))
        return func(*args, **(kwargs or {}))


def test_a_forward_pass_calls_onednn_with_the_rows_that_are_left():
    model, images = build("vit"), pictures(6)
    with torch.inference_mode(), RowsOfOneDnnCalls() as calls:
        adamerge.apply(model, RECIPES["adaptive"](model, images), "packed")(images)
    seen = calls.rows
    assert len(seen) == 4 * len(model.blocks)
    assert seen == sorted(seen, reverse=True) and seen[-1] < seen[0]
    # Adaptive counts differ from batch to batch; rows are rounded up, so that oneDNN sees few different numbers.
    assert all(rows == round_up_rows(rows) for rows in seen if rows < seen[0])


class Quantised(torch.Tensor):
    """A subclass of tensor, as quantised weights are."""


def hooked(model: Any) -> None:
    model.blocks[0].mlp.register_forward_hook(lambda *_: None)


def another_activation(model: Any) -> None:
    model.blocks[0].mlp.act = nn.SiLU()


def another_tensor(model: Any) -> None:
    layer = model.blocks[0].attn.qkv
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Quantised))


@pytest.mark.parametrize("change", [hooked, another_activation, another_tensor])
def test_a_block_that_is_not_plain_runs_its_own_layers(change):
    model = build("vit")
    first, second, *_ = views(model)
    change(model)
    assert with_onednn(first, FLOAT32) is first and isinstance(with_onednn(second, FLOAT32), OneDnnView)


def test_bfloat16_runs_in_onednn_too_and_is_as_exact_as_the_host():
    model = build("vit")
    exact = views(model)[0]
    x = torch.randn(197, exact.shape.dim, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected, attended = exact.mlp(x), x.unflatten(1, (exact.shape.heads, exact.shape.key_dim)).bfloat16()
        view = views(model.bfloat16())[0]
        quick = with_onednn(view, x.bfloat16())
        theirs, ours = (v.mlp(x.bfloat16()).float() - expected for v in (view, quick))
        torch.testing.assert_close(quick.project(attended), view.project(attended))
    assert isinstance(quick, OneDnnView) == torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert theirs.std() > 0 and ours.std() < 1.1 * theirs.std()


def test_other_precisions_and_a_disabled_onednn_keep_the_view(monkeypatch):
    view = views(build("vit"))[0]
    assert with_onednn(view, FLOAT32.double()) is view and with_onednn(view, FLOAT32.half()) is view
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    assert with_onednn(view, FLOAT32) is view
