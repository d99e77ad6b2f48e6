"""A benchmark times in turns and compares with the best unmerged contender."""

import json
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from clocks import run
from hosts.families import RECIPES, pictures

import adamerge
from adamerge.experiments.benchmark import (
    timing,
    twin,
)
from adamerge.experiments.benchmark.rows import COLUMNS
from adamerge.experiments.benchmark.timing import (
    FORWARD,
    Timing,
    choose_inner,
    count_syncs,
    interleave,
    stages_of_kernels,
)
from adamerge.flops import meter
from adamerge.patching.apply import apply
from adamerge.runtime import profiling as stages

CPU = torch.device("cpu")
MEMORY = {"peak_mb", "own_mb", "syncs"}


# --- figures ---------------------------------------------------------------------------------------------------------


def test_a_row_has_everything_that_this_device_can_measure(model, clock):
    rows = run(model, weights="random", source="pictures")
    assert [(row.method, row.way) for row in rows] == [("none", "eager"), ("none", "compiled"), ("tome", "reference")]
    for row in rows:
        missing = {name for name in COLUMNS if getattr(row, name) in (None, "")}
        own = {"options", "knob", "target", "cost", "error"}
        unmerged = {"stages", "deciding", "reached_true", "reached_paper"}
        assert missing == MEMORY | own | (unmerged if row.method == "none" else set())
        assert (row.batch, row.image_size, row.dtype, row.device, row.rounds) == (2, 64, "float32", "cpu", 4)
        assert adamerge.__version__ in row.versions and row.date.endswith("Z")


def test_speed_ups_are_ratios_against_the_best_unmerged_contender(model, clock):
    rows = {row.way: row for row in run(model)}
    assert {row.best_unmerged for row in rows.values()} == {"compiled"}
    assert [rows[way].speedup for way in ("eager", "compiled", "reference")] == pytest.approx([0.5, 1, 1.25])
    merged = rows["reference"]
    assert (merged.ms_p20, merged.ms_p50, merged.ms_p80) == pytest.approx((8, 8, 8))
    assert merged.images_per_second == pytest.approx(2 / 0.008)
    assert merged.ideal_true and merged.reached_true == pytest.approx(0.25 / (merged.ideal_true - 1))
    assert merged.ideal_paper and merged.reached_paper == pytest.approx(0.25 / (merged.ideal_paper - 1))


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_cut_is_that_of_the_tokens_that_these_images_kept(model, clock, recipe):
    images = pictures(6)
    chosen = RECIPES[recipe](model, images)
    row = run(model, {"it": chosen}, batch_sizes=[3], rounds=2)[-1]
    with torch.inference_mode():
        merged = apply(twin(model), chosen)
        merged(images)
        cost, full = adamerge.flops.cost(merged), meter(model).unmerged()
    assert row.cut_true == pytest.approx(1 - (cost.true.mean() / full.true).item())
    assert row.cut_paper == pytest.approx(1 - (cost.paper.mean() / full.paper).item())
    assert row.ideal_paper == pytest.approx((full.paper / cost.paper.mean()).item())


def test_the_unmerged_model_saves_nothing_and_has_no_gain_to_reach(model, clock):
    row = run(model)[0]
    assert (row.cut_true, row.ideal_true, row.cut_paper, row.ideal_paper) == (0, 1, 0, 1)
    assert row.reached_true is None and row.reached_paper is None


def test_stages_add_up_to_less_than_the_whole_and_deciding_is_the_share_of_two(model):
    row = run(model, rounds=1, unmerged=["eager"])[-1]
    spent = json.loads(row.stages)
    whole = spent.pop("all")
    assert set(spent) == set(stages.STAGES) and 0 < sum(spent.values()) <= whole
    assert row.deciding == pytest.approx((spent["decide"] + spent["merge"]) / whole, rel=1e-2)


def test_quantiles_are_over_rounds():
    times = Timing(tuple(map(float, range(1, 12))), 1)
    assert [times.quantile(share) for share in (0.2, 0.5, 0.8)] == [3, 6, 9]


def test_a_short_call_is_repeated_until_a_turn_is_long_enough():
    assert [choose_inner(ms) for ms in (100.0, 30.0, 3.0, 0.0)] == [1, 1, 10, timing.MOST_INNER]


@pytest.mark.parametrize(("device", "expected"), [("CPU", 2), ("CUDA", None)])
def test_only_synchronisations_inside_the_forward_pass_are_counted(device, expected):
    def event(name: str, start: float, end: float, kind: str = "DeviceType.CPU"):
        return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end), device_type=kind)

    seen = [
        event(FORWARD, 10, 20, f"DeviceType.{device}"),
        event(FORWARD, 11, 25, "DeviceType.CUDA"),
        event("cudaLaunchKernel", 11, 12),
        event("cudaStreamSynchronize", 12, 13),
        event("cudaMemcpyAsync", 13, 13),
        event("cudaEventSynchronize", 19, 20),
        event("cudaDeviceSynchronize", 22, 23),
        event("cudaStreamSynchronize", 5, 6),
    ]
    assert count_syncs(seen) == expected


def test_the_stages_of_a_graph_are_told_by_its_kernels():
    def event(name, start, end, device="CUDA"):
        return SimpleNamespace(
            name=name, time_range=SimpleNamespace(start=start, end=end), device_type=f"DeviceType.{device}"
        )

    seen = [
        event(FORWARD, 0, 9000),
        event("_decide", 0, 9000, "CPU"),
        event("_decide", 1000, 2000),
        event("_match", 2000, 2500),
        event("_merge", 2500, 4500),
        event("some_vendors_product", 4500, 8500),
    ]
    assert stages_of_kernels(seen) == {"decide": 1.5, "merge": 2.0, "others": 4.0, "all": 7.5}
    assert stages_of_kernels(seen[-1:]) == {} == stages_of_kernels([])
    # A kernel that starts while the product runs and waits for it; then two that overlap.
    early = [*seen, event("_decide", 5000, 9000), event("_attend", 8600, 9500), event("_match", 9100, 9200)]
    assert stages_of_kernels(early)["decide"] == pytest.approx(1.5 + 0.5 + 0.1)
    assert stages_of_kernels(early)["attention"] == pytest.approx(0.3)
    assert stages_of_kernels(early)["all"] == pytest.approx(8.4)


def test_every_kernel_with_a_stage_of_its_own_is_known():
    folder = Path(stages.__file__).parent / "triton" / "kernels"
    text = "".join(path.read_text(encoding="utf-8") for path in folder.glob("*.py"))
    launched = set(re.findall(r"(_[a-z_]+)\[\(", text))
    assert set(stages.KERNELS) == launched - {"_linear", "_linear_described", "_embed"}
    assert set(stages.KERNELS.values()) - {"residual"} < set(stages.STAGES)


def test_a_profiler_that_saw_no_device_cannot_say_how_often_it_waited():
    assert count_syncs([]) is None


def test_a_turn_is_as_long_as_asked_for(model, clock):
    assert [row.inner for row in run(model, inner=None)] == [2, 3, 4]
    rows = run(model, inner=5)
    assert [row.inner for row in rows] == [5, 5, 5]
    assert [row.ms_p50 for row in rows] == pytest.approx([20, 10, 8])


# --- turns -----------------------------------------------------------------------------------------------------------


def test_contenders_run_in_turn_in_another_order_each_round():
    log: list[tuple[int, int]] = []
    calls = [lambda turn, who=who: log.append((turn, who)) for who in range(4)]
    interleave(calls, [2, 1, 3, 1], CPU, rounds=6, seed=1, progress=False)
    rounds = [[who for turn, who in log if turn == number] for number in range(6)]
    assert log == [(number, who) for number, one in enumerate(rounds) for who in one]
    assert all(Counter(one) == {0: 2, 1: 1, 2: 3, 3: 1} for one in rounds)
    orders = [tuple(dict.fromkeys(one)) for one in rounds]
    assert all(
        [who for who in order for _ in range((2, 1, 3, 1)[who])] == one
        for order, one in zip(orders, rounds, strict=True)
    )
    assert len(set(orders)) > 1
    again, log[:] = list(log), []
    interleave(calls, [2, 1, 3, 1], CPU, rounds=6, seed=1, progress=False)
    assert log == again


def test_in_a_round_all_have_the_same_images_and_rounds_go_through_different_ones(model, clock):
    run(model, batch_sizes=[1], rounds=12)
    # Every contender warms up on all six images, and once more for its memory.
    turns = clock.log[3 * (6 + 1) :][: 3 * 12]
    rounds = [turns[first : first + 3] for first in range(0, len(turns), 3)]
    assert all({name for name, _ in one} == {"eager", "compiled", "reference"} for one in rounds)
    assert all(len({value for _, value in one}) == 1 for one in rounds)
    values = [one[0][1] for one in rounds]
    assert len(set(values)) == 6 and values[:6] == values[6:]
    assert values[:6] == [image.sum().item() for image in pictures(6).split(1)]


def test_every_contender_is_warm_before_the_first_round(model, clock):
    run(model, rounds=1, unmerged=["eager", "compiled"])
    first = [name for name, _ in clock.log[: 3 * (timing.WARM_UP + 1)]]
    assert Counter(first) == {name: timing.WARM_UP + 1 for name in ("eager", "compiled", "reference")}


def test_a_batch_larger_than_the_images_repeats_them(model, clock):
    rows = run(model, batch_sizes=[8], unmerged=["eager"])
    assert [row.batch for row in rows] == [8, 8] and not any(row.error for row in rows)
    assert {value for _, value in clock.log} == {pictures(6)[torch.arange(8) % 6].sum().item()}


def test_who_fails_has_no_further_turn():
    log: list[int] = []

    def fail(turn: int) -> None:
        log.append(turn)
        if turn == 1:
            raise RuntimeError("broken")

    found = interleave([fail, lambda turn: None], [1, 1], CPU, rounds=5, progress=False)
    assert log == [0, 1] and found[0] == "RuntimeError: broken"
    assert isinstance(found[1], Timing) and len(found[1].rounds) == 5
