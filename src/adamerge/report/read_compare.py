"""Reads a folder of `adamerge compare`, or its results.csv alone."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from adamerge.experiments.comparison_rows import make_rows, to_csv
from adamerge.experiments.csv_tables import read_table
from adamerge.experiments.run_record import read_record
from adamerge.experiments.store import StoredResult, read_result
from adamerge.report.charts import FEW, Point, Series, bars, curves
from adamerge.report.html_table import Shown, table, versions_of
from adamerge.report.images import GROUPS, from_tensors, kept_tokens
from adamerge.report.run_report import RunReport

Row = Mapping[str, str]

COLUMNS = (
    Shown("method", "method"),
    Shown("budget", "budget"),
    Shown("cut_true", "cut, true", "{:.1%}"),
    Shown("cut_paper", "cut, paper", "{:.1%}"),
    Shown("gmacs_true", "GMACs, true", "{:.4g}"),
    Shown("top1", "top-1", "{:.2%}"),
    Shown("delta_top1", "Δ top-1", "{:+.2f}"),
    Shown("delta_top1_low", "95 % low", "{:+.2f}"),
    Shown("delta_top1_high", "95 % high", "{:+.2f}"),
    Shown("agreement", "agrees", "{:.2%}"),
    Shown("kl", "KL", "{:.4f}"),
    Shown("top1_vs_rival", "Δ top-1 vs rival", "{:+.2f}"),
    Shown("top1_vs_rival_low", "95 % low", "{:+.2f}"),
    Shown("top1_vs_rival_high", "95 % high", "{:+.2f}"),
    Shown("merged_mean", "merged", "{:.1f}"),
    Shown("speedup", "speed-up", "{:.2f}×"),
    Shown("met", "target met"),
)
# Drawn first, in this order; recipes of the user come before them, and the best of the others after them.
FIRST = ("preset", "adamerge", "tome")
# As many methods get a histogram of their tokens.
MOST_HISTOGRAMS = 6


def read_compare(folder: Path) -> RunReport:
    """The report of a folder; of a run that was stopped, the cells that it finished."""
    record = read_record(folder)
    results = folder / "results.csv"
    stopped = record is not None and not record.get("finished")
    cells, missing = _cells(folder, record)
    if results.is_file() and not stopped:
        rows, source = read_table(results.read_text(encoding="utf-8")), "results.csv"
    else:
        rows, source = _rows_of_cells(cells, record), "cells"
        if record is None:
            missing.append("results.csv: the run was stopped; run the same command again, finished cells are kept")
    missing += (record or {}).get("left_out", [])
    return report_rows(rows, str(folder), source, missing, _blocks_of_cells(cells), record)


def report_rows(
    rows: Sequence[Row],
    where: str,
    source: str,
    missing: Sequence[str] = (),
    more: Sequence[str] = (),
    record: Mapping[str, Any] | None = None,
) -> RunReport:
    """The report of the rows of a comparison."""
    if not rows:
        return RunReport("compare", str((record or {}).get("model", "")), where, missing=missing or ["all cells"])
    first = rows[0]
    rival = next((row["rival"] for row in rows if row.get("rival")), "")
    about = (
        f"{first['images']} images, {first['dtype']} on {first['device']}. Differences of top-1 are percentage points, "
        "intervals are 95 % bootstrap intervals over images. A hollow mark missed its target cost."
    )
    if rival:
        about += f" The rival is {rival}."
    about += " ★ is the most accurate method at each budget." if _best(rows) else ""
    shown = table("All cells", COLUMNS, rows, source=source, best=_best(rows))
    kept = ("model", "cost", "images", "dtype", "device", "date")
    provenance = {key: first[key] for key in kept if first.get(key)} | versions_of(first["versions"])
    if record is not None:
        provenance |= {key: str(value) for key, value in record.get("settings", {}).items()}
    return RunReport("compare", first["model"], where, (about,), missing, [_plots(rows), shown, *more], provenance)


def _plots(rows: Sequence[Row]) -> str:
    """Change of accuracy against compute saved, and against speed."""
    series = _ordered(rows)
    count = rows[0]["cost"]
    by_cost = [Series(name, [_point(row, f"cut_{count}", 100) for row in found]) for name, found in series]
    by_speed = [Series(name, [_point(row, "speedup", 1) for row in found]) for name, found in series]
    few = f" ({FEW} of {len(series)} methods; choose below)" if len(series) > FEW else ""
    change = "change of top-1, points"
    cost = curves(f"Accuracy against cost{few}", (f"compute saved ({count} count), %", change), by_cost, level=0)
    speed = curves(f"Accuracy against speed{few}", ("speed-up, measured in this run", change), by_speed, level=0)
    return f'<div class="charts">{cost}{speed}</div>' if series else ""


def _point(row: Row, x: str, scale: float) -> Point:
    low, high = float(row["delta_top1_low"]), float(row["delta_top1_high"])
    tip = (
        f"{row['method']}, {row['budget']}\ntop-1 {float(row['top1']):.2%}: {float(row['delta_top1']):+.2f} "
        f"[{low:+.2f}, {high:+.2f}] points\ncut {float(row['cut_true']):.1%} true, {float(row['cut_paper']):.1%} paper"
        f"\nspeed-up {float(row['speedup']):.2f}×, KL {float(row['kl']):.4f}"
    )
    return Point(row[x], row["delta_top1"], tip, (scale, 1.0), (low, high), hollow=row["met"] == "False")


def _ordered(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """The rows by method: recipes of the user, the methods of `FIRST`, then the others by their mean accuracy."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row["method"] != "none":
            found.setdefault(row["method"], []).append(row)

    def rank(name: str) -> tuple[int, float]:
        own = [row for row in found[name] if row["budget"] == "native"]
        place = -1 if own and name not in FIRST else FIRST.index(name) if name in FIRST else len(FIRST)
        return place, -sum(float(row["delta_top1"]) for row in found[name]) / len(found[name])

    return [(name, found[name]) for name in sorted(found, key=rank)]


def _best(rows: Sequence[Row]) -> set[int]:
    """The number of the most accurate row at each budget that several methods have."""
    budgets: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        if row["method"] != "none" and row["budget"] != "native":
            budgets.setdefault(row["budget"], []).append(index)
    return {max(of, key=lambda index: float(rows[index]["top1"])) for of in budgets.values() if len(of) > 1}


Cells = list[tuple[str, StoredResult]]


def _cells(folder: Path, record: Mapping[str, Any] | None) -> tuple[Cells, list[str]]:
    """The stored cells of a run by title, and what is missing of them."""
    if record is None:
        return [], []
    found, missing = [], []
    for cell in record["cells"]:
        title = f"{cell['method']}, {cell['budget']}"
        result = read_result(folder / "cells" / Path(cell["file"]).name)
        if result is not None:
            found.append((title, result))
        elif not any(text.startswith(f"{title}:") for text in record.get("left_out", ())):
            missing.append(f"{title}: not measured; run the same command again to finish it")
    if missing:
        missing.insert(0, f"{len(missing)} of {len(record['cells'])} cells; the run was stopped before they were done")
    return found, missing


def _rows_of_cells(cells: Cells, record: Mapping[str, Any] | None) -> list[dict[str, str]]:
    if not cells or record is None:
        return []
    return read_table(to_csv(make_rows([result for _, result in cells], record["rival"], record["model"])))


def _blocks_of_cells(cells: Cells) -> list[str]:
    """Merges per layer, and histograms of the tokens that images keep, of cells whose images keep different numbers."""
    merging = [(title, result) for title, result in cells if _merges(result)]
    adaptive = [(title, result) for title, result in merging if result.tensors["merged"].double().std() > 0]
    others = [pair for pair in merging if pair not in adaptive]
    layered = [(title, result.tensors["r"].double().mean(0).tolist()) for title, result in (*adaptive, *others)]
    blocks: list[str] = []
    if layered:
        series = [
            Series(title, [Point(str(i), repr(r), f"{title}, block {i}: {r:.2f}") for i, r in enumerate(means)])
            for title, means in layered
        ]
        blocks.append(bars("Tokens merged at each block, E[r_l]", ("block", "tokens merged per image"), series))
    for title, one in adaptive[:MOST_HISTOGRAMS]:
        patches = one.facts["patches"]
        kept = (patches - one.tensors["merged"]).tolist()
        groups = {kind: from_tensors(one.tensors, kind) for kind in GROUPS}
        blocks.append(kept_tokens(title, kept, patches, groups))
    return blocks


def _merges(result: StoredResult) -> bool:
    """Whether a cell has its merges per layer, and merges something."""
    return "r" in result.tensors and "patches" in result.facts and bool(result.tensors["r"].any())
