"""When graphs are captured, kept and dropped.  A stand-in runs the blocks again in place of a CUDA graph."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adamerge.core.plan import keep_all
from adamerge.runtime.module_watch import ModuleWatch
from adamerge.runtime.trace import LayerTrace, Trace
from adamerge.runtime.triton.graph_cache import CALLS_BEFORE_CAPTURE, LARGEST_PADDING, MOST_GRAPHS, GraphCache
from adamerge.runtime.triton.graph_capture import CapturedGraph


class Recorded:
    """In place of a CUDA graph: reads one tensor, overwrites another."""

    def __init__(self, run: Any, example: Tensor):
        self.run, self.input = run, example
        self.output = run(example)

    def replay(self) -> None:
        tokens, _ = self.run(self.input)
        self.output[0].copy_(tokens)


class Model:
    """One linear layer in place of the blocks, with its cache, and the batch sizes that were captured."""

    def __init__(self) -> None:
        self.layer: Any = nn.Linear(4, 4, bias=False)
        self.captured: list[int] = []
        self.cache = GraphCache(self.blocks, lambda: ModuleWatch([self.layer]), self.capture)

    def blocks(self, x: Tensor, tables: Any = ()) -> tuple[Tensor, Any]:
        b, n = x.shape[:2]
        ones = x.sum(2)
        layer = LayerTrace(keep_all(b, n, x.device), ones, ones, x.sum((1, 2)))
        return self.layer(x), lambda: Trace((layer,), 0, False)

    def capture(self, run: Any, example: Tensor, pool: Any = None) -> Any:
        self.captured.append(len(example))
        recorded = Recorded(run, example)
        return CapturedGraph(recorded, (recorded.input,), recorded.output, [])

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor | None:
        replayed = self.cache.run(x)
        if replayed is None:
            return None
        assert torch.equal(replayed.tokens, self.layer(x))
        return replayed.tokens

    def warm(self, batch: int) -> None:
        for _ in range(CALLS_BEFORE_CAPTURE):
            self(tokens(batch))
        assert self(tokens(batch)) is not None


def tokens(batch: int) -> Tensor:
    return torch.randn(batch, 3, 4)


def test_a_shape_gets_its_graph_after_a_few_calls():
    model = Model()
    for _ in range(CALLS_BEFORE_CAPTURE):
        assert model(tokens(8)) is None
    for _ in range(3):
        assert model(tokens(8)) is not None
    assert model.captured == [8]


def test_the_calls_until_a_capture_are_counted():
    model, left = Model(), []
    for _ in range(CALLS_BEFORE_CAPTURE + 2):
        left.append(model.cache.calls_until_capture(tokens(8)))
        model(tokens(8))
    assert left == [*range(CALLS_BEFORE_CAPTURE + 1, 0, -1), 0]
    assert model.cache.calls_until_capture(tokens(5)) == CALLS_BEFORE_CAPTURE + 1


def test_a_result_is_not_overwritten_by_the_next_call():
    model = Model()
    model.warm(2)
    first = model(tokens(2))
    assert first is not None
    kept = first.clone()
    model(tokens(2))
    assert torch.equal(first, kept)


def test_a_smaller_batch_takes_the_graph_of_a_larger_one_if_little_is_wasted():
    model = Model()
    model.warm(8)
    assert model(tokens(5)) is not None
    assert model(tokens(8 // LARGEST_PADDING)) is not None
    assert model(tokens(8 // LARGEST_PADDING - 1)) is None
    assert model(tokens(9)) is None
    assert model.captured == [8]


def test_the_trace_is_that_of_the_images_given():
    model = Model()
    model.warm(8)
    x = tokens(5)
    with torch.no_grad():
        replayed = model.cache.run(x)
    assert replayed is not None
    trace = replayed.build_trace()
    assert trace.counts.tolist() == [[3]] * 5
    # The stand-in's trace is that of the capture; what matters is that there is a row for each image.
    assert trace.layers[0].salience.shape == trace.layers[0].size.shape == (5, 3)
    assert trace.redundancy.shape == (5, 1)


def test_few_graphs_are_kept_and_ever_new_shapes_are_captured_ever_more_seldom():
    model = Model()
    for _ in range(3):
        for batch in range(1, MOST_GRAPHS + 1):
            for _ in range(CALLS_BEFORE_CAPTURE + 1):
                model(tokens(10**batch))
    assert len(model.captured) == MOST_GRAPHS
    generator = torch.Generator().manual_seed(0)
    for _ in range(500):
        model(tokens(int(torch.randint(1, 200, (1,), generator=generator))))
    assert len(model.cache) == MOST_GRAPHS
    assert len(model.captured) < 2 * MOST_GRAPHS


@pytest.mark.parametrize("change", ["in place", "memory", "parameter", "child", "mode"])
def test_changed_weights_are_used_and_a_changed_module_is_captured_again(change):
    model = Model()
    model.layer = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model.warm(2)
    captured = len(model.captured)
    with torch.no_grad():
        weight = model.layer[0].weight
        match change:
            case "in place":
                weight.mul_(2)
            case "memory":
                weight.data = weight.data * 2
            case "parameter":
                model.layer[0].weight = nn.Parameter(weight * 2)
            case "child":
                model.layer[0] = nn.Linear(4, 4)
            case _:
                model.layer.eval()
    again = model(tokens(2))
    if change == "in place":
        assert again is not None
        assert len(model.captured) == captured
    else:
        assert again is None
        model.warm(2)
        assert len(model.captured) == captured + 1


def test_hooks_run():
    model = Model()
    model.warm(2)
    handle = model.layer.register_forward_hook(lambda *_: None)
    assert model(tokens(2)) is None
    handle.remove()
    assert model(tokens(2)) is not None


def test_a_capture_that_fails_is_not_tried_again():
    model = Model()

    def refuse(*_: Any, **__: Any) -> Any:
        model.captured.append(0)
        raise RuntimeError("operation not permitted when stream is capturing\nsecond line")

    model.cache = GraphCache(model.blocks, lambda: ModuleWatch([model.layer]), refuse)
    for _ in range(9):
        assert model(tokens(2)) is None
    assert model.captured == [0]
    assert model.cache.failure == "operation not permitted when stream is capturing"


def test_threads_get_their_own_results():
    model, wrong = Model(), []
    model.warm(4)

    def work() -> None:
        for _ in range(50):
            x = tokens(4)
            with torch.no_grad():
                replayed = model.cache.run(x)
                if replayed is None or not torch.equal(replayed.tokens, model.layer(x)):
                    wrong.append(x)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
