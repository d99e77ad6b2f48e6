"""What tests/test_distributed.py runs in several processes: the library on a tiny model, results as JSON."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from prediction.examples import tiny_model

import adamerge
from adamerge.distributed import is_first, sharing
from adamerge.methods import adamerge as published
from adamerge.methods import dymu, tome
from adamerge.prediction.sources import drawn_source


def data(count: int = 23, batch: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of (images, labels); the last one is smaller."""
    draw = torch.Generator().manual_seed(0)
    images, labels = torch.randn(count, 3, 32, 32, generator=draw), torch.randint(0, 7, (count,), generator=draw)
    return list(zip(images.split(batch), labels.split(batch), strict=True))


def work(out: Path) -> dict[str, Any]:
    """Everything that can be shared, in one dict."""
    torch.set_num_threads(1)
    model, pairs = tiny_model(), data()
    images = [batch for batch, _ in pairs]
    iterative = adamerge.calibrate(model, images, published(r_max=4), progress=False)
    thresholds = adamerge.calibrate(model, images, dymu(2), progress=False)
    # Fewer batches than processes: some have no images.
    few = adamerge.calibrate(model, images[:1], dymu(2), progress=False)
    recipe = published(r_max=4).with_stats(iterative)
    judged = adamerge.evaluate(model, pairs, recipe, progress=False)
    tuned = adamerge.tune(model, images, cut=0.2, tries=3, progress=False, resume=out / "journal.jsonl")
    written = adamerge.embed(
        model, drawn_source(11, seed=0, size=32, shard_size=2), out / "embedded", tome(3), workers=0, progress=False
    )
    return {
        "integers": {
            **{name: getattr(judged, name).tolist() for name in ("top1", "top5", "full_top1", "agreement", "r")},
            **{name: values.tolist() for name, values in judged.extremes.items()},
            "images": [iterative.images, thresholds.images, few.images, written.images, written.new_images],
            "files": [written.files, len(written.failed)],
        },
        "numbers": {
            "kl": judged.kl.tolist(),
            **{
                f"{name} {field}": list(getattr(stats, field))
                for name, stats in {"iterative": iterative, "thresholds": thresholds, "few": few}.items()
                for field in ("mean", "std", "threshold")
            },
            "tuned": list(tuned.stats.threshold) if tuned.stats is not None else [],
            "cost": judged.cost.true.tolist(),
        },
        "timed": judged.timed,
    }


if __name__ == "__main__":
    with sharing():
        found = work(Path(sys.argv[1]))
        if is_first():
            print(json.dumps(found))
