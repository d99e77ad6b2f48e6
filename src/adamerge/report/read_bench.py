"""Reads the CSV file of `adamerge bench`."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from adamerge.experiments.benchmark.requests import not_timed, read_requests
from adamerge.experiments.csv_tables import read_table
from adamerge.report.charts import Point, Series, curves
from adamerge.report.html_table import Shown, table, versions_of
from adamerge.report.run_report import RunReport

COLUMNS = (
    Shown("model", "model"),
    Shown("image_size", "pixels"),
    Shown("batch", "batch"),
    Shown("dtype", "dtype"),
    Shown("method", "method"),
    Shown("target", "target"),
    Shown("way", "way"),
    Shown("images_per_second", "images/s", "{:.0f}"),
    Shown("ms_p50", "ms, median", "{:.3f}"),
    Shown("ms_p20", "ms, 20 %", "{:.3f}"),
    Shown("ms_p80", "ms, 80 %", "{:.3f}"),
    Shown("speedup", "speed-up", "{:.2f}×"),
    Shown("ideal_true", "ratio of costs", "{:.2f}×"),
    Shown("reached_true", "reached", "{:.0%}"),
    Shown("cut_true", "cut, true", "{:.1%}"),
    Shown("peak_mb", "peak MB", "{:.0f}"),
    Shown("device", "device"),
    Shown("date", "date"),
    Shown("error", "error"),
)
Row = Mapping[str, str]


def read_bench(path: Path) -> RunReport:
    """The report of a file; contenders that failed are named, and batch sizes that a stopped run did not reach."""
    rows = read_table(path.read_text(encoding="utf-8"))
    left = not_timed(read_requests(path), rows)
    if not rows:
        nothing = ["all rows: the run was stopped before the first one"]
        return RunReport("bench", path.stem, str(path), missing=left or nothing)
    failed = [
        f"{row['model']}, {row['method']}, {row['way']}, batch {row['batch']}: {row['error']}"
        for row in rows
        if row.get("error")
    ]
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in ("model", "image_size", "dtype", "device")), []).append(row)
    plots = "".join(_plot(key, found) for key, found in groups.items())
    summary = ("Speed-ups are over the fastest unmerged contender of the same batch size and run.",)
    blocks = [f'<div class="charts">{plots}</div>' if plots else "", table("All rows", COLUMNS, rows, source=path.name)]
    last = rows[-1]
    kept = ("weights", "images", "device", "date")
    provenance = {key: last[key] for key in kept if last.get(key)} | versions_of(last["versions"])
    return RunReport("bench", path.stem, str(path), summary, [*left, *failed], [b for b in blocks if b], provenance)


def _plot(key: tuple[str, ...], rows: Sequence[Row]) -> str:
    """The speed-up of every method, in its fastest way, against the batch size."""
    found: dict[tuple[str, str], Row] = {}
    for row in rows:
        if row["method"] == "none" or not row["speedup"]:
            continue
        name = f"{row['method']}, {row['target']}" if row["target"] else row["method"]
        known = found.get((name, row["batch"]))
        if known is None or (row["date"], float(row["speedup"])) > (known["date"], float(known["speedup"])):
            found[name, row["batch"]] = row
    sizes = sorted({batch for _, batch in found}, key=int)
    series: dict[str, list[Point]] = {}
    for (name, batch), row in found.items():
        tip = f"{name}, batch {batch}\nspeed-up {float(row['speedup']):.2f}× ({row['way']})"
        tip += f"\nratio of costs {float(row['ideal_true']):.2f}×" if row["ideal_true"] else ""
        series.setdefault(name, []).append(Point(batch, row["speedup"], tip, place=sizes.index(batch)))
    model, size, dtype, device = key
    title = f"{model}, {size} pixels, {dtype} on {device}"
    labels = ("images in a batch", "speed-up")
    return curves(title, labels, [Series(*pair) for pair in series.items()], level=1, names=sizes) if series else ""
