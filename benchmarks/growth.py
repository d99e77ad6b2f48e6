"""Time of ViT-B/16 in bf16 against tokens, batch size and cut, with a lower bound ("floor") from the machine's rates.

The floor is the sum over kernels of the longer of arithmetic time and memory time.  The rates are those of a large
matrix product and a large copy on the same machine in the same run.  It contains no merges, decisions or launches.
Weights are random.  Needs a CUDA device; writes benchmarks/results/growth.csv and plots it to docs/images/growth.png
(`--draw` only plots).
"""

import argparse
from collections.abc import Iterator
from typing import Any

import timm
import torch
from reading import RESULTS, ROOT, read, write

import adamerge
from adamerge.core.recipe import Recipe
from adamerge.experiments.benchmark import bench
from adamerge.methods import adamerge as published
from adamerge.methods import dymu, tome
from adamerge.plots.canvas import COLOURS, FAINT, MARKERS, RULE, TEXT, drawing

ROWS = RESULTS / "growth.csv"
PICTURE = ROOT / "docs" / "images" / "growth.png"
MODEL = "vit_base_patch16_224"
BATCH, PIXELS, SHARE = 64, 224, 8 / 196
# Each axis varies one of: batch size, image size, share of an image's patches merged in each layer.
AXES: dict[str, list[dict[str, Any]]] = {
    "batch": [{"batch": batch} for batch in (1, 4, 16, 64, 256)],
    "cut": [{"share": share / 196} for share in (4, 8, 12, 16)],
    "tokens": [{"pixels": pixels} for pixels in (160, 224, 384, 512)],
}
LABELS = {"tokens": "tokens of an image", "batch": "images of a batch", "cut": "share of the true cost saved"}
COLUMNS = {"tokens": "tokens", "batch": "batch", "cut": "cut_true"}
CALIBRATION = 32


def main() -> None:
    """Measure and plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draw", action="store_true", help="draw the rows that are there")
    if not parser.parse_args().draw:
        rows: list[dict[str, Any]] = []
        for row in measured():
            rows.append(row)
            print(row["axis"], row["at"], row["method"], f"{row['ms_p50']:.3f} ms, floor {row['floor_ms']:.3f}")
            write(ROWS, rows)
    draw()


def measured() -> Iterator[dict[str, Any]]:
    """One row for every method at every point of every axis."""
    torch.manual_seed(0)
    flops, traffic = rates()
    known: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for axis, points in AXES.items():
        for point in points:
            setting: dict[str, Any] = {"batch": BATCH, "pixels": PIXELS, "share": SHARE} | point
            # The axes share one point, which is measured once.
            key = tuple(setting.values())
            if key not in known:
                known[key] = list(at_point(flops=flops, traffic=traffic, **setting))
            (varied,) = point.values()
            yield from ({"axis": axis, "at": varied, **row} for row in known[key])


def at_point(*, batch: int, pixels: int, share: float, flops: float, traffic: float) -> Iterator[dict[str, Any]]:
    """The unmerged model and three recipes that merge the same share of the patches in every layer."""
    model: Any = timm.create_model(MODEL, img_size=pixels).cuda().to(torch.bfloat16).eval()
    noise = torch.randn(CALIBRATION + batch, 3, pixels, pixels, device="cuda", dtype=torch.bfloat16)
    # Smooth images of different contrast, so that adaptive counts differ.
    contrast = torch.rand(len(noise), 1, 1, 1, device="cuda", dtype=torch.bfloat16)
    images = torch.nn.functional.avg_pool2d(noise, 9, 1, 4) * 4 * contrast
    patches = (pixels // 16) ** 2
    recipes: dict[str, Recipe] = {"tome": tome(share * patches)}
    for name, recipe in (("dymu", dymu(share * patches)), ("adamerge", published(2 * share * patches))):
        stats = adamerge.calibrate(model, images[:CALIBRATION], recipe, how="sequential", progress=False)
        recipes[name] = recipe.with_stats(stats)
    rows = bench(
        model, images[CALIBRATION:], recipes, batch_sizes=[batch], rounds=10, unmerged=["graph"],
        merged=["packed graph"], progress=False,
    )  # fmt: skip
    for row in rows:
        attending = fed = [1.0 + patches] * len(model.blocks)
        if row.method != "none":
            adamerge.apply(model, recipes[row.method], "packed")
            with torch.inference_mode():
                model(images[CALIBRATION:])
            left = adamerge.trace(model).counts.double().mean(0).tolist()
            adamerge.remove(model)
            before = recipes[row.method].site == "before_block"
            attending, fed = ([1 + n for n in side] for side in (left if before else [patches, *left[:-1]], left))
        yield {
            "method": row.method,
            "way": row.way,
            "batch": batch,
            "tokens": patches + 1,
            "cut_true": row.cut_true,
            "ms_p20": row.ms_p20,
            "ms_p50": row.ms_p50,
            "ms_p80": row.ms_p80,
            "floor_ms": floor(model, batch, attending, fed, flops, traffic),
            "tflops": flops / 1e12,
            "gbytes": traffic / 1e9,
            "device": row.device,
            "versions": row.versions,
            "date": row.date,
        }


def floor(model: Any, batch: int, attending: list[float], fed: list[float], flops: float, traffic: float) -> float:
    """The lower bound in milliseconds: every kernel runs at the machine's peak arithmetic or memory rate.

    `attending` and `fed` are the tokens per image in the attention and in the MLP of each layer.
    """
    d, patch = model.embed_dim, model.patch_embed.proj.weight.numel()
    seconds = 0.0
    for tokens, left in zip(attending, fed, strict=True):
        rows, later = batch * tokens, batch * left
        # Multiply-accumulates; numbers read and written, weights included.
        kernels = [(rows * d * 3 * d, rows * 4 * d + 3 * d * d), (rows * tokens * 2 * d, rows * 4 * d)]
        kernels += [(rows * d * d, rows * 2 * d + d * d), (0, rows * 4 * d)]
        kernels += [(later * d * 4 * d, later * 5 * d + 4 * d * d)] * 2 + [(0, later * 4 * d)]
        seconds += sum(max(2 * macs / flops, 2 * numbers / traffic) for macs, numbers in kernels)
    patches = batch * model.patch_embed.num_patches
    return 1e3 * (seconds + max(2 * patches * patch / flops, 2 * 2 * patches * d / traffic))


def rates() -> tuple[float, float]:
    """Floating-point operations per second of a large product, and bytes per second of a large copy."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    big = torch.empty(2**30, device="cuda", dtype=torch.bfloat16)
    other = torch.empty_like(big)
    product, copy = _seconds(lambda: a @ a), _seconds(lambda: other.copy_(big))
    return 2 * 8192**3 / product, 2 * big.nbytes / copy


def _seconds(work: Any) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(5):
        work()
    begin.record()
    for _ in range(20):
        work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 20 / 1e3


def draw() -> None:
    """Plot milliseconds against tokens, batch size and cut; the floor of each method is dashed."""
    rows = read(ROWS.stem)
    with drawing(PICTURE, 1680, 640) as figure:
        panels: Any = figure.subplots(1, len(AXES))
        for axes, axis in zip(panels, AXES, strict=True):
            axes.grid(color=RULE)
            axes.set_axisbelow(True)
            axes.set_xlabel(LABELS[axis], color=TEXT)
            axes.tick_params(colors=FAINT)
            axes.spines[["top", "right"]].set_visible(False)
            if axis != "cut":
                axes.set_xscale("log", base=2)
                axes.set_yscale("log", base=2)
                axes.xaxis.set_major_formatter("{x:g}")
                axes.yaxis.set_major_formatter("{x:g}")
            for index, method in enumerate(("none", "adamerge", "dymu", "tome")):
                mine = [row for row in rows if row["axis"] == axis and row["method"] == method]
                for column, look in (("ms_p50", {}), ("floor_ms", {"linestyle": "--", "alpha": 0.45})):
                    y, colour = [float(row[column]) for row in mine], COLOURS[index]
                    if axis == "cut" and method == "none":
                        axes.axhline(sum(y) / len(y), color=colour, **look)
                        continue
                    label = {"label": "unmerged" if method == "none" else method} if not look else {}
                    x = [float(row[COLUMNS[axis]]) for row in mine]
                    axes.plot(x, y, color=colour, marker=MARKERS[index], **look, **label)
        panels[0].set_ylabel("milliseconds a batch (dashed: floor)", color=TEXT)
        panels[0].legend(frameon=False, labelcolor=TEXT)
        figure.tight_layout()


if __name__ == "__main__":
    main()
