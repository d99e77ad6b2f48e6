"""Stages cost nothing unless somebody listens, and what a listener hears adds up."""

import pytest
import torch
from hosts.families import build, pictures

import adamerge
from adamerge.runtime import profiling as room
from adamerge.runtime.profiling import STAGES, Stages, stage


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """A clock that stands still until it is moved."""
    now = [0.0]
    monkeypatch.setattr(room.time, "perf_counter", lambda: now[0])
    return now


def test_without_a_listener_every_stage_is_the_same_silent_object():
    assert stage("qkv") is stage("mlp")
    with Stages() as heard:
        assert stage("qkv") is not stage("mlp")
    assert stage("qkv") is stage("mlp") and heard.milliseconds == {}


def test_times_of_a_stage_add_up_and_the_total_holds_what_lies_between(clock):
    with Stages() as heard:
        for _ in range(2):
            with stage("decide"):
                clock[0] += 0.003
            clock[0] += 0.001
            with stage("mlp"):
                clock[0] += 0.005
    assert heard.milliseconds == pytest.approx({"decide": 6, "mlp": 10})
    assert heard.total == pytest.approx(18)


def test_only_the_innermost_listener_hears_and_the_outer_one_goes_on_afterwards(clock):
    with Stages() as outer:
        with Stages() as inner, stage("merge"):
            clock[0] += 0.002
        with stage("mlp"):
            clock[0] += 0.001
    assert inner.milliseconds == pytest.approx({"merge": 2}) and outer.milliseconds == pytest.approx({"mlp": 1})


def test_an_error_in_a_stage_ends_the_listening():
    with pytest.raises(KeyError), Stages() as heard, stage("decide"):
        raise KeyError
    assert set(heard.milliseconds) == {"decide"}
    assert stage("a") is stage("b")


@pytest.mark.parametrize("site", ["before_block", "after_attention"])
def test_a_merged_model_passes_every_stage_and_computes_the_same(site):
    model, images = build("vit"), pictures()
    recipe = adamerge.methods.adamerge(r=3) if site == "before_block" else adamerge.methods.tome(3)
    assert recipe.site == site
    adamerge.apply(model, recipe)
    with torch.inference_mode():
        plain = model(images)
        with Stages(images.device) as heard:
            again = model(images)
    assert torch.equal(plain, again)
    assert set(heard.milliseconds) == set(STAGES)
    assert all(spent >= 0 for spent in heard.milliseconds.values())
    assert sum(heard.milliseconds.values()) <= heard.total


def test_a_compiled_model_may_have_stages():
    def twice(x: torch.Tensor) -> torch.Tensor:
        with stage("mlp"):
            return x + x

    compiled = torch.compile(twice, backend="eager", fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == [2, 2]
