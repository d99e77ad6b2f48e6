"""The rows of benchmarks/segmentation.py: their file and their plot."""

from typing import Any

from reading import RESULTS, ROOT, read, write

from adamerge.cli.lists import read_labels

NAME = "segmentation"
PICTURE = ROOT / "docs" / "images" / "segmentation.png"
SHOWN = "tuned,preset,adamerge,adamerge (cosine, exchanged),tome,dsm"
ORDER = ("none", "tuned", "repaired", *read_labels(SHOWN)[1:])


def write_and_draw(rows: list[dict[str, Any]]) -> None:
    """Write the rows and plot them."""
    write(RESULTS / f"{NAME}.csv", rows)
    draw(rows)


def with_kept(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The new rows and those of the file that were not measured again, in order.

    Rows of a model belong to one probe: other rows of it are kept only if its unmerged mIoU is the same.
    """
    old: list[dict[str, Any]] = list(read(NAME)) if (RESULTS / f"{NAME}.csv").exists() else []
    measured = {(one["model"], one["method"], float(one["target_cut"])) for one in rows}
    kept = [one for one in old if (one["model"], one["method"], float(one["target_cut"])) not in measured]
    model, full = rows[0]["model"], rows[0]["miou"]
    before = [float(one["miou"]) for one in old if one["model"] == model and one["method"] == "none"]
    if before and before[0] != full:
        print(f"the unmerged mIoU was {before[0]} and is {full}: other rows of {model} are dropped", flush=True)
        kept = [one for one in kept if one["model"] != model]
    models = list(dict.fromkeys(one["model"] for one in [*old, *rows]))
    found = [{**one, "options": one.get("options", "")} for one in [*kept, *rows]]
    return sorted(
        found, key=lambda one: (models.index(one["model"]), float(one["target_cut"]), ORDER.index(one["method"]))
    )


def draw(rows: list[dict[str, Any]]) -> None:
    """Plot mIoU against the true cut: a panel for each model, a line for each method."""
    from matplotlib.figure import Figure

    models = sorted({one["model"] for one in rows}, key=lambda name: (name != "embedded", name))
    labels = list(dict.fromkeys(one["method"] for one in rows if one["method"] != "none"))
    figure = Figure(figsize=(5.4 * len(models) + 0.6, 4.2), layout="constrained")
    for number, model in enumerate(models):
        axes = figure.add_subplot(1, len(models), number + 1)
        mine = [one for one in rows if one["model"] == model]
        for colour, label in enumerate(labels):
            cells = [mine[0], *(one for one in mine if one["method"] == label)]
            if len(cells) > 1:
                cuts, values = ([100 * float(one[name]) for one in cells] for name in ("cut_true", "miou"))
                axes.plot(cuts, values, marker="o", ms=4, label=label, color=f"C{colour}")
        axes.set_xlabel("cost saved (true multiply–accumulates), %")
        axes.set_ylabel("mIoU, %")
        axes.set_title(model, fontsize=10)
        axes.grid(alpha=0.3)
        if number == 0:
            axes.legend(frameon=False, fontsize=8)
    figure.suptitle("A linear probe on unmerged features, run on merged ones", fontsize=11)
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURE, dpi=130)
