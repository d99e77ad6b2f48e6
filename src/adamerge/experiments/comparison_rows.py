"""The rows of a comparison: made from the results of its cells, written as CSV and as Markdown."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, get_args

import torch
from torch import Tensor

from adamerge.experiments.bootstrap import Interval, intervals
from adamerge.experiments.csv_tables import write_table
from adamerge.experiments.store import StoredResult
from adamerge.flops import CostCount


@dataclass(frozen=True)
class ComparisonRow:
    """One cell of a comparison.

    Accuracies are fractions, their differences percentage points.  `*_low` and `*_high` are the ends of 95 % intervals
    over images.  `*_vs_rival` is this method minus the rival at the same budget.
    """

    model: str
    method: str
    options: str
    budget: str
    cost: str
    target_cut: float | None
    knob: float | None
    met: bool
    cut_true: float
    cut_paper: float
    gmacs_true: float
    gmacs_paper: float
    top1: float
    top5: float
    delta_top1: float
    delta_top1_low: float
    delta_top1_high: float
    agreement: float
    kl: float
    kl_low: float
    kl_high: float
    rival: str
    rival_met: bool | None
    top1_vs_rival: float | None
    top1_vs_rival_low: float | None
    top1_vs_rival_high: float | None
    kl_vs_rival: float | None
    kl_vs_rival_low: float | None
    kl_vs_rival_high: float | None
    merged_mean: float
    merged_std: float
    images: int
    images_per_second: float
    speedup: float
    device: str
    dtype: str
    versions: str
    date: str


def to_csv(rows: Sequence[ComparisonRow]) -> str:
    """The rows as CSV with all fields; fields that do not apply are empty."""
    return write_table([field.name for field in fields(ComparisonRow)], (asdict(row) for row in rows))


COLUMNS = (
    "method",
    "budget",
    "knob",
    "cut true",
    "cut paper",
    "top-1",
    "Δ top-1",
    "agrees",
    "KL",
    "merged",
    "speed-up",
)
VERSUS = ("Δ top-1", "Δ KL")


def texts(row: ComparisonRow) -> tuple[str, ...]:
    """The cells of a row as text, for `COLUMNS` and `VERSUS`.  ≈ marks a target that is not met."""
    return (
        "unmerged" if row.method == "none" else row.method,
        "" if row.method == "none" else row.budget + (" ≈" if not row.met else ""),
        "" if row.knob is None else f"{row.knob:.4g}",
        f"{row.cut_true:.1%}",
        f"{row.cut_paper:.1%}",
        f"{row.top1:.2%}",
        _ends(row.delta_top1, row.delta_top1_low, row.delta_top1_high, "+.2f"),
        f"{row.agreement:.2%}",
        _ends(row.kl, row.kl_low, row.kl_high, ".4f"),
        f"{row.merged_mean:.1f} ± {row.merged_std:.1f}",
        f"{row.speedup:.2f}×",
        _ends(row.top1_vs_rival, row.top1_vs_rival_low, row.top1_vs_rival_high, "+.2f"),
        _ends(row.kl_vs_rival, row.kl_vs_rival_low, row.kl_vs_rival_high, "+.4f") + (" ≈" * (row.rival_met is False)),
    )


def _ends(mean: float | None, low: float | None, high: float | None, form: str) -> str:
    return "" if mean is None else f"{mean:{form}} [{low:{form}}, {high:{form}}]"


def headings(rows: Sequence[ComparisonRow]) -> tuple[str, ...]:
    """The headings for the texts of these rows."""
    rival = next((row.rival for row in rows if row.rival), "rival")
    return (*COLUMNS, *(f"{column} vs {rival}" for column in VERSUS))


def to_markdown(rows: Sequence[ComparisonRow], missing: Sequence[str] = ()) -> str:
    """The rows as a Markdown table with the conditions of the run; `missing` lists the cells that were left out."""
    first = rows[0]
    lines = [
        f"# {first.model}: methods at equal {first.cost} cost",
        "",
        f"{first.images} images, {first.dtype} on {first.device}; unmerged {first.gmacs_true:.4g} GMACs (true), "
        f"{first.gmacs_paper:.4g} (paper).  Brackets are 95 % bootstrap intervals over images, accuracy differences "
        "are points.  ≈: the target lies between two steps of the knob, this is the nearest.",
        "",
    ]
    for cells in (headings(rows), ["---"] * (len(COLUMNS) + len(VERSUS)), *map(texts, rows)):
        lines.append("| " + " | ".join(cells) + " |")
    if missing:
        lines += ["", "Left out:", "", *(f"* {text}" for text in missing)]
    return "\n".join(lines) + "\n"


def make_rows(results: Sequence[StoredResult], rival: str, model: str) -> list[ComparisonRow]:
    """A row for each result, with intervals; each is compared with the result labelled `rival` at the same budget."""
    rivals = {r.facts["budget"]: r for r in results if r.facts["method"] == rival and r.facts["target_cut"] is not None}
    columns: list[Tensor] = []
    for result in results:
        mine = {key: value.double() for key, value in result.tensors.items()}
        other = rivals.get(result.facts["budget"], result).tensors
        columns += [
            100 * (mine["top1"] - mine["full_top1"]),
            mine["kl"],
            100 * (mine["top1"] - other["top1"].double()),
            mine["kl"] - other["kl"],
        ]
    found = intervals(torch.stack(columns, 1))
    return [
        _row(result, rivals.get(result.facts["budget"]), rival, model, found[4 * i : 4 * i + 4])
        for i, result in enumerate(results)
    ]


def _row(
    result: StoredResult, other: StoredResult | None, rival: str, model: str, found: Sequence[Interval]
) -> ComparisonRow:
    facts, images = result.facts, {key: value.double() for key, value in result.tensors.items()}
    if facts["method"] == rival:
        other = None
    named: dict[str, Any] = {}
    for name, one in zip(("delta_top1", "kl", "top1_vs_rival", "kl_vs_rival"), found, strict=True):
        applies = other is not None or not name.endswith("_vs_rival")
        ends = (one.mean, one.low, one.high) if applies else (None, None, None)
        named |= dict(zip((name, f"{name}_low", f"{name}_high"), ends, strict=True))
    for cost in get_args(CostCount):
        macs = images[cost].mean().item()
        named |= {f"gmacs_{cost}": macs / 1e9, f"cut_{cost}": 1 - macs / facts[f"full_{cost}"]}
    shown = ("method", "options", "budget", "cost", "target_cut", "knob", "met", "device", "dtype", "versions", "date")
    return ComparisonRow(
        model=model,
        rival=rival if other is not None else "",
        rival_met=other.facts["met"] if other is not None else None,
        merged_mean=images["merged"].mean().item(),
        merged_std=images["merged"].std(correction=0).item(),
        images=len(images["kl"]),
        images_per_second=facts["timed"] / facts["seconds"],
        speedup=facts["full_seconds"] / facts["seconds"],
        **{name: images[name].mean().item() for name in ("top1", "top5", "agreement")},
        **{name: facts[name] for name in shown},
        **named,
    )
