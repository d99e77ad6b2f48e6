"""A trace has the counts, slots and salience of every image and layer."""

import re

import pytest
import torch

from adamerge.core.errors import BadOption
from adamerge.core.plan import Plan
from adamerge.runtime.trace import LayerTrace, Trace


def trace() -> Trace:
    """Two images of four patches: 4 -> 3, 2 -> 2, 1 tokens."""
    first = Plan(torch.tensor([[0, 1, 2, 1], [0, 0, 1, 1]]), torch.tensor([3, 2]), 3, ragged=True)
    second = Plan(torch.tensor([[0, 1, 0], [0, 0, -1]]), torch.tensor([2, 1]), 2, ragged=True)
    return Trace(
        (
            LayerTrace(
                first,
                torch.tensor([[0.1, 0.2, 0.3, 1.0], [0.0, 0.0, 1.0, 0.5]]),
                torch.ones(2, 3),
                torch.tensor([0.5, 0.25]),
            ),
            LayerTrace(
                second, torch.tensor([[1.0, 0.5, 0.0], [0.25, 1.0, 0.0]]), torch.ones(2, 2), torch.tensor([0.75, 1.0])
            ),
        ),
        prefix=1,
        before_block=True,
    )


def test_counts_and_merges_are_kept_for_every_image_and_layer():
    assert trace().patches == 4
    assert trace().counts.tolist() == [[3, 2], [2, 1]]
    assert trace().r.tolist() == [[1, 1], [2, 1]]
    assert trace().merged.tolist() == [2, 3]
    assert trace().redundancy.tolist() == [[0.5, 0.75], [0.25, 1.0]]


def test_slots_map_original_patches_to_the_tokens_after_a_layer():
    assert trace().slots(0).tolist() == [[0, 1, 2, 1], [0, 0, 1, 1]]
    assert trace().slots(1).tolist() == trace().slots().tolist() == [[0, 1, 0, 1], [0, 0, 0, 0]]
    assert trace().slots(-2).tolist() == trace().slots(0).tolist()
    assert trace().plan().count.tolist() == [2, 1]
    for layer in (2, -3):
        with pytest.raises(
            BadOption, match=f"layer {layer} was asked for, and this forward pass has run 2 layers. Give a"
        ):
            trace().slots(layer)


def test_a_merged_token_has_the_greatest_salience_of_its_members():
    """D12, eq. (6); padding has none."""
    first, second = (layer.merged_salience for layer in trace().layers)
    assert first.tolist() == torch.tensor([[0.1, 1.0, 0.3], [0.0, 1.0, 0.0]]).tolist()
    assert second.tolist() == [[1.0, 0.5], [1.0, 0.0]]


def test_a_trace_prints_as_a_table():
    text = str(trace())
    assert text.startswith("2 images, 4 patch tokens + 1 prefix\n")
    rows = [re.split(r"\s+", line.strip()) for line in text.splitlines()[2:4]]
    assert rows == [["0", "1.50", "1", "2", "2.5"], ["1", "1.00", "1", "1", "1.5"]]
    assert text.endswith("merged 2.5 ± 0.5 of 4 per image")


def test_a_trace_of_no_images_prints_how_many_there_are():
    layers = trace().layers
    none = [
        LayerTrace(
            Plan(layer.plan.slot[:0], layer.plan.count[:0], layer.plan.width),
            layer.salience[:0],
            layer.size[:0],
            layer.redundancy[:0],
        )
        for layer in layers
    ]
    empty = Trace(tuple(none), prefix=1, before_block=True)
    assert str(empty) == "0 images, 4 patch tokens + 1 prefix"
    assert empty.r.shape == empty.counts.shape == (0, 2) and empty.merged.shape == (0,)
