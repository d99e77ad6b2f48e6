"""In training a batch runs as one on a CPU, padded to its longest image; in evaluation images run alone."""

import pytest
import torch
from hosts.families import RECIPES, build, pictures
from torch import Tensor, nn

import adamerge
from adamerge.patching.apply import stack_of
from adamerge.runtime import reference


@pytest.fixture
def batches(monkeypatch) -> list[int]:
    """The number of images in each start of the reference."""
    seen: list[int] = []
    start = reference.start

    def noted(x, *rest):
        seen.append(len(x))
        return start(x, *rest)

    monkeypatch.setattr(reference, "start", noted)
    return seen


def gradients(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    logits = model(images)
    (logits * torch.linspace(-1, 1, logits.shape[-1])).sum().backward()
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def test_training_runs_whole_batches_and_evaluation_single_images(batches):
    model, images = build("vit"), pictures(4)
    adamerge.apply(model, RECIPES["adaptive"](model, images), "reference")
    batches.clear()
    model.train()
    model(images)
    assert batches == [4]
    batches.clear()
    model.eval()
    model(images)
    assert batches == [1] * 4


def test_gradients_of_a_padded_batch_are_those_of_single_images(batches):
    """Without dropout, training differs from evaluation only in padding."""
    model, images = build("vit").double(), pictures(4).double()
    adamerge.apply(model, RECIPES["adaptive"](model, images), "reference")
    alone = gradients(model.eval(), images)
    counts = adamerge.trace(model).counts
    assert len(set(map(tuple, counts.tolist()))) > 1
    padded = gradients(model.train(), images)
    assert torch.equal(adamerge.trace(model).counts, counts)
    assert set(padded) == set(alone) and len(padded) > 20
    largest = max(float(one.abs().max()) for one in alone.values())
    assert max(float((padded[name] - alone[name]).abs().max()) for name in alone) < 1e-9 * largest


def test_a_hook_on_a_block_changes_nothing_of_that(batches):
    model, images = build("vit"), pictures(3)
    adamerge.apply(model, RECIPES["adaptive"](model, images), "reference")
    next(stack_of(model).children()).register_forward_hook(lambda *_: None)
    batches.clear()
    model.train()
    model(images)
    assert batches == [3]


def widths(model: nn.Module) -> list[int]:
    """The number of tokens after each merge of the last pass, padding included, where something merged."""
    trace = adamerge.trace(model)
    return [trace.prefix + layer.plan.width for layer in trace.layers if not layer.plan.is_identity]


def test_in_training_the_tokens_of_adaptive_batches_have_few_numbers():
    """For oneDNN, which compiles code for each number and keeps it."""
    model, images = build("vit", patch_size=8), pictures(4)
    adamerge.apply(model, RECIPES["adaptive"](model, images), "reference")
    model.train()(images)
    found = widths(model)
    assert found and all(number % reference.TRAINING_MULTIPLE == 0 for number in found)
    counts = adamerge.trace(model).counts
    assert any(number % reference.TRAINING_MULTIPLE for number in (1 + counts.amax(0)).tolist())


def test_in_training_fixed_counts_are_not_padded():
    model, images = build("vit", patch_size=8), pictures(2)
    adamerge.apply(model, RECIPES["fixed"](model, images), "reference").train()(images)
    assert widths(model)[0] % reference.TRAINING_MULTIPLE


def test_a_state_on_another_device_is_not_padded():
    state = reference.start(torch.empty(2, 17, 8, device="meta"), 1)
    assert reference.start_training(state).multiple == 1
    assert reference.start_training(reference.start(torch.empty(2, 17, 8), 1)).multiple == reference.TRAINING_MULTIPLE
