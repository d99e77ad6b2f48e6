"""The tables of docs/frontier.md."""

import math

from reading import MODELS, RESULTS, Row, interval, read

STAGES = ("judged", "used", "held_out")


def frontier_table() -> str:
    """The tuned recipe, the preset and the best rival at each cut, for every measured model."""
    parts = []
    for path in sorted(RESULTS.glob("frontier-*.csv")):
        parts.append(_frontier_of(path.stem.removeprefix("frontier-"), read(path.stem)))
    return "\n\n".join(parts)


def _frontier_of(model: str, found: list[Row]) -> str:
    first = found[0]
    loss = "1 − cosine, of the class token / of the patches" if first["cosine_pooled"] else "KL"
    rivals = sorted({row["method"] for row in found} - {"tuned", "preset"})
    lines = [
        f"### {model}",
        "",
        f"Loss: {loss}, on the test images; in brackets on the tuning images. Other methods: {', '.join(rivals)}. "
        f"{first['dtype']} on {first['device']}, {first['date']}.",
        "",
        "| cut | images: tuning, test | tuned | preset | best other method, tuned too | tuned − other [95 %] | "
        "ratio | best other method, untuned | ToMe | "
        f"{'cosines' if first['cosine_pooled'] else 'points'}: tuned, other | "
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
        # The best on the evaluation images, even if the tuning images preferred another setting.
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


def repair_table() -> str:
    """The loss before and after repair on the evaluation images, with how it was trained."""
    lines = [
        "| model | cut | images | options | loss: before, after | ratio [95 %] | used: before, after | "
        "held out: before, after | points: before, after [95 %] | patch, KB | seconds, tasks at once | device |",
        "|---|---:|---:|---|" + "---:|" * 7 + "---|",
    ]
    for row in sorted(read("repair"), key=_newest_first):
        pairs = (f"{_loss(float(row[f'{name}_before']))}, {_loss(float(row[f'{name}_after']))}" for name in STAGES)
        judged, used, held_out = pairs
        points = (
            f"{float(row['points_before']):+.2f}, {interval(row, 'points_after', 2)}" if row["points_after"] else "–"
        )
        ratio = f"{float(row['ratio']):.2f} [{float(row['ratio_low']):.2f}, {float(row['ratio_high']):.2f}]"
        trained = f"{row['images']} | {'default' if row['options'] == '{}' else row['options']}"
        where = "2 cores" if row["device"] == "cpu" else row["device"]
        took = f"{float(row['seconds']):.0f}, {row['at_once']} | {where}"
        lines.append(
            f"| {row['model']} | {float(row['cut']):.0%} | {trained} | {judged} | {ratio} | {used} | {held_out} | "
            f"{points} | {int(row['bytes']) / 1000:.0f} | {took} |"
        )
    return "\n".join(lines)


def _newest_first(row: Row) -> tuple[int, str, float, int]:
    return -int(row["date"].replace("-", "")), row["model"], float(row["cut"]), -int(row["images"])


def training_step_table() -> str:
    """The time of a training step while tokens are merged."""
    rows = read("training-step")
    lines = ["| model | batch | cut | | ms a step | times as fast as unmerged |", "|---|---:|---:|---|---:|---:|"]
    for row in rows:
        lines.append(
            f"| {row['model']} | {row['batch']} | {float(row['cut']):.0%} | {row['contender']} | "
            f"{float(row['ms']):.1f} | {float(row['speed_up']):.2f}× |"
        )
    return "\n".join([*lines, "", f"*{rows[0]['device']}, torch {rows[0]['torch']}, {rows[0]['date']}.*"])


def repaired_schedules_table() -> str:
    """Schedules of one cost before and after a repair, the best one after it first."""
    lines = ["| model | cut | schedule | loss: before, after | ratio [95 %] |", "|---|---:|---|---:|---:|"]
    for row in sorted(read("repaired-schedules"), key=lambda row: (row["model"], float(row["judged_after"]))):
        before, after = float(row["judged_before"]), float(row["judged_after"])
        ratio = f"{after / before:.2f} [{float(row['ratio_low']):.2f}, {float(row['ratio_high']):.2f}]"
        lines.append(
            f"| {row['model']} | {float(row['cut']):.0%} | {row['candidate']} | {_loss(before)}, {_loss(after)} | "
            f"{ratio if row['repaired'] == 'True' else 'returned as it was'} |"
        )
    return "\n".join(lines)


def learned_table() -> str:
    """Learned schedules and the search of the tuner, on the images that both used."""
    lines = ["| model | cut | recipe | passes, steps | seconds | KL |", "|---|---:|---|---:|---:|---:|"]
    for row in sorted(read("learned-schedules"), key=lambda row: (row["model"], row["cut"], float(row["seconds"]))):
        lines.append(
            f"| {row['model']} | {float(row['cut']):.0%} | {row['way']} | {row['sweeps']}, {row['steps']} | "
            f"{float(row['seconds']):.0f} | {float(row['loss']):.4f} |"
        )
    return "\n".join(lines)


def diffrate_table() -> str:
    """DiffRate's published schedules for DeiT-Ti beside the tuned recipe at the same cost."""
    lines = [
        "| schedule, GFLOPs | recipe | true cut | GMACs | KL | points [95 %] | KL: tuned − this [95 %] |",
        "|---:|---|---:|---:|---:|---:|---:|",
    ]
    for row in read("diffrate"):
        apart = "–" if row["method"] == "tuned" else interval(row, "tuned_kl_minus_this", 4)
        lines.append(
            f"| {row['schedule']} | {row['method']} | {float(row['cut']):.1%} | {float(row['gmacs']):.3f} | "
            f"{float(row['kl']):.4f} | {interval(row, 'points', 2)} | {apart} |"
        )
    return "\n".join(lines)


def _cosines(row: Row) -> str:
    """The cosines of the pooled output (class token) and of the patches."""
    return f"{float(row['cosine_pooled']):.3f} / {float(row['cosine_patches']):.3f}"


def gap_table() -> str:
    """The difference between the tuned recipe and ToMe at each cut."""
    lines = [
        "| model | cut | KL: tuned − ToMe [95 %] | points: tuned − ToMe [95 %] | KL: tuned / ToMe |",
        "|---|---:|---:|---:|---:|",
    ]
    for model in MODELS:
        found = [row for row in read(f"frontier-{model}") if row["method"] == "tome" and row["best"] == "True"]
        for row in sorted(found, key=lambda row: float(row["cut"])):
            value, low, high = (float(row[n]) for n in ("tuned_top1_minus_this", "tuned_top1_low", "tuned_top1_high"))
            lines.append(
                f"| {model} | {float(row['cut']):.0%} | {interval(row, 'tuned_minus_this', 4)} | "
                f"{value:+.2f} [{low:+.2f}, {high:+.2f}] | {float(row['tuned_ratio']):.2f} |"
            )
    return "\n".join(lines)


def tuning_table() -> str:
    """The time that searches took."""
    lines = ["| model | cut | device | images | passes over them | seconds |", "|---|---:|---|---:|---:|---:|"]
    for name in ("samples-vit_tiny_patch16_224", "tuning-cpu"):
        for row in read(name):
            if row["method"] == "tuned":
                where = "2 cores" if row["device"] == "cpu" else row["device"]
                lines.append(
                    f"| {row['model']} | {float(row['cut']):.0%} | {where} | {row['tune_images']} | "
                    f"{row['sweeps']} | {float(row['seconds']):.0f} |"
                )
    return "\n".join(lines)


def samples_table() -> str:
    """Two recipes tuned on different samples of images, on the same evaluation images."""
    found = [row for row in read("samples-vit_tiny_patch16_224") if row["method"] == "tuned"]
    lines = ["| cut | images | KL, one sample | KL, another sample | difference |", "|---:|" + "---:|" * 4]
    for cut in sorted({row["cut"] for row in found}, key=float):
        one, other = sorted((row for row in found if row["cut"] == cut), key=lambda row: int(row["sample"]))
        apart = abs(_kl(one) - _kl(other)) / min(_kl(one), _kl(other))
        lines.append(f"| {float(cut):.0%} | {one['tune_images']} | {_kl(one):.4f} | {_kl(other):.4f} | {apart:.1%} |")
    return "\n".join(lines)


def ablation_table() -> str:
    """The ablation of the preset's family, one change at a time."""
    rows = read("ablation-frontier")
    cells = list(dict.fromkeys((row["model"], row["cut"]) for row in rows))
    heads = [f"{model.removesuffix('_patch16_224')}, {float(cut):.0%}" for model, cut in cells]
    lines = [
        "| KL ± standard error | " + " | ".join(heads) + " | geometric mean | kept |",
        "|---|" + "---:|" * (len(cells) + 1) + "---|",
    ]
    for what in dict.fromkeys(row["what"] for row in rows):
        mine = {(row["model"], row["cut"]): row for row in rows if row["what"] == what}
        losses = [float(mine[cell]["loss"]) for cell in cells]
        shown = [f"{float(mine[c]['loss']):.4f} ± {float(mine[c]['standard_error']):.4f}" for c in cells]
        mean = math.exp(sum(map(math.log, losses)) / len(losses))
        lines.append(f"| {what} | " + " | ".join(shown) + f" | {mean:.4f} | {mine[cells[0]]['kept']} |")
    first = rows[0]
    how = f"{first['images']} images to calibrate on, {first['judged']} others to judge by, float32"
    return "\n".join([*lines, "", f"*{how}.*"])


def tuned_cell(model: str, method: str, cut: str) -> Row:
    (cell,) = [row for row in read(f"frontier-{model}") if row["method"] == method and row["cut"] == cut]
    return cell


def _loss(value: float) -> str:
    """A loss with four decimals, or in scientific notation if it is too small for them."""
    return f"{value:.4f}" if value >= 0.001 else f"{value:.1e}"


def _kl(row: Row) -> float:
    return float(row["kl"])


def _ends(row: Row, name: str) -> str:
    """A loss and its interval; in scientific notation if it is too small for four decimals."""
    value, low, high = (float(row[name + end]) for end in ("", "_low", "_high"))
    return (
        f"{value:+.4f} [{low:+.4f}, {high:+.4f}]" if abs(value) >= 0.001 else f"{value:+.1e} [{low:+.1e}, {high:+.1e}]"
    )
