"""Write the tables of the README and the docs from benchmarks/results, the tests' zoo and the imports of the library.

`--check` only compares.
"""

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from finetune_tables import finetune_table
from frontier_tables import (
    ablation_table,
    diffrate_table,
    frontier_table,
    gap_table,
    learned_table,
    repair_table,
    repaired_schedules_table,
    samples_table,
    training_step_table,
    tuned_cell,
    tuning_table,
)
from import_graph import drawing
from reading import MODELS, ROOT, Row, interval, read
from reliability_tables import fuzz_table, kill_table, load_table, mutation_table, neighbour_table
from speed_tables import (
    agreement_table,
    blocks_table,
    cpu_default_table,
    deciding_table,
    engines_table,
    equal_cost_table,
    floor_table,
    merge_every_table,
    parity_table,
    plain_call_table,
    processor_table,
    sizes_table,
    slices_table,
    speed_matrix,
    speed_table,
    widths_table,
)

CUTS = ("cut 10 %", "cut 20 %", "cut 30 %", "cut 40 %", "cut 50 %")
SHOWN = ("adamerge", "adamerge (cosine, exchanged)", "tome", "pitome", "dsm", "tofu", "evit", "ats", "dymu", "random")


def _change_rows(methods: Sequence[str]) -> list[str]:
    """Change of accuracy at three cuts on both models: ours first, then these methods."""
    lines = [
        "| change of top-1 in points, at a true cut of | 20 % | 30 % | 40 % | 20 % | 30 % | 40 % |",
        "|---|" + "---:|" * 6,
    ]
    lines.append("| | **ViT-Ti/16** | | | **DeiT-Ti/16** | | |")
    for method, shown in (("tuned", "**`adamerge.tune`**"), ("preset", "**`adamerge.presets.best`**, nothing tuned")):
        points = [tuned_cell(model, method, cut)["delta_top1"] for model in MODELS for cut in ("0.2", "0.3", "0.4")]
        lines.append(f"| {shown} | " + " | ".join(f"**{float(p):+.2f}**" for p in points) + " |")
    for method in methods:
        cells = [_cell(model, method, cut) for model in MODELS for cut in CUTS[1:4]]
        shown = "AdaMerge as published" if method == "adamerge" and len(methods) < len(SHOWN) else method
        lines.append(f"| {shown} | " + " | ".join(f"{float(c['delta_top1']):+.2f}" for c in cells) + " |")
    return lines


def _plain_row() -> Row:
    """The speed that the README tells: of several runs the slower one."""
    wanted = ("ViT-B/16 bf16", "256", "preset plain")
    runs = [row for row in read("plain-call") if (row["case"], row["batch"], row["contender"]) == wanted]
    return min(runs, key=lambda run: float(run["over_best"]))


def gain() -> str:
    """What a reader gains, in two sentences for the top of the README."""
    tuned = [tuned_cell(model, "tuned", "0.3") for model in MODELS]
    pairs = [(100 * float(cell["top1"]), 100 * float(cell["top1"]) - float(cell["delta_top1"])) for cell in tuned]
    kept = " and ".join(
        f"{name} has {merged:.2f} % top-1 instead of {full:.2f} %"
        for name, (merged, full) in zip(("ViT-Ti/16", "DeiT-Ti/16"), pairs, strict=True)
    )
    row = _plain_row()
    return (
        f"With 30 % less compute {kept}. With {100 * float(row['cut_true']):.0f} % less, ViT-B/16 gives "
        f"{float(row['over_best']):.2f} times as many images a second as its fastest unmerged form, on an "
        f"{row['device']}."
    )


def short_table() -> str:
    """Ours, ToMe and published AdaMerge, for the README; and a sentence on speed."""
    row = _plain_row()
    speed = (
        f"*Images a second: {float(row['over_plain']):.2f} times as many as the unmerged model in the same plain call, "
        f"{float(row['over_best']):.2f} times as many as its fastest form. ViT-B/16, bf16, batch 256, preset at a cut "
        f"of {float(row['cut_true']):.0%}, {row['device']}. Part of the gain comes from our kernels: see "
        "[speed](docs/speed.md).*"
    )
    return "\n".join([*_change_rows(("tome", "adamerge")), "", speed])


def change_table() -> str:
    """Change of accuracy at three cuts on both models, for every method."""
    return "\n".join(_change_rows(SHOWN))


def object_table() -> str:
    """What each method keeps of the objects in drawn images."""
    found = read("object-share")
    first = found[0]
    lines = [
        f"{first['images']} images; object patches are {float(first['patches_object']):.1%} of all patches.",
        "",
        "| method | cut | tokens left | of them object [95 %] | object patches kept | other patches kept |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in sorted(found, key=lambda row: (row["target_cut"], -float(row["tokens_object"]))):
        ends = ", ".join(f"{float(row['tokens_object' + end]):.1%}" for end in ("_low", "_high"))
        lines.append(
            f"| {row['method']} | {float(row['cut']):.0%} | {float(row['tokens']):.1f} | "
            f"{float(row['tokens_object']):.1%} [{ends}] | {float(row['object_kept']):.1%} | "
            f"{float(row['background_kept']):.1%} |"
        )
    return "\n".join(lines)


def long_table(model: str) -> str:
    """Every method at every cut on a model."""
    found = read(f"compare-{model}")
    full = found[0]
    lines = [
        f"### {model}",
        "",
        f"Unmerged: top-1 {float(full['top1']):.2%} on {full['images']} ImageNet-1k validation images, "
        f"{float(full['gmacs_true']):.3f} GMACs (true). {full['dtype']} on {full['device']}, {full['date']}.",
        "",
        f"![accuracy against compute saved](images/pareto-{model}.png)",
        "",
        "| method | cut | knob | top-1 | points lost [95 %] | KL | KL against ToMe [95 %] | speed |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in found[1:]:
        against = "–" if not row["kl_vs_rival"] else interval(row, "kl_vs_rival", 4)
        lines.append(
            f"| {row['method']} | {float(row['cut_true']):.1%} | {float(row['knob']):.2f} | {float(row['top1']):.2%} | "
            f"{interval(row, 'delta_top1', 2)} | {float(row['kl']):.4f} | {against} | {float(row['speedup']):.2f}× |"
        )
    return "\n".join(lines)


def verdict() -> str:
    """The difference in top-1 between published AdaMerge and ToMe, as a sentence."""
    parts = []
    for model in MODELS:
        cells = [(cut, _cell(model, "adamerge", cut)) for cut in CUTS]
        shown = [f"{interval(cell, 'top1_vs_rival', 2)} at {cut.removeprefix('cut ')}" for cut, cell in cells]
        parts.append(f"{model} {', '.join(shown)}")
    return f"{'; '.join(parts)}."


def zoo_table() -> str:
    """The supported models: those of the contract test over all libraries."""
    path = ROOT / "tests" / "hosts" / "zoo.py"
    spec = importlib.util.spec_from_file_location("tables_zoo", path)
    assert spec is not None and spec.loader is not None
    zoo = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = zoo
    spec.loader.exec_module(zoo)
    lines = ["| library | families, each with an example |", "|---|---|"]
    for library in dict.fromkeys(member.library for member in zoo.ZOO):
        families = [f"{m.name} (`{m.example}`)" for m in zoo.ZOO if m.library == library]
        lines.append(f"| {library} | {' · '.join(families)} |")
    return "\n".join(lines)


def segmentation_table() -> str:
    """mIoU at every cut for every measured model, the embedded one first."""
    found = read("segmentation")
    models = sorted({row["model"] for row in found}, key=lambda name: (name != "embedded", name))
    return "\n\n".join(_segmentation_of(model, [row for row in found if row["model"] == model]) for model in models)


def _segmentation_of(model: str, found: list[Row]) -> str:
    full = found[0]
    lines = [
        f"### {model}",
        "",
        f"Unmerged: mIoU {float(full['miou']):.2%} on {full['images']} images, {full['date']}.",
        "",
        "| method | cut | mIoU | points lost [95 %] | points against ToMe [95 %] |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in found[1:]:
        against = "–" if not row["vs_tome"] else _points(row, "vs_tome")
        lost = _points(row, "lost")
        cut, value = float(row["cut_true"]), float(row["miou"])
        lines.append(f"| {row['method']} | {cut:.1%} | {value:.2%} | {lost} | {against} |")
    return "\n".join(lines)


def video_table() -> str:
    """Cost and time of a video clip."""
    found = read("video")
    lines = [
        "| method | tokens left | GMACs | cut | seconds per clip | speed [least, most] |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in found:
        cut, speed, least, most = (float(row[n]) for n in ("cut_true", "speedup", "speedup_min", "speedup_max"))
        cost, seconds = float(row["gmacs_true"]), float(row["seconds"])
        lines.append(
            f"| {row['method']} | {row['tokens_left']} | {cost:.1f} | {cut:.1%} | {seconds:.2f} | "
            f"{speed:.2f}× [{least:.2f}, {most:.2f}] |"
        )
    first = found[0]
    how = f"{first['model']}, {first['threads']} thread, medians of {first['rounds']} rounds, torch {first['torch']}"
    return "\n".join([*lines, "", f"*{how}, {first['date']}.*"])


def _points(row: Row, name: str) -> str:
    value, low, high = (100 * float(row[name + end]) for end in ("", "_low", "_high"))
    return f"{value:+.2f} [{low:+.2f}, {high:+.2f}]"


def _cell(model: str, method: str, cut: str) -> Row:
    (cell,) = [row for row in read(f"compare-{model}") if row["method"] == method and row["budget"] == cut]
    return cell


def filled(text: str, name: str, table: str) -> str:
    """The text with `table` between the markers `name`."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    head, rest = text.split(begin)
    return f"{head}{begin}\n{table}\n{end}{rest.split(end)[1]}"


def pages() -> dict[Path, str]:
    """The pages with their tables written from the results."""
    readme, docs = ROOT / "README.md", ROOT / "docs"
    names = ("results", "frontier", "speed", "design", "reliability")
    results, frontier, speed, design, reliability = (docs / f"{name}.md" for name in names)
    long = "\n\n".join(long_table(model) for model in MODELS)
    return {
        readme: _all_filled(readme, {"gain": gain(), "comparison": short_table(), "supported": zoo_table()}),
        results: _all_filled(
            results,
            {
                "verdict": verdict(),
                "changes": change_table(),
                "comparison": long,
                "objects": object_table(),
                "segmentation": segmentation_table(),
                "video": video_table(),
            },
        ),
        design: _all_filled(design, {"imports": drawing()}),
        docs / "export.md": _all_filled(
            docs / "export.md",
            {
                "engines": engines_table(),
                "slices": slices_table(),
                "widths": widths_table(),
                "agreement": agreement_table(),
            },
        ),
        speed: _all_filled(
            speed,
            {
                "speeds": speed_matrix(),
                "plain calls": plain_call_table(),
                "processor": processor_table(),
                "default on a CPU": cpu_default_table(),
                "equal": equal_cost_table(),
                "blocks": blocks_table(),
                "sizes": sizes_table(),
                "deciding": deciding_table(),
                "parity": parity_table(),
                "floor": floor_table(),
                "speed": speed_table(),
            },
        ),
        reliability: _all_filled(
            reliability,
            {
                "fuzz": fuzz_table(),
                "kills": kill_table(),
                "load": load_table(),
                "neighbour": neighbour_table(),
                "mutation": mutation_table(),
            },
        ),
        frontier: _all_filled(
            frontier,
            {
                "frontier": frontier_table(),
                "gap": gap_table(),
                "tuning": tuning_table(),
                "merge every": merge_every_table(),
                "repair": repair_table(),
                "training step": training_step_table(),
                "repaired schedules": repaired_schedules_table(),
                "learned": learned_table(),
                "finetune": finetune_table(),
                "diffrate": diffrate_table(),
                "samples": samples_table(),
                "ablation": ablation_table(),
            },
        ),
    }


def _all_filled(path: Path, tables: Row) -> str:
    text = path.read_text(encoding="utf-8")
    for name, table in tables.items():
        text = filled(text, name, table)
    return text


def main() -> None:
    """Write the pages; with `--check`, only fail if they differ."""
    for path, text in pages().items():
        if "--check" not in sys.argv:
            path.write_text(text, encoding="utf-8")
        elif path.read_text(encoding="utf-8") != text:
            raise SystemExit(f"{path.name} is not what benchmarks/tables.py writes; run it without --check")


if __name__ == "__main__":
    main()
