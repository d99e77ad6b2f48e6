"""Video against cost: VideoMAE-B on a clip of 1,568 tokens, merged across space and time, on this machine's processor.

Weights are random, so this shows cost and time alone.  Writes benchmarks/results/video.csv.
"""

import csv
import io
import os
import time
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import VideoMAEConfig, VideoMAEForVideoClassification
from transformers import __version__ as VERSION

import adamerge
from adamerge.core.files import write_atomically
from adamerge.experiments.versions import versions
from adamerge.flops import meter
from adamerge.methods import adamerge as published
from adamerge.methods import none, tome

RESULTS = Path(__file__).resolve().parent / "results" / "video.csv"
ROUNDS = 9
RECIPES = {
    "none": none(),
    "tome r=33": tome(33),
    "tome r=65": tome(65),
    "tome r=98": tome(98),
    "adamerge (cosine) r=65": published(r=65, affinity="cosine"),
}


def main() -> None:
    """Time all recipes in turn, so that a busy minute hits each alike."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    torch.manual_seed(0)
    model: Any = VideoMAEForVideoClassification(VideoMAEConfig()).eval()
    clip = torch.randn(1, 16, 3, 224, 224)
    prices = meter(model)
    full = float(prices.unmerged().true)
    seconds: dict[str, list[float]] = {name: [] for name in RECIPES}
    facts: dict[str, dict[str, Any]] = {}
    with torch.inference_mode():
        model(clip)
        for _ in range(ROUNDS):
            for name, recipe in RECIPES.items():
                adamerge.remove(model)
                if name != "none":
                    adamerge.apply(model, recipe)
                begin = time.perf_counter()
                model(clip)
                seconds[name].append(time.perf_counter() - begin)
                if name == "none":
                    facts[name] = {"left": prices.patches, "gmacs": full / 1e9}
                else:
                    counts = adamerge.trace(model).counts
                    facts[name] = {"left": int(counts[0, -1]), "gmacs": float(prices.cost(counts, recipe).true) / 1e9}
                print(name, seconds[name][-1], facts[name], flush=True)
    ratios = {name: [a / b for a, b in zip(seconds["none"], own, strict=True)] for name, own in seconds.items()}
    rows = []
    for name in RECIPES:
        rows.append(
            {
                "method": name,
                "tokens": prices.patches,
                "tokens_left": facts[name]["left"],
                "gmacs_true": round(facts[name]["gmacs"], 3),
                "cut_true": round(1 - 1e9 * facts[name]["gmacs"] / full, 4),
                "seconds": round(median(seconds[name]), 3),
                "speedup": round(median(ratios[name]), 3),
                "speedup_min": round(min(ratios[name]), 3),
                "speedup_max": round(max(ratios[name]), 3),
                "rounds": ROUNDS,
                "threads": torch.get_num_threads(),
                "model": "VideoMAE-B, random weights",
                "device": versions()["device"],
                "torch": versions()["torch"],
                "transformers": VERSION,
                "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
            }
        )
    file = io.StringIO()
    writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(RESULTS, file.getvalue())


if __name__ == "__main__":
    main()
