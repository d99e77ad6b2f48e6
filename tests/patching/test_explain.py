"""What `adamerge.explain` says of a batch."""

import pytest
import torch
from hosts.families import build, pictures
from torch import nn

import adamerge
from adamerge.core.errors import NotApplied
from adamerge.methods import pitome, tome
from adamerge.patching.apply import stack_of
from adamerge.runtime import backend


def with_kernels(model: nn.Module) -> nn.Module:
    """Run by kernels without a device; the interpreter stands in."""
    selector = stack_of(model).selector
    selector.choose = lambda x, views, training: backend.TritonWithFallback(selector, x, views)
    return model


def test_a_cpu_packs_for_inference_and_takes_the_reference_for_training():
    model = adamerge.apply(build("vit"), tome(3))
    with torch.inference_mode():
        found = adamerge.explain(model, pictures(2))
    assert (found.backend, found.tokens_in, found.tokens_out) == ("packed", 17, 17 - 9)
    assert "CUDA device" in str(found) and "float32" in str(found)
    assert "merges decided by   operations of torch\n" in str(found)
    found = adamerge.explain(model.train(), pictures(2))
    assert (found.backend, found.why_not_faster) == ("reference", "the model is in training mode")


def test_modes_are_those_of_the_caller():
    model = adamerge.apply(build("vit"), tome(3), "packed")
    with torch.no_grad(), torch.autocast("cpu", torch.float16), pytest.warns(UserWarning, match="autocast is on"):
        found = adamerge.explain(model, pictures(2))
    assert found.backend == "reference" and "autocast is on" in str(found.why_not_faster)
    with torch.inference_mode():
        assert adamerge.explain(model, pictures(2)).backend == "packed"


def test_enabled_gradients_are_not_the_reason_where_another_one_is():
    model = adamerge.apply(build("vit"), tome(3))
    stack_of(model).block(0).get_submodule("mlp").act = nn.ReLU()
    found = adamerge.explain(model, pictures(2))
    assert found.backend == "reference" and "oneDNN does not run this block" in str(found.why_not_faster)


def test_kernels_and_blocks_that_they_do_not_run():
    model = with_kernels(adamerge.apply(build("vit", depth=2), tome(3), "packed"))
    stack_of(model).block(1).get_submodule("mlp").act = nn.ReLU()
    with torch.inference_mode():
        found = adamerge.explain(model, pictures(2))
    assert (found.backend, found.why_not_faster, found.unknown_part) == ("triton", None, None)
    assert found.blocks_of_torch == (1,)
    assert "operations of torch in blocks 1" in str(found)


@pytest.mark.parametrize("path", ["", "mlp.fc1"])
def test_a_hook_is_named_as_the_reason(path):
    model = with_kernels(adamerge.apply(build("vit"), tome(3), "packed"))
    stack_of(model).block(1).get_submodule(path).register_forward_hook(lambda *_: None)
    with torch.inference_mode(), pytest.warns(UserWarning, match=rf"hook on {path}.*block 1; the reference runs"):
        found = adamerge.explain(model, pictures(2))
    assert found.backend == "reference" and "there is a hook on" in str(found.why_not_faster)


def test_an_unknown_part_is_named():
    model = with_kernels(adamerge.apply(build("vit", depth=1), pitome(r=2), "packed"))
    with torch.inference_mode():
        found = adamerge.explain(model, pictures(1))
    assert found.unknown_part == "split ByEnergy" and "the reference, because kernels do not know" in str(found)


def test_nothing_stays_on_the_model():
    model = adamerge.apply(build("vit"), tome(3))
    before = set(vars(stack_of(model)))
    adamerge.explain(model, pictures(1))
    assert set(vars(stack_of(model))) == before
    with pytest.raises(NotApplied, match="does not merge"):
        adamerge.explain(adamerge.remove(model), pictures(1))
