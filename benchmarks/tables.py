"""Write the tables of the README and the docs from benchmarks/results and the tests' zoo; `--check` only compares."""

import csv
import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
MODELS = ("vit_tiny_patch16_224", "deit_tiny_patch16_224")
CUTS = ("cut 10 %", "cut 20 %", "cut 30 %", "cut 40 %", "cut 50 %")
SHOWN = ("adamerge", "adamerge (cosine, exchanged)", "tome", "pitome", "dsm", "tofu", "evit", "ats", "dymu", "random")


def rows(model: str) -> list[dict[str, str]]:
    """The comparison on a model, as `adamerge compare` wrote it."""
    with (RESULTS / f"compare-{model}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def short_table() -> str:
    """Accuracy lost at three cuts on both models, for the README."""
    lines = [
        "| change of top-1 in points, at a true cut of | 20 % | 30 % | 40 % | 20 % | 30 % | 40 % |",
        "|---|" + "---:|" * 6,
    ]
    lines.append("| | **ViT-Ti/16** | | | **DeiT-Ti/16** | | |")
    for method, shown in (("tuned", "**`adamerge.tune`**"), ("preset", "**`adamerge.presets.best`**, nothing tuned")):
        points = [_tuned_cell(model, method, cut)["delta_top1"] for model in MODELS for cut in ("0.2", "0.3", "0.4")]
        lines.append(f"| {shown} | " + " | ".join(f"**{float(p):+.2f}**" for p in points) + " |")
    for method in SHOWN:
        cells = [_cell(model, method, cut) for model in MODELS for cut in CUTS[1:4]]
        lines.append(f"| {method} | " + " | ".join(f"{float(c['delta_top1']):+.2f}" for c in cells) + " |")
    return "\n".join(lines)


def long_table(model: str) -> str:
    """Every method at every cut on a model."""
    found = rows(model)
    full = found[0]
    lines = [
        f"### {model}",
        "",
        f"Unmerged: top-1 {float(full['top1']):.2%} on {full['images']} ImageNet-1k validation images, "
        f"{float(full['gmacs_true']):.3f} GMACs (true). {full['dtype']} on {full['device']}, {full['date']}.",
        "",
        f"![cost, speed and divergence](images/pareto-{model}.png)",
        "",
        "| method | cut | knob | top-1 | points lost [95 %] | KL | KL against ToMe [95 %] | speed |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in found[1:]:
        against = "–" if not row["kl_vs_rival"] else _interval(row, "kl_vs_rival", 4)
        lines.append(
            f"| {row['method']} | {float(row['cut_true']):.1%} | {float(row['knob']):.2f} | {float(row['top1']):.2%} | "
            f"{_interval(row, 'delta_top1', 2)} | {float(row['kl']):.4f} | {against} | {float(row['speedup']):.2f}× |"
        )
    return "\n".join(lines)


def verdict() -> str:
    """How far published AdaMerge is behind ToMe, in a sentence."""
    parts = []
    for model in MODELS:
        cells = [(cut, _cell(model, "adamerge", cut)) for cut in CUTS]
        shown = [f"{_interval(cell, 'top1_vs_rival', 2)} at {cut.removeprefix('cut ')}" for cut, cell in cells]
        parts.append(f"{model} {', '.join(shown)}")
    return f"{'; '.join(parts)}."


def zoo_table() -> str:
    """What is supported: the members of the contract test over all libraries."""
    path = ROOT / "tests" / "models" / "zoo.py"
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
    """mIoU at every cut, for every model that was measured; the embedded one first."""
    with (RESULTS / "segmentation.csv").open(encoding="utf-8", newline="") as file:
        found = list(csv.DictReader(file))
    models = sorted({row["model"] for row in found}, key=lambda name: (name != "embedded", name))
    return "\n\n".join(_segmentation_of(model, [row for row in found if row["model"] == model]) for model in models)


def _segmentation_of(model: str, found: list[dict[str, str]]) -> str:
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
    """Cost and time of a clip."""
    with (RESULTS / "video.csv").open(encoding="utf-8", newline="") as file:
        found = list(csv.DictReader(file))
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


def _points(row: dict[str, str], name: str) -> str:
    value, low, high = (100 * float(row[name + end]) for end in ("", "_low", "_high"))
    return f"{value:+.2f} [{low:+.2f}, {high:+.2f}]"


def bench_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a benchmark that have figures."""
    with path.open(encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file) if not row["error"]]


def speed_matrix() -> str:
    """Each method's fastest way at every batch size, with the ratio of costs beside it."""
    found = bench_rows(RESULTS / "bench-vit_base_patch16_224.csv")
    found = [row for row in found if row["target"] or "official" in row["method"]]
    batches = sorted({int(row["batch"]) for row in found})
    methods = dict.fromkeys(row["method"] for row in found)
    lines = [
        "| over the best unmerged, at batch | " + " | ".join(map(str, batches)) + " | promised by the cost |",
        "|---|" + "---:|" * (len(batches) + 1),
    ]
    for method in methods:
        mine = [row for row in found if row["method"] == method]
        best = [max((float(row["speedup"]) for row in mine if int(row["batch"]) == b), default=None) for b in batches]
        ideals = [float(row["ideal_true"]) for row in mine]
        ideal = f"{min(ideals):.2f}–{max(ideals):.2f}×" if max(ideals) - min(ideals) > 0.005 else f"{ideals[0]:.2f}×"
        lines.append(f"| {method} | " + " | ".join("–" if x is None else f"{x:.2f}×" for x in best) + f" | {ideal} |")
    return "\n".join(lines)


def speed_table() -> str:
    """Every contender at every batch size of every model, from one interleaved run each."""
    return "\n\n".join(_speed_of(path) for path in sorted(RESULTS.glob("bench-*.csv")))


def _speed_of(path: Path) -> str:
    found = bench_rows(path)
    first = found[0]
    lines = [
        f"**{first['model']}**, {first['weights']} weights, {first['image_size']} pixels, {first['dtype']} on "
        f"{first['device']}, {first['date'][:10]}.",
        "",
        "| batch | method | way | cut | ms [p20, p80] | speed-up | ideal | deciding | memory of the call | waits |",
        "|---:|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in found:
        low, middle, high = (float(row[f"ms_{p}"]) for p in ("p20", "p50", "p80"))
        # A processor's times say little about another's; their ratios do.
        took = "–" if row["device"] == "cpu" else f"{middle:.2f} [{low:.2f}, {high:.2f}]"
        memory = f"{float(row['own_mb']):.0f} MB" if row["own_mb"] else "–"
        deciding = f"{float(row['deciding']):.0%}" if row["deciding"] else "–"
        lines.append(
            f"| {row['batch']} | {'unmerged' if row['method'] == 'none' else row['method']} | {row['way']} | "
            f"{float(row['cut_true']):.1%} | {took} | {float(row['speedup']):.2f}× | "
            f"{float(row['ideal_true']):.2f}× | {deciding} | {memory} | {row['syncs'] or '–'} |"
        )
    return "\n".join(lines)


def frontier_table() -> str:
    """The tuned recipe and the preset beside the best rival at each cut, for every model that was measured."""
    parts = []
    for path in sorted(RESULTS.glob("frontier-*.csv")):
        with path.open(encoding="utf-8", newline="") as file:
            found = list(csv.DictReader(file))
        parts.append(_frontier_of(path.stem.removeprefix("frontier-"), found))
    return "\n\n".join(parts)


def _frontier_of(model: str, found: list[dict[str, str]]) -> str:
    first = found[0]
    loss = "1 − cosine, of the class token / of the patches" if first["cosine_pooled"] else "KL"
    rivals = sorted({row["method"] for row in found} - {"tuned", "preset"})
    lines = [
        f"### {model}",
        "",
        f"Judged by {loss}; in brackets: on the tuning images. Rivals: {', '.join(rivals)}. {first['dtype']} on "
        f"{first['device']}, {first['date']}.",
        "",
        "| cut | images: tuned on, judged on | tuned | preset | best rival, tuned as freely | tuned − rival [95 %] | "
        f"ratio | best untuned rival | ToMe | {'cosines' if first['cosine_pooled'] else 'points'}: tuned, rival | "
        "passes, seconds |",
        "|---:|" + "---:|" * 10,
    ]
    notes = []
    for cut in sorted({row["cut"] for row in found}, key=float):
        here = [row for row in found if row["cut"] == cut]
        (tuned,), (preset,) = ([row for row in here if row["method"] == name] for name in ("tuned", "preset"))
        others = [row for row in here if row["method"] in rivals]
        absent = sorted(set(rivals) - {row["method"] for row in others})
        if absent:
            notes.append(f"Not measured at {float(cut):.0%}: {', '.join(absent)}.")
        # Whoever is best where it counts, also where the tuning images preferred another setting.
        free = min(others, key=_kl)
        plain = min((row for row in others if row["untuned"] == "True"), key=_kl)
        tome = min((_kl(row) for row in others if row["method"] == "tome"), default=float("nan"))
        points = f"{float(tuned['delta_top1']):+.2f}, {float(free['delta_top1']):+.2f}"
        if first["cosine_pooled"]:
            points = f"{_cosines(tuned)}, {_cosines(free)}"
        lines.append(
            f"| {float(cut):.0%} | {tuned['tune_images']}, {tuned['judge_images']} | **{_loss(_kl(tuned))}** "
            f"({_loss(float(tuned['tune_kl']))}) | {_loss(_kl(preset))} | {free['method']} {_loss(_kl(free))} | "
            f"{_ends(free, 'tuned_minus_this')} | {float(free['tuned_ratio']):.2f} | "
            f"{plain['method']} {_loss(_kl(plain))} | {_loss(tome)} | {points} | "
            f"{tuned['sweeps']}, {float(tuned['seconds']):.0f} |"
        )
    return "\n".join([*lines, *(["", *notes] if notes else [])])


def _cosines(row: dict[str, str]) -> str:
    """Of the pooled output, which is the class token's, and of the patches."""
    return f"{float(row['cosine_pooled']):.3f} / {float(row['cosine_patches']):.3f}"


def gap_table() -> str:
    """How far ahead of ToMe the tuned recipe is, by cut."""
    lines = [
        "| model | cut | KL: tuned − ToMe [95 %] | points: tuned − ToMe [95 %] | KL: tuned / ToMe |",
        "|---|---:|---:|---:|---:|",
    ]
    for model in MODELS:
        with (RESULTS / f"frontier-{model}.csv").open(encoding="utf-8", newline="") as file:
            found = [row for row in csv.DictReader(file) if row["method"] == "tome" and row["best"] == "True"]
        for row in sorted(found, key=lambda row: float(row["cut"])):
            value, low, high = (float(row[n]) for n in ("tuned_top1_minus_this", "tuned_top1_low", "tuned_top1_high"))
            lines.append(
                f"| {model} | {float(row['cut']):.0%} | {_interval(row, 'tuned_minus_this', 4)} | "
                f"{value:+.2f} [{low:+.2f}, {high:+.2f}] | {float(row['tuned_ratio']):.2f} |"
            )
    return "\n".join(lines)


def tuning_table() -> str:
    """How long searches took."""
    lines = ["| model | cut | device | images | passes over them | seconds |", "|---|---:|---|---:|---:|---:|"]
    for name in ("samples-vit_tiny_patch16_224", "tuning-cpu"):
        with (RESULTS / f"{name}.csv").open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                if row["method"] == "tuned":
                    where = "2 cores" if row["device"] == "cpu" else row["device"]
                    lines.append(
                        f"| {row['model']} | {float(row['cut']):.0%} | {where} | {row['tune_images']} | "
                        f"{row['sweeps']} | {float(row['seconds']):.0f} |"
                    )
    return "\n".join(lines)


def samples_table() -> str:
    """What tuning on other images of the same kind gives on the judged ones."""
    with (RESULTS / "samples-vit_tiny_patch16_224.csv").open(encoding="utf-8", newline="") as file:
        found = [row for row in csv.DictReader(file) if row["method"] == "tuned"]
    lines = ["| cut | images | KL, one sample | KL, another sample | apart by |", "|---:|" + "---:|" * 4]
    for cut in sorted({row["cut"] for row in found}, key=float):
        one, other = sorted((row for row in found if row["cut"] == cut), key=lambda row: int(row["sample"]))
        apart = abs(_kl(one) - _kl(other)) / min(_kl(one), _kl(other))
        lines.append(f"| {float(cut):.0%} | {one['tune_images']} | {_kl(one):.4f} | {_kl(other):.4f} | {apart:.1%} |")
    return "\n".join(lines)


def ablation_table() -> str:
    """What the frontier's family is made of, one change at a time."""
    with (RESULTS / "ablation-frontier.csv").open(encoding="utf-8", newline="") as file:
        head, *found = csv.reader(file)
    head = ["KL", *(name.replace("_patch16_224 cut ", ", ") for name in head[1:])]
    lines = [
        head,
        ["---", *["---:"] * 5, "---"],
        *([*row[:1], *(f"{float(x):.4f}" for x in row[1:6]), row[6]] for row in found),
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _loss(value: float) -> str:
    """Four digits behind the point, or what is left of a number too small for them."""
    return f"{value:.4f}" if value >= 0.001 else f"{value:.1e}"


def _kl(row: dict[str, str]) -> float:
    return float(row["kl"])


def _interval(row: dict[str, str], name: str, digits: int) -> str:
    value, low, high = (float(row[name + end]) for end in ("", "_low", "_high"))
    return f"{value:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"


def _ends(row: dict[str, str], name: str) -> str:
    """A loss and its interval, which may be too small for four digits."""
    value, low, high = (float(row[name + end]) for end in ("", "_low", "_high"))
    return (
        f"{value:+.4f} [{low:+.4f}, {high:+.4f}]" if abs(value) >= 0.001 else f"{value:+.1e} [{low:+.1e}, {high:+.1e}]"
    )


def _cell(model: str, method: str, cut: str) -> dict[str, str]:
    (cell,) = [row for row in rows(model) if row["method"] == method and row["budget"] == cut]
    return cell


def _tuned_cell(model: str, method: str, cut: str) -> dict[str, str]:
    with (RESULTS / f"frontier-{model}.csv").open(encoding="utf-8", newline="") as file:
        (cell,) = [row for row in csv.DictReader(file) if row["method"] == method and row["cut"] == cut]
    return cell


def filled(text: str, name: str, table: str) -> str:
    """The text with `table` between the markers of that name."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    head, rest = text.split(begin)
    return f"{head}{begin}\n{table}\n{end}{rest.split(end)[1]}"


def pages() -> dict[Path, str]:
    """The pages as they should be."""
    readme, docs = ROOT / "README.md", ROOT / "docs"
    results, frontier, speed = docs / "results.md", docs / "frontier.md", docs / "speed.md"
    long = "\n\n".join(long_table(model) for model in MODELS)
    return {
        readme: _all_filled(readme, {"comparison": short_table(), "supported": zoo_table()}),
        results: _all_filled(
            results,
            {"verdict": verdict(), "comparison": long, "segmentation": segmentation_table(), "video": video_table()},
        ),
        speed: _all_filled(speed, {"speeds": speed_matrix(), "speed": speed_table()}),
        frontier: _all_filled(
            frontier,
            {
                "frontier": frontier_table(),
                "gap": gap_table(),
                "tuning": tuning_table(),
                "samples": samples_table(),
                "ablation": ablation_table(),
            },
        ),
    }


def _all_filled(path: Path, tables: dict[str, str]) -> str:
    text = path.read_text(encoding="utf-8")
    for name, table in tables.items():
        text = filled(text, name, table)
    return text


def main() -> None:
    """Write the pages, or fail if they are not what they should be."""
    for path, text in pages().items():
        if "--check" not in sys.argv:
            path.write_text(text, encoding="utf-8")
        elif path.read_text(encoding="utf-8") != text:
            raise SystemExit(f"{path.name} is not what benchmarks/tables.py writes; run it without --check")


if __name__ == "__main__":
    main()
