"""The tables of docs/speed.md, from benchmarks/results."""

from reading import RESULTS, Row, interval, read

BASE, BLOCKS = "vit_base_patch16_224", 12
TRAINED = "vit_tiny_patch16_224"
# The method that shows the speed of the runtime without merging; see benchmarks/speed.py.
ALONE = "one token"


def speed_matrix() -> str:
    """The speed-up of each method, run in its fastest way, at every batch size, and its ratio of costs."""
    found = [row for run in runs(f"bench-{BASE}") if any(row["cost"] == "paper" for row in run) for row in run]
    found = [row for row in found if row["method"] != "none"]
    batches = sorted({int(row["batch"]) for row in found})
    methods = dict.fromkeys(row["method"] for row in found)
    lines = [
        "| speed-up over the best unmerged, at batch | " + " | ".join(map(str, batches)) + " | ratio of costs |",
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
    """Adaptive counts and ToMe at the same true cost on the same runtime, with variable and with fixed GPU clock."""
    (free,) = [run for run in runs(f"bench-{BASE}") if any(row["cost"] == "true" for row in run)]
    (fixed,) = runs(f"fixed-clock-{BASE}")
    times = [{row["method"]: float(row["ms_p50"]) for row in run} for run in (free, fixed)]
    prices = {row["method"]: float(row["ms_p50"]) * float(row["ideal_true"]) for row in fixed}
    lines = [
        "| | true cut | ms [p20, p80] | speed-up | time against ToMe | with a fixed clock | for the same cost |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in free:
        method = row["method"]
        if method not in ("none", ALONE):
            ratios = [run[method] / run["tome"] - 1 for run in (*times, prices)]
            lines.append(
                f"| {method} | {float(row['cut_true']):.1%} | {_took(row)} | {float(row['speedup']):.2f}× | "
                + " | ".join(f"{ratio:+.1%}" for ratio in ratios)
                + " |"
            )
    return "\n".join(lines)


def blocks_table() -> str:
    """Merging at every block and at every second one, on trained weights."""
    found = {(row["model"], row["method"], row["blocks"]): row for row in read("blocks")}
    models, recipes = dict.fromkeys(model for model, *_ in found), dict.fromkeys(key[1:] for key in found)
    lines = [
        "| merging at | " + " | ".join(f"{model}, KL | against ToMe" for model in models) + " |",
        "|---|" + "---:|---:|" * len(models),
    ]
    for method, blocks in recipes:
        cells = []
        for row in (found[model, method, blocks] for model in models):
            apart = interval(row, "apart", 4) if float(row["apart"]) else "–"
            cells.append(f"{float(row['loss']):.4f} ± {float(row['standard_error']):.4f} | {apart}")
        lines.append(f"| {blocks} block: {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def sizes_table() -> str:
    """Runs in which every layer merges a given share: other model and image sizes, and half of the cost."""
    lines = [
        "| | batch | unmerged, ms | method | true cut | over the best unmerged | over one token | ratio of costs "
        "| in kernels of merging |",
        "|---|---:|---:|---|---:|---:|---:|---:|---:|",
    ]
    names = (f"bench-{BASE}", "bench-vit_base_patch16_384", "bench-vit_large_patch16_224")
    found = [run for name in names for run in runs(name) if not any(row["cost"] for row in run)]
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


def processor_table() -> str:
    """Speed-ups on a CPU as shares of the ratio of costs: over the unmerged model, and over the runtime without
    merging (a recipe that merges one token in the last block)."""
    lines = [
        "| two cores, batch 8 | true cut | ratio of costs | packed | share of that ratio | share, over one token "
        "| reference |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    (run,) = runs(f"bench-{BASE}-cpu")
    packed, reference = ({r["method"]: r for r in run if r["way"] == way} for way in ("packed", "reference"))
    (alone,) = [float(row["ms_p50"]) for row in packed.values() if float(row["cut_true"]) < 0.001]
    for method, row in packed.items():
        gain, ideal, over = float(row["speedup"]), float(row["ideal_true"]), alone / float(row["ms_p50"])
        name = ALONE if over == 1 else method
        shares = f"{gain / ideal:.0%} | {over / ideal:.0%}" if over != 1 else "– | –"
        lines.append(
            f"| {name} | {round(float(row['cut_true']), 3) + 0.0:.1%} | {ideal:.2f}× | {gain:.2f}× | {shares} "
            f"| {float(reference[method]['speedup']):.2f}× |"
        )
    return "\n".join(lines)


def cpu_default_table() -> str:
    """The default runtime on a CPU against the unmerged model, as a share of the ratio of costs."""
    lines = [
        "| two cores | dtype | batch | method | true cut | speed-up | ratio of costs | share | date |",
        "|---|---|---:|---|---:|---:|---:|---:|---|",
    ]
    for row in read("cpu-default"):
        gain, share = f"{float(row['speed_up']):.2f}×", f"{float(row['share']):.0%}"
        lines.append(
            f"| {row['model'].removesuffix('_patch16_224')} | {row['dtype']} | {row['batch']} | {row['method']} "
            f"| {float(row['cut_true']):.1%} | {gain} | {float(row['ratio_of_costs']):.2f}× | {share} | "
            f"{row['date'][:10]} |"
        )
    return "\n".join(lines)


def merge_every_table() -> str:
    """The preset at every first, second and third block: its loss and its speed-up in each engine and batch size."""
    rows = read("merge-every")
    places = list(dict.fromkeys((row["engine"], row["batch"]) for row in rows))
    settings = list(dict.fromkeys((row["cut"], row["merge_every"]) for row in rows))
    heads = " | ".join(f"{engine}, batch {batch}" for engine, batch in places)
    lines = [
        f"| cut | merges at every | KL, counts adapt | KL, fixed counts | {heads} |",
        "|---:|---|" + "---:|" * (len(places) + 2),
    ]
    for cut, every in settings:
        found = [row for row in rows if (row["cut"], row["merge_every"]) == (cut, every)]
        speeds = {(row["engine"], row["batch"]): f"{float(row['speed_up']):.2f}×" for row in found}
        losses = {row["static"]: f"{float(row['loss']):.4f}" for row in found}
        block = {"1": "block", "2": "second block", "3": "third block"}[every]
        lines.append(
            f"| {float(cut):.0%} | {block} | {losses['False']} | {losses['True']} | "
            + " | ".join(speeds[place] for place in places)
            + " |"
        )
    first = rows[0]
    lines += ["", f"*{first['model']}, {first['images']} images, {first['threads']} cores, {first['date']}.*"]
    return "\n".join(lines)


def engines_table() -> str:
    """Merged over unmerged models in the same engine, as a share of the ratio of costs."""
    lines = [
        "| two cores | batch | method | engine | true cut | speed-up in this engine | ratio of costs | share "
        "| over the fastest unmerged engine |",
        "|---|---:|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in read("engines"):
        if row["method"] == "none" or not row["ms"]:
            continue
        name = {"packed": "torch"}.get(row["engine"], row["engine"])
        lines.append(
            f"| {row['model'].removesuffix('_patch16_224')} | {row['batch']} | {row['method']} | {name} "
            f"| {float(row['cut_true']):.1%} | {float(row['speed_up']):.2f}× | {float(row['ratio_of_costs']):.2f}× "
            f"| {float(row['share']):.0%} | {float(row['fastest_unmerged']):.2f}× |"
        )
    return "\n".join(lines)


def slices_table() -> str:
    """Files that merge beside files that only drop tokens, in OpenVINO at batch 1."""
    lines = [
        "| two cores, batch 1 | precision | cut | merges | only drops | ratio of costs |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for row in read("export-slices"):
        lines.append(
            f"| {row['model'].removesuffix('_patch16_224')} | {row['precision']} | {float(row['cut']):.0%} "
            f"| {float(row['merges']):.2f}× | {float(row['drops']):.2f}× | {float(row['ratio_of_costs']):.2f}× |"
        )
    return "\n".join(lines)


def widths_table() -> str:
    """Adaptive recipes in files with fixed widths, beside the static preset at the same cost."""
    lines = [
        "| vit_tiny | width of a layer | true cut | KL | images merged further | static preset at this cut, KL |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for row in read("export-widths"):
        forced = f"{float(row['forced']):.0%}" if row["forced"] else "–"
        static = f"{float(row['static_kl']):.4f}" if row["static_kl"] else "–"
        lines.append(
            f"| {row['method']} {float(row['cut']):.0%} | {row['widths']} | {float(row['cut_true']):.1%} "
            f"| {float(row['kl']):.4f} | {forced} | {static} |"
        )
    return "\n".join(lines)


def agreement_table() -> str:
    """Exported files, run by their engines on real images, beside the merged model in torch."""
    lines = [
        "| model | method | engine | images | same top-1 | KL | largest difference of a logit "
        "| images that merged other tokens |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in read("export-agreement"):
        lines.append(
            f"| {row['model']} | {row['method']} | {row['engine']} {row['version']} | {row['images']} "
            f"| {float(row['agreement']):.1%} | {row['kl']} | {row['largest_difference']} "
            f"| {float(row['differing']):.1%} |"
        )
    return "\n".join(lines)


def deciding_table() -> str:
    """The share of deciding and merging in a forward pass; the merge kernels also compute norms."""
    lines = [
        "| batch 256 | deciding | kernels that merge | as many norms | deciding and merging without the norms |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in read("deciding"):
        merges, whole = int(row["merges"]), float(row["all_ms"])
        deciding, merging = float(row["deciding"]), float(row["merge_ms"]) / whole
        # A block has two norms; those not computed by a merge kernel are separate kernels.
        norms = float(row["residual_ms"]) / whole * merges / (2 * BLOCKS - merges)
        shares = (deciding, merging, norms, deciding + merging - norms)
        lines.append(f"| {row['method']} | " + " | ".join(f"{share:.1%}" for share in shares) + " |")
    return "\n".join(lines)


def parity_table() -> str:
    """Agreement of the reference and the packed runtime per image."""
    lines = [
        "| | images | same slots | ties | same slots, ties aside | bf16 error: reference | packed | same r alone |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in read(f"parity-{TRAINED}"):
        same, ties, aside, alone = (
            f"{float(row[name]):.1%}" for name in ("same_slots", "ties", "same_slots_without_ties", "alone_same_r")
        )
        errors = " | ".join(f"{float(row[f'bf16_error_{runtime}']):.3f}" for runtime in ("reference", "packed"))
        lines.append(f"| {row['method']} | {row['images']} | {same} | {ties} | {aside} | {errors} | {alone} |")
    return "\n".join(lines)


def floor_table() -> str:
    """The time of each method divided by its floor, for every batch size."""
    found = [row for row in read("growth") if row["axis"] == "batch"]
    batches, methods = dict.fromkeys(row["batch"] for row in found), dict.fromkeys(row["method"] for row in found)
    lines = ["| batch | " + " | ".join(batches) + " |", "|---|" + "---:|" * len(batches)]
    for method in methods:
        times = [float(row["ms_p50"]) / float(row["floor_ms"]) for row in found if row["method"] == method]
        shown = "unmerged" if method == "none" else method
        lines.append(f"| {shown} | " + " | ".join(f"{ratio:.1f}" for ratio in times) + " |")
    return "\n".join(lines)


def plain_call_runs() -> list[dict[str, Row]]:
    """The rows by contender, for each case and batch size: of the last run with a compiled model, else of the last."""
    runs: dict[tuple[str, str], dict[str, dict[str, Row]]] = {}
    for row in read("plain-call"):
        runs.setdefault((row["case"], row["batch"]), {}).setdefault(row["date"], {})[row["contender"]] = row

    def rank(date: str, run: dict[str, Row]) -> tuple[bool, str]:
        return any("compiled" in name for name in run), date

    return [by_date[max(by_date, key=lambda date: rank(date, by_date[date]))] for by_date in runs.values()]


def plain_call_table() -> str:
    """Merged models called plainly, beside the unmerged model called in the same way and in the fastest way."""
    lines = [
        "| | batch | method | true cut | unmerged, ms | fastest unmerged, ms | merged, ms | over unmerged "
        "| over the fastest | captured by hand, ms |",
        "|---|---:|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for found in plain_call_runs():
        first = next(iter(found.values()))
        case, batch = first["case"], first["batch"]
        times = {name: float(row["ms"]) for name, row in found.items()}
        best = min(ms for name, ms in times.items() if name.startswith("unmerged"))
        for name, row in found.items():
            method, _, way = name.rpartition(" ")
            if method.startswith("unmerged") or way != "plain":
                continue
            captured = times.get(f"{method} captured")
            lines.append(
                f"| {case} | {batch} | {method} | {float(row['cut_true']):.1%} | {times['unmerged plain']:.2f} "
                f"| {best:.2f} | {times[name]:.2f} | {float(row['over_plain']):.2f}× | {float(row['over_best']):.2f}× "
                f"| {'–' if captured is None else f'{captured:.2f}'} |"
            )
    return "\n".join(lines)


def runs(name: str) -> list[list[Row]]:
    """The rows without error of a benchmark, grouped by interleaved run."""
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
        "| batch | method | way | cut | ms [p20, p80] | speed-up | ideal | deciding | memory of the call | syncs |",
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
    """Milliseconds; a dash on a CPU, where only ratios carry over to other machines."""
    low, middle, high = (float(row[f"ms_{p}"]) for p in ("p20", "p50", "p80"))
    return "–" if row["device"] == "cpu" else f"{middle:.2f} [{low:.2f}, {high:.2f}]"
