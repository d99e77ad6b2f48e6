"""Cost and time of VideoMAE-B on a clip of 1,568 tokens, merged across space and time, on a CPU.

Weights are random, so only cost and time are meaningful.  Writes benchmarks/results/video.csv.
"""

import os
from datetime import datetime, timezone
from statistics import median
from typing import Any

import torch
from reading import RESULTS, write
from transformers import VideoMAEConfig, VideoMAEForVideoClassification
from transformers import __version__ as VERSION

import adamerge
from adamerge.experiments.versions import versions
from adamerge.flops import meter
from adamerge.methods import adamerge as published
from adamerge.methods import none, tome
from adamerge.timing import time_call

ROUNDS = 9
RECIPES = {
    "none": none(),
    "tome r=33": tome(33),
    "tome r=65": tome(65),
    "tome r=98": tome(98),
    "adamerge (cosine) r=65": published(r=65, affinity="cosine"),
}


def main() -> None:
    """Time all recipes in turn, so that slow periods affect all of them."""
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
                seconds[name].append(time_call(lambda: model(clip), clip.device)[1])
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
    write(RESULTS / "video.csv", rows)


if __name__ == "__main__":
    main()
