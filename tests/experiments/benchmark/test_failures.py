"""A benchmark loses nothing when something fails."""

import pytest
import torch
from clocks import run
from hosts.families import pictures

from adamerge.core.errors import BadImages, BadOption
from adamerge.experiments.benchmark import (
    UNMERGED,
    Contender,
    Way,
    bench,
    make_entries,
    read_rows,
    timing,
)
from adamerge.flops import meter

# --- failures --------------------------------------------------------------------------------------------------------


def failing(error: Exception, after: int = 0):
    """Another contender, that fails after some calls."""
    left = [after]

    def run(images: torch.Tensor) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise error

    return lambda model: [Contender("bad", "tried", lambda images: run, lambda images: meter(model).unmerged())]


@pytest.mark.parametrize("after", [0, timing.WARM_UP + 2])
def test_a_contender_that_fails_gives_a_row_with_the_reason_and_the_others_go_on(model, clock, after):
    rows = run(model, others=failing(torch.OutOfMemoryError("no room\nfor more"), after), unmerged=["eager"])
    assert [row.error for row in rows] == ["", "", "OutOfMemoryError: no room"]
    assert rows[-1].ms_p50 is None and rows[-1].speedup is None
    assert rows[1].speedup == pytest.approx(2.5)


def test_a_model_that_cannot_be_prepared_gives_a_row_with_the_reason(model, clock, monkeypatch):
    def make(model, images):
        raise RuntimeError("no compiler")

    monkeypatch.setitem(UNMERGED, "compiled", Way(make))
    rows = run(model)
    assert {row.way: row.error for row in rows} == {
        "eager": "",
        "compiled": "RuntimeError: no compiler",
        "reference": "",
    }
    assert rows[-1].best_unmerged == "eager"


def test_without_an_unmerged_contender_there_are_times_but_no_speed_ups(model, clock, monkeypatch):
    monkeypatch.setitem(UNMERGED, "eager", Way(lambda model, images: {}["eager"]))
    rows = run(model, unmerged=["eager"])
    assert rows[0].error.startswith("KeyError") and rows[1].ms_p50 == pytest.approx(8) and not rows[1].speedup


def test_a_target_out_of_reach_gives_a_row_that_says_so(model, clock):
    entries = make_entries(model, pictures(4), ["tome"], [0.2, 0.999], progress=False)
    rows = run(model, entries, unmerged=["eager"])
    assert [row.target for row in rows] == ["", "cut 20 %", "cut 99.9 %"]
    assert "cannot meet cut 99.9 %" in rows[2].error and not rows[1].error


def test_an_interrupted_run_keeps_the_batch_sizes_that_were_done(model, clock, tmp_path):
    out, calls = tmp_path / "rows.csv", []

    def others(net):
        calls.append(net)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return []

    with pytest.raises(KeyboardInterrupt):
        run(model, batch_sizes=[1, 2], others=others, out=out)
    assert {row.batch for row in read_rows(out)} == {1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_sizes": []}, "at least one of them"),
        ({"batch_sizes": [0]}, r"whole numbers >= 1, at least one of them; got \[0\]"),
        ({"rounds": 0}, "rounds and inner must be at least 1"),
        ({"unmerged": ["graph"]}, "'graph' is a CUDA graph and the model is on cpu; leave it out or use CUDA"),
        ({"merged": ["magic"]}, "there is no way 'magic' to run a model; choose from packed"),
    ],
)
def test_a_mistake_gets_a_message(model, options, message):
    with pytest.raises(BadOption, match=message):
        run(model, **options)


def test_images_must_be_images(model):
    with pytest.raises(BadImages, match=r"expected images as a tensor .* got \(0, 3, 64, 64\)"):
        bench(model, torch.zeros(0, 3, 64, 64), {})
