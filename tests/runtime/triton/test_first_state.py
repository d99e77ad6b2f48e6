"""The state before the first block, made once for a shape and by several threads."""

import threading

import torch
from torch import Tensor

from adamerge.runtime.triton import first_state
from adamerge.runtime.triton.first_state import FirstState

PREFIX = 1


def tokens(images: int) -> Tensor:
    return torch.randn(images, 5, 3)


def in_another_thread(states: FirstState, x: Tensor) -> None:
    thread = threading.Thread(target=states.make, args=(x, False))
    thread.start()
    thread.join()


def test_the_parts_of_a_shape_are_built_once():
    states = FirstState(PREFIX, class_token=True)
    first, second, other = (states.make(tokens(images), captured=False) for images in (2, 2, 3))
    assert second.layout is first.layout and second.history is first.history
    assert other.layout.images == 3 and other.history.shape == (3, 4)


def test_another_thread_gets_parts_of_its_own():
    """They may be written on another stream, which this thread does not wait for."""
    states = FirstState(PREFIX, class_token=True)
    before = states.make(tokens(2), captured=False)
    in_another_thread(states, tokens(2))
    assert states.make(tokens(2), captured=False).layout is not before.layout


def test_another_thread_may_come_between(monkeypatch):
    states = FirstState(PREFIX, class_token=True)
    states.make(tokens(2), captured=False)
    rows = first_state.pack_rows

    def interrupted(x: Tensor) -> Tensor:
        in_another_thread(states, tokens(3))
        return rows(x)

    monkeypatch.setattr(first_state, "pack_rows", interrupted)
    state = states.make(tokens(2), captured=False)
    assert state.layout.images == len(state.history) == 2 and len(state.size) == len(state.x) == 10


def test_a_capture_keeps_what_it_reads():
    states = FirstState(PREFIX, class_token=True)
    made = states.make(tokens(2), captured=False)
    assert states.make(tokens(2), captured=True).layout is made.layout
    assert [kept.layout for kept in states._captured] == [made.layout]
    states.make(tokens(3), captured=True)  # a shape that did not come before is built as a part of the graph
    assert len(states._captured) == 1
