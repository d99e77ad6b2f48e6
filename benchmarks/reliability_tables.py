"""Tables of docs/reliability.md: fuzzing, killed commands, load, a busy neighbour, mutation testing."""

from reading import RESULTS, Row, read

NONE_YET = "*No rows yet.*"
KINDS = {
    "recipes": "recipes on models, reference and packed",
    "kernels": "recipes on models, kernels in the interpreter",
    "cuda": "recipes on models, kernels and CUDA graphs on a GPU",
    "files": "broken recipes, statistics, images and weights",
}


def fuzz_table() -> str:
    """The cases of each kind."""
    found = _rows("fuzz")
    if not found:
        return NONE_YET
    lines = [
        "| kind | cases | seeds | ran | of them near ties | refused | host cannot run | failures |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for kind, what in KINDS.items():
        rows = [row for row in found if row["kind"] == kind]
        if rows:
            cases, ran, ties, refused, host, failures = (
                sum(int(row[name]) for row in rows)
                for name in ("cases", "ran", "near_ties", "refused", "host", "failures")
            )
            seeds = ", ".join(sorted({row["seed"] for row in rows}, key=int))
            counts = " | ".join(f"{count:,}" for count in (ran + ties, ties, refused, host, failures))
            lines.append(f"| {what} | {cases:,} | {seeds} | {counts} |")
    return "\n".join([*lines, "", _dates(found)])


def kill_table() -> str:
    """What came of the commands that were killed."""
    found = _rows("kill-and-resume")
    if not found:
        return NONE_YET
    lines = [
        "| command | kills | seeds | resumed with another result | resumed with an error | half a file |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for command in dict.fromkeys(row["command"] for row in found):
        rows = [row for row in found if row["command"] == command]
        counts = [sum(int(row[name]) for row in rows) for name in ("different", "errors", "half_files")]
        seeds = ", ".join(sorted({row["seed"] for row in rows}, key=int))
        kills = sum(int(row["killed"]) for row in rows)
        lines.append(f"| `{command}` | {kills} | {seeds} | " + " | ".join(map(str, counts)) + " |")
    return "\n".join([*lines, "", _dates(found)])


def neighbour_table() -> str:
    """How many times as long a batch takes beside a busy process."""
    found = _rows("busy-neighbour")
    if not found:
        return NONE_YET
    first = found[0]
    lines = [
        f"| batch of {first['batch']} | operations | threads | times as long beside one busy core |",
        "|---|---:|---:|---:|",
    ]
    times = {(row["way"], int(row["threads"]), row["busy_neighbours"]): float(row["seconds"]) for row in found}
    operations = {(row["way"], int(row["threads"])): int(row["operations"]) for row in found}
    for way, threads in dict.fromkeys((way, threads) for way, threads, _ in times):
        idle, busy = times[way, threads, "0"], times[way, threads, "1"]
        lines.append(f"| {way} | {operations[way, threads]:,} | {threads} | {busy / idle:.1f} |")
    how = f"{first['model']} with random weights, published AdaMerge, {first['cores']} cores, torch {first['torch']}"
    return "\n".join([*lines, "", f"*{how}, {first['date']}.*"])


def load_table() -> str:
    """What came of threads that share a model on a GPU."""
    found = _rows("gpu-load")
    if not found:
        return NONE_YET
    lines = [
        "| method | dtype | seconds | threads | calls | images | wrong | errors | memory flat |",
        "|---|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for row in found:
        names = ("threads", "calls", "images", "wrong", "errors")
        counts = " | ".join(f"{int(row[name]):,}" for name in names)
        flat = "yes" if row["memory_flat"] == "True" else "no"
        lines.append(f"| {row['method']} | {row['dtype']} | {float(row['seconds']):.0f} | {counts} | {flat} |")
    return "\n".join([*lines, "", f"*{found[0]['device']}, torch {found[0]['torch']}, {found[0]['date'][:10]}.*"])


def mutation_table() -> str:
    """The share of mutants that tests notice, by area."""
    found = _rows("mutation")
    if not found:
        return NONE_YET
    lines = ["| area | sample | mutants | noticed | share |", "|---|---|---:|---:|---:|"]
    for row in found:
        noticed = int(row["killed"]) + int(row["timed_out"])
        sample = f"{row['label']}, seed {row['seed']}".removeprefix(", ")
        share = noticed / max(int(row["mutants"]), 1)
        lines.append(f"| {row['area']} | {sample} | {row['mutants']} | {noticed} | {share:.0%} |")
    return "\n".join([*lines, "", _dates(found)])


def _rows(name: str) -> list[Row]:
    """The rows of a file in benchmarks/results; none if it is not there yet."""
    return read(name) if (RESULTS / f"{name}.csv").exists() else []


def _dates(found: list[Row]) -> str:
    dates = sorted({row["date"][:10] for row in found})
    return f"*{dates[0]}.*" if len(dates) == 1 else f"*{dates[0]} to {dates[-1]}.*"
