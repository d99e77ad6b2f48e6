"""Merges per layer: the mean E[r_l] at six values of r_max, and the paper's claims about three regimes."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from adamerge.experiments.reproduce import table1
from adamerge.experiments.reproduce.claims import Claim, fact, not_applicable
from adamerge.experiments.reproduce.experiment import Experiment
from adamerge.experiments.reproduce.section import Column, Grid, Section
from adamerge.methods import adamerge

# Block numbers start at 0, as in the paper: block 11 is the last of ViT-B/16's twelve.
R_MAX = tuple(tier.r_max for tier in table1.TIERS)
MILD, MODERATE, AGGRESSIVE = (9, 11), (14, 17), (20, 23)
# r_max -> block -> E[r_l]: all figures in the paper.
PAPER: dict[int, dict[int, float]] = {
    9: {11: 5.18},
    14: {1: 4.71, 11: 3.12},
    17: {1: 5.87, 11: 0.84},
    20: {10: 0.0, 11: 0.0},
    23: {10: 0.0, 11: 0.0},
}
# A layer with fewer merges than this on average is inactive.
INACTIVE = 0.005
HOW = {"iterative": "as published", "sequential": "with sequential calibration"}

Means = Mapping[int, Sequence[float]]


def section(experiment: Experiment, out: Path) -> Section:
    """Measure E[r_l], check the paper's claims about it and plot it."""
    from adamerge.plots.figures import layers

    grids, tables = [], {}
    for how, words in HOW.items():
        recipes = {str(r): experiment.calibrated(adamerge(r), how) for r in R_MAX}  # pyright: ignore[reportArgumentType]
        tables[how] = {int(r): o.r for r, o in experiment.measure(recipes, f"layers, {how}").items()}
        grids.append(_grid(f"layers-{how}", f"E[r_l], {words}", means(tables[how])))
    picture = layers({f"r_max={r}": table for r, table in tables["iterative"].items()}, out / "layers.png")
    claims = statements(means(tables["iterative"]))
    notes = (
        "The claims are about means over all images, so they are true or false without statistics. "
        "Block numbers start at 0.",
    )
    title = "Layer-wise merging distribution"
    return Section("layers", title, tuple(grids), tuple(claims), notes, (picture.name,))


def means(tables: Mapping[int, Tensor]) -> dict[int, list[float]]:
    """E[r_l] of each r_max."""
    return {r_max: table.double().mean(0).tolist() for r_max, table in tables.items()}


def statements(e: Means) -> list[Claim]:
    """The paper's claims about E[r_l] with their verdicts."""
    return [*_mild(e), *_moderate(e), *_aggressive(e), _invariant(e)]


def _mild(e: Means) -> list[Claim]:
    last = len(e[9]) - 1
    largest = {r: _largest(e[r]) for r in MILD}
    figure = f"largest at block {' and '.join(map(str, largest.values()))}; E[r_{last}] = {e[9][last]:.2f} at r_max=9"
    shallow = {r: (sum(e[r][:2]) / 2, sum(e[r]) / len(e[r])) for r in MILD}
    return [
        Claim(
            "Regime 1 (r_max <= 11): the final block merges most",
            "largest at block 11; E[r_11] = 5.18 at r_max=9",
            figure,
            fact(all(block == last for block in largest.values())),
        ),
        Claim(
            "Regime 1: shallow layers (blocks 0-1) merge less than the average layer",
            "no figure given",
            "; ".join(f"{few:.2f} against {all_:.2f} at r_max={r}" for r, (few, all_) in shallow.items()),
            fact(all(few < all_ for few, all_ in shallow.values())),
        ),
    ]


def _moderate(e: Means) -> list[Claim]:
    depth = len(e[14])
    busiest = {r: sorted(range(depth), key=lambda layer: -e[r][layer])[:2] for r in MODERATE}
    most = Claim(
        "Regime 2 (r_max 14 and 17): blocks 0 and 1 are the most active",
        "E[r_1] = 4.71 and 5.87",
        f"E[r_1] = {' and '.join(f'{e[r][1]:.2f}' for r in MODERATE)}; most active are blocks "
        + "; ".join(f"{a}, {b} at r_max={r}" for r, (a, b) in busiest.items()),
        fact(all(set(pair) == {0, 1} for pair in busiest.values())),
    )
    text, paper = "Regime 2: block 11 contracts (below its E[r_11] at r_max=9)", "E[r_11] = 3.12 and 0.84, from 5.18"
    if depth <= 11:
        return [most, not_applicable(text, paper, _has(depth))]
    ours = f"E[r_11] = {' and '.join(f'{e[r][11]:.2f}' for r in MODERATE)}, from {e[9][11]:.2f}"
    return [most, Claim(text, paper, ours, fact(e[17][11] < e[14][11] < e[9][11]))]


def _aggressive(e: Means) -> list[Claim]:
    text = "Regime 3 (r_max >= 20): layers >= 10 are inactive, E[r_l] = 0"
    depth = len(e[20])
    if depth <= 10:
        return [not_applicable(text, "0", _has(depth))]
    deep = {r: e[r][10:] for r in AGGRESSIVE}
    ours = "; ".join(f"{' '.join(f'{v:.2f}' for v in values)} at r_max={r}" for r, values in deep.items())
    return [Claim(text, "0", ours, fact(all(v < INACTIVE for values in deep.values() for v in values)))]


def _invariant(e: Means) -> Claim:
    text = "Invariant: block 2 merges least among active layers, at all six settings"
    depth = len(e[9])
    if depth <= 2:
        return not_applicable(text, "block 2", _has(depth))
    least = {r: min((v, layer) for layer, v in enumerate(row) if v >= INACTIVE) for r, row in e.items() if _active(row)}
    if not least:
        return not_applicable(text, "block 2", "no layer merges anything")
    ours = "; ".join(f"block {layer} ({v:.2f}) at r_max={r}" for r, (v, layer) in least.items())
    verdict = fact(len(least) == len(e) and all(layer == 2 for _, layer in least.values()))
    return Claim(text, "block 2", ours, verdict, f"it is block {', '.join(str(layer) for _, layer in least.values())}")


def _active(row: Sequence[float]) -> bool:
    return max(row) >= INACTIVE


def _largest(row: Sequence[float]) -> int:
    return max(range(len(row)), key=lambda layer: row[layer])


def _has(depth: int) -> str:
    return f"the model has {depth} blocks"


def _grid(name: str, title: str, e: Means) -> Grid:
    rows = []
    for r_max, values in e.items():
        rows.append({"r_max": r_max, "source": "ours", **{f"block_{i}": v for i, v in enumerate(values)}})
        if PAPER.get(r_max):
            rows.append({"r_max": r_max, "source": "paper", **{f"block_{i}": v for i, v in PAPER[r_max].items()}})
    blocks = tuple(Column(f"block_{i}", str(i), "{:.2f}") for i in range(len(next(iter(e.values())))))
    return Grid(name, title, (Column("r_max", "r_max"), Column("source", ""), *blocks), tuple(rows))
