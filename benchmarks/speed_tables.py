"""The tables of docs/speed.md, from benchmarks/results."""

from reading import RESULTS, Row, read

BASE, BLOCKS = "vit_base_patch16_224", 12
TRAINED = "vit_tiny_patch16_224"
# What the runtime gives without merging; see benchmarks/speed.py.
ALONE = "one token"


def speed_matrix() -> str:
    """Each method's fastest way at every batch size of the paper's tier, with the ratio of costs beside it."""
    found = [row for run in runs(f"bench-{BASE}") if any(row["sense"] == "paper" for row in run) for row in run]
    found = [row for row in found if row["method"] != "none"]
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


def equal_cost_table() -> str:
    """Adaptive counts beside ToMe's at the same true cost, on the same runtime."""
    (run,) = [run for run in runs(f"bench-{BASE}") if any(row["sense"] == "true" for row in run)]
    merged = [row for row in run if row["method"] not in ("none", ALONE)]
    (tome,) = [row for row in merged if row["method"] == "tome"]

    def price(row: Row) -> float:
        return float(row["ms_p50"]) * float(row["ideal_true"])

    lines = [
        "| | true cut | ms [p20, p80] | speed-up | time against ToMe | for the same cost |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in merged:
        against, paid = float(row["ms_p50"]) / float(tome["ms_p50"]) - 1, price(row) / price(tome) - 1
        lines.append(
            f"| {row['method']} | {float(row['cut_true']):.1%} | {_took(row)} | {float(row['speedup']):.2f}× | "
            f"{against:+.1%} | {paid:+.1%} |"
        )
    return "\n".join(lines)


def pairs_sentence() -> str:
    """How far ToMe with adaptive counts is from ToMe in every run of many images that has both."""
    pairs = [*(run for run in runs(f"bench-{BASE}") if run[0]["batch"] == "256"), read("deciding")]
    times = [{row["method"]: float(row["ms_p50"]) for row in run} for run in pairs]
    apart = [f"{100 * (run['tome (adaptive)'] / run['tome'] - 1):+.1f}" for run in times if "tome (adaptive)" in run]
    return (
        f"*tome (adaptive)* took {', '.join(apart[:-1])} and {apart[-1]} % more than ToMe in the runs of 256 images "
        "that have both,\nat the same cost."
    )


def sizes_table() -> str:
    """Runs in which every layer merges a given share: other sizes of model and image, and half of the cost."""
    lines = [
        "| | batch | unmerged, ms | method | true cut | over the best unmerged | over one token | promised by the cost "
        "| in kernels of merging |",
        "|---|---:|---:|---|---:|---:|---:|---:|---:|",
    ]
    names = (f"bench-{BASE}", "bench-vit_base_patch16_384", "bench-vit_large_patch16_224")
    found = [run for name in names for run in runs(name) if not any(row["sense"] for row in run)]
    for run in sorted(found, key=lambda run: (-int(run[0]["batch"]), names.index(f"bench-{run[0]['model']}"))):
        plain = min(float(row["ms_p50"]) for row in run if row["method"] == "none")
        (alone,) = [float(row["ms_p50"]) for row in run if row["method"] == ALONE]
        for row in run:
            if row["method"] not in ("none", ALONE):
                lines.append(
                    f"| {row['model']} | {row['batch']} | {plain:.2f} | {row['method']} | {float(row['cut_true']):.1%} "
                    f"| {float(row['speedup']):.2f}× | {alone / float(row['ms_p50']):.2f}× "
                    f"| {float(row['ideal_true']):.2f}× | {float(row['deciding']):.1%} |"
                )
    return "\n".join(lines)


def deciding_table() -> str:
    """What deciding takes of a forward pass, and what merging adds to the norms that a merge does in passing."""
    lines = [
        "| batch 256 | deciding | kernels that merge | as many norms | deciding and merging without the norms |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in read("deciding"):
        merges, whole = int(row["merges"]), float(row["all_ms"])
        deciding, merging = float(row["deciding"]), float(row["merge_ms"]) / whole
        # A block has two norms; those that no merge does are kernels of their own.
        norms = float(row["residual_ms"]) / whole * merges / (2 * BLOCKS - merges)
        shares = (deciding, merging, norms, deciding + merging - norms)
        lines.append(f"| {row['method']} | " + " | ".join(f"{share:.1%}" for share in shares) + " |")
    return "\n".join(lines)


def parity_table() -> str:
    """Do both roads choose alike, image by image?"""
    lines = [
        "| | images | same slots | ties | same slots, ties aside | bf16 error: reference | packed | same r alone |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in read(f"parity-{TRAINED}"):
        same, ties, aside, alone = (
            f"{float(row[name]):.1%}" for name in ("same_slots", "ties", "same_slots_without_ties", "alone_same_r")
        )
        errors = " | ".join(f"{float(row[f'bf16_error_{road}']):.3f}" for road in ("reference", "packed"))
        lines.append(f"| {row['method']} | {row['images']} | {same} | {ties} | {aside} | {errors} | {alone} |")
    return "\n".join(lines)


def floor_table() -> str:
    """How many times its floor each method takes, batch by batch."""
    found = [row for row in read("growth") if row["axis"] == "batch"]
    batches, methods = dict.fromkeys(row["batch"] for row in found), dict.fromkeys(row["method"] for row in found)
    lines = ["| batch | " + " | ".join(batches) + " |", "|---|" + "---:|" * len(batches)]
    for method in methods:
        times = [float(row["ms_p50"]) / float(row["floor_ms"]) for row in found if row["method"] == method]
        shown = "unmerged" if method == "none" else method
        lines.append(f"| {shown} | " + " | ".join(f"{ratio:.1f}" for ratio in times) + " |")
    return "\n".join(lines)


def runs(name: str) -> list[list[Row]]:
    """The rows of a benchmark that have figures, those of each interleaved run together."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in read(name):
        if not row["error"]:
            found.setdefault((row["date"], row["batch"]), []).append(row)
    return list(found.values())


def speed_table() -> str:
    """Every contender of every interleaved run of every model."""
    return "\n\n".join(_speed_of(path.stem) for path in sorted(RESULTS.glob("bench-*.csv")))


def _speed_of(name: str) -> str:
    found = [row for run in runs(name) for row in run]
    first = found[0]
    lines = [
        f"**{first['model']}**, {first['weights']} weights, {first['image_size']} pixels, {first['dtype']} on "
        f"{first['device']}, {first['date'][:10]}.",
        "",
        "| batch | method | way | cut | ms [p20, p80] | speed-up | ideal | deciding | memory of the call | waits |",
        "|---:|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in found:
        memory = f"{float(row['own_mb']):.0f} MB" if row["own_mb"] else "–"
        deciding = f"{float(row['deciding']):.0%}" if row["deciding"] else "–"
        lines.append(
            f"| {row['batch']} | {'unmerged' if row['method'] == 'none' else row['method']} | {row['way']} | "
            f"{float(row['cut_true']):.1%} | {_took(row)} | {float(row['speedup']):.2f}× | "
            f"{float(row['ideal_true']):.2f}× | {deciding} | {memory} | {row['syncs'] or '–'} |"
        )
    return "\n".join(lines)


def _took(row: Row) -> str:
    """Milliseconds; not on a processor, whose times say little about another's, while their ratios do."""
    low, middle, high = (float(row[f"ms_{p}"]) for p in ("p20", "p50", "p80"))
    return "–" if row["device"] == "cpu" else f"{middle:.2f} [{low:.2f}, {high:.2f}]"
