"""Table 2: the gap in top-1 between AdaMerge and ToMe at each tier, and whether it grows with compression."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from torch import Tensor

from adamerge.experiments.bootstrap import Interval
from adamerge.experiments.reproduce import table1
from adamerge.experiments.reproduce.claims import Claim, above, differences, judge_all
from adamerge.experiments.reproduce.experiment import Experiment
from adamerge.experiments.reproduce.section import Column, Grid, Section

PAPER_GAPS = (0.01, 0.18, 0.37, 0.61, 1.14, 1.67)

COLUMNS = (
    Column("tier", "tier"),
    Column("gap", "paper's settings", "{:+.2f}", "paper"),
    Column("interval", "95 %"),
    Column("matched", "matched cost", "{:+.2f}"),
    Column("matched_interval", "95 %"),
    Column("plain", "ToMe without proportional attention, matched cost", "{:+.2f}"),
    Column("plain_interval", "95 %"),
)
# (key, AdaMerge's row, ToMe's row)
COMPARISONS = (
    ("gap", "AdaMerge", "ToMe"),
    ("matched", table1.MATCHED, "ToMe"),
    ("plain", table1.MATCHED, table1.UNPROPORTIONAL),
)


def section(experiment: Experiment, out: Path) -> Section:
    """Measure the gaps and check the claim that they grow."""
    measured, _ = table1.measure(experiment)
    rows = [{"tier": f"~{tier.name}", "paper": gap} for tier, gap in zip(table1.TIERS, PAPER_GAPS, strict=True)]
    claims: list[Claim] = []
    for key, ours, rival in COMPARISONS:
        pairs = [(m[ours][0].points, m[rival][0].points) for m in measured]
        gaps = differences(pairs)
        interval = "interval" if key == "gap" else f"{key}_interval"
        for row, gap in zip(rows, gaps, strict=True):
            row |= {key: gap.mean, interval: f"[{gap.low:+.2f}, {gap.high:+.2f}]"}
        where = {"gap": "with the paper's settings", "matched": "at matched cost"}.get(key)
        where = where or "at matched cost, against ToMe without proportional attention"
        claims.append(widening(pairs, where))
    grid = Grid("table2", "Gap in top-1 points, AdaMerge - ToMe", COLUMNS, tuple(rows))
    return Section("table2", "Table 2: the gap to ToMe", (grid,), tuple(claims))


def widening(pairs: Sequence[tuple[Tensor, Tensor]], where: str) -> Claim:
    """The claim that the gap `a - b` grows from each tier to the next, by the paired change of the gap."""
    gaps = [(a - b).double() for a, b in pairs]
    steps: list[Interval] = differences([(after, before) for before, after in pairwise(gaps)])
    paper = " ".join(f"{b - a:+.2f}" for a, b in pairwise(PAPER_GAPS))
    text = f"The gap to ToMe widens monotonically, {where} (change from tier to tier)"
    names = [f"from ~{a.name} to ~{b.name}" for a, b in pairwise(table1.TIERS)]
    return judge_all(text, paper, steps, names, above)
