"""Fine-tunes the embedded model while it merges: ToMe, published AdaMerge and the preset at three cuts, several seeds.

Images come from the embedded generator.  All runs have the same number of images, steps and the same learning rate.  A
seed gives the training images and their order; the test images are the same in all runs.  Each row has the answers on
every test image, so that `benchmarks/tables.py` finds intervals over seeds and images.  Rows are added to the file as
they are measured, and rows that are there are skipped; several processes may share the methods and cuts.  About a
quarter of an hour on one core:

    OMP_NUM_THREADS=1 python benchmarks/finetune.py
"""

import argparse
import itertools
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from finetune_tables import pack_answers
from reading import RESULTS, append
from torch import Tensor, nn

import adamerge
from adamerge.core.recipe import Recipe
from adamerge.embedded import load, preprocess, scenes
from adamerge.embedded.scene_generator import CALIBRATION_SEED, TEST_SEED
from adamerge.experiments.csv_tables import read_table
from adamerge.experiments.versions import versions
from adamerge.finetuning.options import FinetuneOptions
from adamerge.flops import meter
from adamerge.methods import none
from adamerge.patching.apply import applied, trace
from adamerge.search.solve_variant import solve_variant
from adamerge.search.target import Target
from adamerge.search.variants import find_variant

NAME = "finetune"
# Training images of seed s are drawn with the generator's seed FIRST_SEED + s: no other part of the project uses these.
FIRST_SEED = 4000
BATCH = 48


@dataclass(frozen=True)
class Drawn:
    """Drawn images in memory, as bytes, without augmentation."""

    images: Tensor
    labels: Tensor

    @classmethod
    def make(cls, number: int, seed: int, kept: Path | None) -> "Drawn":
        """The first images of a seed of the generator, from the folder `kept` if they are there."""
        path = None if kept is None else kept / f"{number}-images-of-seed-{seed}.pt"
        if path is not None and path.exists():
            return cls(**torch.load(path, weights_only=True))
        some = scenes(0, number, seed=seed)
        drawn = cls((some.images * 255).round().to(torch.uint8), some.labels)
        if path is not None:
            torch.save({"images": drawn.images, "labels": drawn.labels}, path)
        return drawn

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return preprocess(self.images[index].float() / 255), int(self.labels[index])

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of all images in their order."""
        for images, labels in zip(self.images.split(BATCH), self.labels.split(BATCH), strict=True):
            yield preprocess(images.float() / 255), labels


@dataclass(frozen=True)
class Answers:
    """Which test images are classified correctly, their mean cross-entropy, and the share of the cost that is saved."""

    right: Tensor
    loss: float
    cut: float


def judge(model: nn.Module, recipe: Recipe, test: Drawn) -> Answers:
    """Run a merged model on the test images."""
    right, losses, counts, prices = [], [], [], meter(model)
    with applied(model, recipe), torch.inference_mode():
        for images, labels in test.batches():
            logits = model(images)
            right.append(logits.argmax(1) == labels)
            losses.append(torch.nn.functional.cross_entropy(logits, labels, reduction="none"))
            counts.append(trace(model).counts)
    cost = prices.cost(torch.cat(counts), recipe).true.mean() / prices.unmerged().true.mean()
    return Answers(torch.cat(right), torch.cat(losses).mean().item(), 1 - cost.item())


def recipe_at(label: str, cut: float, calibration: Sequence[Tensor]) -> Recipe:
    """The recipe of a method at a cut for the model as it ships."""
    if label == "none":
        return none()
    return solve_variant(load(), calibration, find_variant(label), Target(cut=cut)).recipe


def measure(recipe: Recipe, options: FinetuneOptions, training: Drawn, test: Drawn) -> tuple[Answers, float, float]:
    """Train once: the answers afterwards, the mean loss of the last epoch, and the seconds of this process."""
    model, begin = load(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        trained = adamerge.finetune(model, training, recipe, folder, options=options)
        rows = (Path(folder) / "log.csv").read_text(encoding="utf-8").splitlines()
    seconds = time.process_time() - begin
    last = [float(line.split(",")[2]) for line in rows if line.split(",")[1] == "loss"][-1]
    return judge(model, trained, test), last, seconds


def tasks(methods: str, cuts: str) -> list[tuple[float, str]]:
    """The cuts and labels to run; without merging there is one cut, 0."""
    labels = methods.split(",")
    merged = itertools.product(map(float, cuts.split(",")), [label for label in labels if label != "none"])
    return [(0.0, "none")] * ("none" in labels) + list(merged)


def main() -> None:
    """Write a row for each method, cut and seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="none,tome,adamerge,preset", help="labels, separated by commas")
    parser.add_argument("--cuts", default="0.2,0.4,0.6")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--images", type=int, default=384, help="to train on")
    parser.add_argument("--test", type=int, default=600)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--label-smoothing", type=float, default=0.1, help="as when the model was trained")
    parser.add_argument("--drawn", type=Path, help="a folder that keeps drawn images, for several processes")
    parser.add_argument("--out", type=Path, default=RESULTS / f"{NAME}.csv")
    given = parser.parse_args()
    test = Drawn.make(given.test, TEST_SEED, given.drawn)
    calibration = list(preprocess(scenes(0, 96, seed=CALIBRATION_SEED).images).split(32))
    kept = read_table(given.out.read_text(encoding="utf-8")) if given.out.exists() else []
    done = {(row["method"], float(row["target_cut"]), int(row["seed"])) for row in kept}
    recipes: dict[tuple[str, float], tuple[Recipe, Answers]] = {}
    for seed in range(given.seeds):
        training = Drawn.make(given.images, FIRST_SEED + seed, given.drawn)
        options = FinetuneOptions(
            epochs=given.epochs,
            learning_rate=given.learning_rate,
            batch_size=given.batch_size,
            label_smoothing=given.label_smoothing,
            recalibrate=1,
            calibration_images=64,
            seed=seed,
            progress=False,
        )
        for cut, label in tasks(given.methods, given.cuts):
            if (label, cut, seed) in done:
                continue
            if (label, cut) not in recipes:
                recipe = recipe_at(label, cut, calibration)
                recipes[label, cut] = recipe, judge(load(), recipe, test)
            recipe, before = recipes[label, cut]
            after, last, seconds = measure(recipe, options, training, test)
            append(given.out, [row(label, cut, before, after, last, seconds, options, given.images)])
            print(
                f"{label} at {cut:.0%}, seed {seed}: top-1 {before.right.double().mean():.2%} -> "
                f"{after.right.double().mean():.2%}, cut {before.cut:.1%} -> {after.cut:.1%}, {seconds:.0f} s",
                flush=True,
            )


def row(
    label: str,
    cut: float,
    before: Answers,
    after: Answers,
    last: float,
    seconds: float,
    options: FinetuneOptions,
    images: int,
) -> dict[str, Any]:
    """A row of the results."""
    used = asdict(options)
    return {
        "method": label,
        "target_cut": cut,
        "seed": options.seed,
        "cut_before": round(before.cut, 4),
        "cut_after": round(after.cut, 4),
        "top1_before": before.right.double().mean().item(),
        "top1_after": after.right.double().mean().item(),
        "loss_before": before.loss,
        "loss_after": after.loss,
        "loss_training": last,
        "seconds": round(seconds, 1),
        "images": images,
        **{name: used[name] for name in ("epochs", "learning_rate", "batch_size", "label_smoothing")},
        "test_images": len(after.right),
        "device": f"cpu, {torch.get_num_threads()} threads",
        "torch": versions()["torch"],
        "adamerge": adamerge.__version__,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "right_before": pack_answers(before.right),
        "right_after": pack_answers(after.right),
    }


if __name__ == "__main__":
    main()
