"""Reads the file of `adamerge eval --json`."""

import json
from collections.abc import Mapping
from typing import Any

from adamerge.report.charts import Point, Series, bars
from adamerge.report.html_table import Shown, table
from adamerge.report.images import GROUPS, KeptImage, kept_tokens
from adamerge.report.run_report import RunReport

COLUMNS = (
    Shown("images", "images"),
    Shown("top1", "top-1", "{:.2%}"),
    Shown("top1_unmerged", "unmerged", "{:.2%}"),
    Shown("top5", "top-5", "{:.2%}"),
    Shown("agreement", "agrees", "{:.2%}"),
    Shown("kl", "KL", "{:.4f}"),
    Shown("gmacs_true", "GMACs, true", "{:.4f}"),
    Shown("gmacs_true_unmerged", "unmerged", "{:.4f}"),
    Shown("gmacs_paper", "GMACs, paper", "{:.4f}"),
    Shown("gmacs_paper_unmerged", "unmerged", "{:.4f}"),
    Shown("merged_mean", "merged", "{:.1f}"),
    Shown("merged_std", "± std", "{:.1f}"),
    Shown("speedup", "speed-up", "{:.2f}×"),
    Shown("images_per_second", "images/s", "{:.0f}"),
)


def read_eval(figures: Mapping[str, Any], source: str) -> RunReport:
    """The report of the figures of a file."""
    title = f"{figures['method']} on {figures['model']}"
    row = {key: repr(value) if isinstance(value, float) else str(value) for key, value in figures.items()}
    means = [float(r) for r in figures["r_per_layer"]]
    points = [Point(str(i), repr(r), f"block {i}: {r:.2f}") for i, r in enumerate(means)]
    charts = [bars("Tokens merged at each block, E[r_l]", ("block", "tokens merged per image"), [Series("", points)])]
    missing = [f"{path}: could not be read" for path in figures.get("unreadable", ())]
    if figures.get("tokens_kept"):
        groups = {kind: [_image(one) for one in figures.get(kind, ())] for kind in GROUPS}
        charts.append(kept_tokens(title, json.loads(figures["tokens_kept"]), int(figures["patches"]), groups))
    else:
        missing.append("the tokens of each image: the file is of an older version; run eval again")
    shown = table("Figures", COLUMNS, [row], source=source.rsplit("/", 1)[-1])
    settings = {key: row[key] for key in ("model", "method", "options", "runtime", "device", "dtype") if key in row}
    provenance = settings | {f"{name} version": str(v) for name, v in figures.get("versions", {}).items()}
    return RunReport("eval", title, source, (), missing, [shown, *charts], provenance)


def _image(entry: Mapping[str, Any]) -> KeptImage:
    return KeptImage(int(entry["image"]), int(entry["tokens"]), str(entry["jpeg"]))
