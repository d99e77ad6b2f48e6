"""A model, and ways to run it that take a known time."""

import pytest
from clocks import Clock
from hosts.families import build

from adamerge import timing
from adamerge.experiments.benchmark import MERGED, UNMERGED
from adamerge.runtime import profiling


@pytest.fixture
def clock(monkeypatch) -> Clock:
    """Unmerged, eager takes 20 ms and compiled 10; merged, 8 ms."""
    clock = Clock()
    for room in (timing, profiling):
        monkeypatch.setattr(room, "time", clock)
    monkeypatch.setitem(UNMERGED, "eager", clock.way("eager", 20.0))
    monkeypatch.setitem(UNMERGED, "compiled", clock.way("compiled", 10.0))
    monkeypatch.setitem(MERGED, "reference", clock.way("reference", 8.0, runtime="reference"))
    return clock


@pytest.fixture(scope="module")
def model():
    return build("vit")
