"""Table 1: four methods at six cost tiers with the paper's settings, and AdaMerge at the cost of ToMe."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from adamerge.core.recipe import Recipe
from adamerge.experiments.bootstrap import Interval
from adamerge.experiments.reproduce.claims import Claim, at_least, differences, judge_all, not_applicable, spell
from adamerge.experiments.reproduce.experiment import Experiment
from adamerge.experiments.reproduce.outcome import Outcome
from adamerge.experiments.reproduce.section import Column, Grid, Section
from adamerge.methods import adamerge, dsm, pitome, tome

PAPER_UNMERGED = 85.19


@dataclass(frozen=True)
class Figures:
    """A row of the paper's table: top-1 in percent, cost in 10^9 multiply-accumulates, cut in percent, speed-up."""

    top1: float
    gmacs: float
    cut: float
    speedup: float


@dataclass(frozen=True)
class Tier:
    """A cost tier: the settings of the four methods, and the paper's figures for them."""

    name: str
    r_max: int
    r: int
    dsm: tuple[int, int]
    paper: Mapping[str, Figures]


def _tier(name: str, r_max: int, r: int, delayed: tuple[int, int], *rows: tuple[float, float, float, float]) -> Tier:
    return Tier(name, r_max, r, delayed, dict(zip(METHODS, (Figures(*row) for row in rows), strict=True)))


METHODS = ("AdaMerge", "ToMe", "PiToMe", "DSM")
RIVALS = METHODS[1:]
SEQUENTIAL, UNPROPORTIONAL = "AdaMerge, sequential calibration", "ToMe, no proportional attention"
MATCHED = "AdaMerge at ToMe's cost"
TIERS = (
    _tier("15.9G", 9, 3, (12, 6), (84.70, 15.91, 8.8, 1.01), (84.69, 15.93, 8.7, 1.10), (84.57, 15.93, 8.7, 1.04),
          (84.42, 15.95, 8.6, 1.06)),
    _tier("15.5G", 11, 4, (18, 6), (84.62, 15.54, 10.9, 1.05), (84.44, 15.43, 11.6, 1.10), (84.44, 15.43, 11.6, 1.04),
          (83.68, 15.48, 11.3, 1.09)),
    _tier("14.9G", 14, 5, (16, 5), (84.49, 14.98, 14.1, 1.09), (84.12, 14.93, 14.4, 1.15), (84.29, 14.93, 14.4, 1.08),
          (83.35, 14.90, 14.6, 1.12)),
    _tier("14.4G", 17, 6, (14, 4), (84.28, 14.39, 17.5, 1.13), (83.67, 14.43, 17.3, 1.19), (84.22, 14.43, 17.3, 1.12),
          (82.51, 14.37, 17.6, 1.21)),
    _tier("13.9G", 20, 7, (17, 4), (84.25, 13.94, 20.1, 1.17), (83.11, 13.94, 20.1, 1.25), (83.65, 13.94, 20.1, 1.17),
          (81.05, 13.90, 20.3, 1.26)),
    _tier("13.4G", 23, 8, (20, 4), (84.13, 13.42, 23.1, 1.22), (82.46, 13.44, 23.0, 1.31), (83.74, 13.44, 23.0, 1.23),
          (80.57, 13.47, 22.8, 1.28)),
)  # fmt: skip
# The paper's standard deviations of AdaMerge over five runs.
PAPER_STD = (0.01, 0.00, 0.03, 0.02, 0.03, 0.02)

COLUMNS = (
    Column("tier", "tier"),
    Column("method", "method"),
    Column("setting", "setting"),
    Column("top1", "top-1 %", "{:.2f}", "paper_top1"),
    Column("top1_std", "± over runs", "{:.2f}"),
    Column("delta", "Δ", "{:+.2f}", "paper_delta"),
    Column("gmacs", "GMACs", "{:.3f}", "paper_gmacs"),
    Column("cut", "cut %", "{:.1f}", "paper_cut"),
    Column("speedup", "speed-up", "{:.2f}×", "paper_speedup"),
    Column("kl", "KL", "{:.4f}"),
)

Measured = list[dict[str, list[Outcome]]]


def section(experiment: Experiment, out: Path) -> Section:
    """Measure the table and check the paper's claims about it."""
    measured, r_max = measure(experiment)
    rows = [_row(experiment, "", "unmerged", "", [experiment.unmerged], Figures(PAPER_UNMERGED, 17.45, 0.0, 1.0))]
    for tier, outcomes, matched in zip(TIERS, measured, r_max, strict=True):
        for method, runs in outcomes.items():
            rows.append(
                _row(experiment, f"~{tier.name}", method, setting(tier, method, matched), runs, tier.paper.get(method))
            )
    grid = Grid("table1", "Six tiers, the paper's settings", COLUMNS, tuple(rows))
    notes = (_about_runs(experiment), *_about_costs(experiment, measured), _about_tome(experiment, measured))
    return Section("table1", "Table 1: accuracy at matched cost", (grid,), tuple(_claims(experiment, measured)), notes)


def recipes(experiment: Experiment, tier: Tier) -> dict[str, Recipe]:
    """The recipes of a tier: four methods, AdaMerge calibrated sequentially, ToMe without proportional attention."""
    return {
        "AdaMerge": experiment.calibrated(adamerge(tier.r_max)),
        "ToMe": tome(tier.r),
        "PiToMe": pitome(tier.r),
        "DSM": dsm(*tier.dsm),
        SEQUENTIAL: experiment.calibrated(adamerge(tier.r_max), "sequential"),
        UNPROPORTIONAL: tome(tier.r, proportional_attention=False),
    }


def measure(experiment: Experiment) -> tuple[Measured, list[float]]:
    """The outcomes of each tier by method, and for each tier the r_max at which AdaMerge costs as much as ToMe."""
    measured = [experiment.repeat(recipes(experiment, tier), f"tier ~{tier.name}") for tier in TIERS]
    prices = [(float(t.r_max), m["AdaMerge"][0].gmacs) for t, m in zip(TIERS, measured, strict=True)]
    # r_max = 1 merges nothing, because counts are rounded down.
    prices = [(1.0, experiment.full_gmacs), *prices]
    r_max = [interpolate(prices, m["ToMe"][0].gmacs) for m in measured]
    at_cost = {name: experiment.calibrated(adamerge(value)) for name, value in zip(_names(), r_max, strict=True)}
    matched = experiment.repeat(at_cost, "AdaMerge at ToMe's cost")
    for name, outcomes in zip(_names(), measured, strict=True):
        outcomes[MATCHED] = matched[name]
    return measured, r_max


def interpolate(points: Sequence[tuple[float, float]], target: float) -> float:
    """The x at which the line through the points (x, y), y falling, has y = `target`; extrapolated beyond the ends."""
    falling = [points[0]]
    for point in points[1:]:
        # Points where y does not fall are skipped.
        if point[1] < falling[-1][1]:
            falling.append(point)
    if len(falling) == 1:
        return falling[0][0]
    last = next((i for i in range(1, len(falling)) if falling[i][1] <= target), len(falling) - 1)
    (x0, y0), (x1, y1) = falling[last - 1], falling[last]
    return round(max(x0 + (target - y0) * (x1 - x0) / (y1 - y0), 1.0), 2)


def setting(tier: Tier, method: str, matched: float) -> str:
    """The setting of a method at a tier, as the paper writes it."""
    if method == MATCHED:
        return f"r_max={matched:g}"
    if method.startswith("AdaMerge"):
        return f"r_max={tier.r_max}"
    return f"r={tier.dsm[0]}, d={tier.dsm[1]}" if method == "DSM" else f"r={tier.r}"


def _names() -> list[str]:
    return [tier.name for tier in TIERS]


def _row(
    experiment: Experiment, tier: str, method: str, knob: str, runs: Sequence[Outcome], paper: Figures | None
) -> dict[str, Any]:
    """A row: our figures, averaged over the runs, and the paper's."""
    top1 = [run.points.mean().item() for run in runs]
    gmacs = runs[0].gmacs
    row: dict[str, Any] = {
        "tier": tier,
        "method": method,
        "setting": knob,
        "top1": fmean(top1),
        "top1_std": pstdev(top1) if len(top1) > 1 else None,
        "delta": fmean(top1) - experiment.unmerged.points.mean().item(),
        "gmacs": gmacs,
        "cut": 100 * (1 - gmacs / experiment.full_gmacs),
        "speedup": fmean(run.rate for run in runs) / experiment.unmerged.rate,
        "kl": runs[0].kl.mean().item(),
        "merges": runs[0].merged.mean().item(),
    }
    if paper is not None:
        row |= {"paper_top1": paper.top1, "paper_delta": paper.top1 - PAPER_UNMERGED, "paper_gmacs": paper.gmacs}
        row |= {"paper_cut": paper.cut, "paper_speedup": paper.speedup}
    return row


def _claims(experiment: Experiment, measured: Measured) -> list[Claim]:
    claims = []
    for ours, where in (("AdaMerge", "with the paper's settings"), (MATCHED, "at matched cost")):
        for rival in RIVALS:
            claims.append(versus(experiment, measured, ours, rival, where))
    strongest = measured[-1]
    (lost,) = differences([(strongest["AdaMerge"][0].points, experiment.unmerged.points)])
    text = "At the strongest tier (r_max=23) AdaMerge loses only 1.06 points"
    claims.append(Claim(text, "-1.06", spell(lost), at_least(lost, -1.06)))
    return claims


def versus(experiment: Experiment, measured: Measured, ours: str, rival: str, where: str) -> Claim:
    """The claim that AdaMerge is at least as good as a rival at every tier, by paired differences of top-1."""
    text = f"AdaMerge >= {rival} at every tier, {where}"
    tiers = [i for i, tier in enumerate(TIERS) if rival != "DSM" or tier.dsm[1] < experiment.depth]
    gaps = [tier.paper["AdaMerge"].top1 - tier.paper[rival].top1 for tier in TIERS]
    paper = " ".join(f"{gap:+.2f}" for gap in gaps)
    if not tiers:
        return not_applicable(text, paper, f"the model has {experiment.depth} blocks, fewer than DSM skips")
    found: list[Interval] = differences([(measured[i][ours][0].points, measured[i][rival][0].points) for i in tiers])
    return judge_all(text, paper, found, [f"at ~{TIERS[i].name}" for i in tiers], at_least)


def _about_runs(experiment: Experiment) -> str:
    about = (
        "The library uses no random numbers and breaks ties by index. On a CPU repeated runs are identical, with a "
        "standard deviation of 0. On CUDA only the order of floating-point sums can differ."
    )
    if experiment.runs == 1:
        about += " One run was made; `--runs 5` makes the paper's five."
    return f"{about} The paper reports ± {min(PAPER_STD):.2f} to {max(PAPER_STD):.2f} over five runs."


def _about_costs(experiment: Experiment, measured: Measured) -> list[str]:
    """Notes on the count of costs, and on how far the costs at the paper's settings differ on this model."""
    pairs = [(m["AdaMerge"][0].gmacs, m["ToMe"][0].gmacs, m[MATCHED][0].gmacs) for m in measured]
    off = " ".join(f"{100 * (ours / theirs - 1):+.1f}" for ours, theirs, _ in pairs)
    near = max(abs(100 * (matched / theirs - 1)) for _, theirs, matched in pairs)
    return [
        "GMACs are the paper's count: blocks only, every block at the number of tokens that enter it.",
        f"With the paper's settings AdaMerge's cost differs from ToMe's by {off} %, tier by tier. At r_max=14 the "
        f"paper merges 47.2 tokens per image; here it is {measured[2]['AdaMerge'][0].merged.mean():.1f}. The rows "
        f"'{MATCHED}' interpolate r_max from the measured costs; they are within {near:.1f} % of ToMe's cost.",
        "Speed-ups are for this machine and this run; each model is timed once on the same batches.",
    ]


def _about_tome(experiment: Experiment, measured: Measured) -> str:
    with_it, without = (measured[-1][name][0] for name in ("ToMe", UNPROPORTIONAL))
    lost = differences([(o.points, experiment.unmerged.points) for o in (with_it, without)])
    return (
        f"ToMe r=8 changes top-1 by {spell(lost[0])} points with proportional attention, as in its official code, and "
        f"by {spell(lost[1])} without it. The paper's ToMe row changes by -2.73."
    )
