"""A demonstration without network access: methods at equal cost on the embedded model and generated images."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn
from tqdm import tqdm

from adamerge.calibration import calibrate
from adamerge.core.errors import BadOption
from adamerge.core.files import check_can_write, write_atomically
from adamerge.core.recipe import Recipe
from adamerge.embedded import CLASSES, Scenes, load, preprocess, scenes
from adamerge.embedded.scene_generator import CALIBRATION_SEED, TEST_SEED
from adamerge.evaluation import judge, time_logits
from adamerge.flops import meter
from adamerge.methods import METHODS, adamerge, none
from adamerge.patching.apply import applied, trace
from adamerge.plots import MethodColumn, side_by_side, tradeoff
from adamerge.search.evaluator import AT_ONCE, Evaluator
from adamerge.search.journal import Journal
from adamerge.search.local_search import SearchLimits, search_candidates
from adamerge.search.scaling import preset_at
from adamerge.search.solve import solve
from adamerge.search.target import Target

CALIBRATION_IMAGES = 48
BATCH = 56
# For each cut, the r_max at which AdaMerge as published has this cost on the embedded model.  To solve for it would
# take most of the minute.
CUTS = {0.3: 22.17, 0.5: 33.5}
# Recipes that the tuner tries at each cut, and about how many passes over the images that takes.
TRIES = 8
PASSES = 11
TOME, PUBLISHED, PRESET, TUNED = "ToMe", "AdaMerge (paper)", "preset (ours)", "tuned (ours)"
NEXT = """\
Now on your own model and images:
  adamerge tune --model vit_base_patch16_224 --pretrained \\
    --data FOLDER --cut 0.3 --out recipe.json
  adamerge show PHOTO.jpg --model vit_base_patch16_224 --pretrained \\
    --recipe recipe.json --out pictures
In Python:
  recipe = adamerge.tune(model, loader, cut=0.3)
  adamerge.apply(model, recipe)       # adamerge.remove(model) undoes it"""

Row = dict[str, Any]


def run(out: Path, images: int, show: Callable[[Any], None]) -> None:
    """Calibrate, tune, evaluate and plot; calls `show` with the table, the files written to `out`, and what is next."""
    if images < 1:
        raise BadOption(f"the number of images must be at least 1; got {images}")
    check_can_write(out, folder=True)
    with progress_bar(images) as step:
        step("drawing images", 0)
        model = load()
        drawn = scenes(0, images, seed=TEST_SEED)
        data = list(zip(preprocess(drawn.images).split(BATCH), drawn.labels.split(BATCH), strict=True))
        recipes = make_recipes(model, preprocess(scenes(0, CALIBRATION_IMAGES, seed=CALIBRATION_SEED).images), step)
        rows = measure(model, data, recipes, step)
        step("drawing pictures", 1)
        write_atomically(out / "results.json", json.dumps(rows, indent=1) + "\n")
        last = {method: recipe for (method, cut), recipe in recipes.items() if cut == max(CUTS)}
        last[TUNED].save(out / "recipe.json")
        draw_mosaic(model, last, drawn, out / "mosaic.png")
        draw_tradeoff(rows, out / "pareto.png")
    show(make_table(rows))
    files = {
        "pareto.png": "answers kept against compute saved",
        "mosaic.png": f"what each method leaves at a cut of {max(CUTS):.0%}",
        "recipe.json": "the tuned recipe; results.json has all figures",
    }
    for name, what in files.items():
        show(f"wrote {out / name}: {what}")
    show(NEXT)


@contextmanager
def progress_bar(images: int) -> Iterator[Callable[[str, int], None]]:
    """One bar for everything: gives a function that takes what begins now, and how many steps it has."""
    batches = -(-images // BATCH)
    total = len(CUTS) * (PASSES + 4 + 4 * batches) + batches + 1
    waiting = 0
    with tqdm(total=total, bar_format="{desc:<28}{percentage:3.0f}% |{bar:30}| {elapsed}", ascii=" #") as bar:

        def step(what: str, steps: int) -> None:
            nonlocal waiting
            bar.update(min(waiting, total - bar.n))
            waiting = steps
            bar.set_description_str(what)

        yield step
        bar.update(total - bar.n)


class TickingJournal(Journal):
    """A journal that also calls `tick` for every recipe that was measured."""

    def __init__(self, tick: Callable[[], None]):
        super().__init__()
        self.tick = tick

    def record(self, tried: Any, result: Any) -> None:
        """Keep the result."""
        super().record(tried, result)
        self.tick()


def make_recipes(model: nn.Module, images: Tensor, step: Callable[[str, int], None]) -> dict[tuple[str, float], Recipe]:
    """The recipes by method and cut, calibrated on these images; all recipes of a cut have the same cost."""
    found: dict[tuple[str, float], Recipe] = {}
    evaluator = Evaluator(model, list(images.split(AT_ONCE["cpu"])))
    for cut, r_max in CUTS.items():
        target = Target(cut=cut)
        found[TOME, cut] = solve(model, images, METHODS["tome"], target).recipe
        step("calibrating AdaMerge", 2)
        published = adamerge(r_max)
        found[PUBLISHED, cut] = published.with_stats(calibrate(model, images, published, progress=False))
        step("calibrating the preset", 2)
        found[PRESET, cut] = preset_at(evaluator, target)
        # The search steps forward by itself: one step for each pass over the images.
        left = iter(range(PASSES))
        words = f"tuning for a cut of {cut:.0%}"
        journal = TickingJournal(lambda left=left, words=words: step(words, 1 if next(left, None) is not None else 0))
        best, _ = search_candidates(evaluator, target, SearchLimits(TRIES), journal=journal)
        found[TUNED, cut] = evaluator.sweep(best.recipe).recipe
    return found


def measure(
    model: nn.Module,
    data: Sequence[tuple[Tensor, Tensor]],
    recipes: Mapping[tuple[str, float], Recipe],
    step: Callable[[str, int], None],
) -> list[Row]:
    """A row for the unmerged model and for each recipe; on each batch all of them run in turn, and are timed."""
    everything = {("none", 0.0): none(), **recipes}
    judged: dict[tuple[str, float], list[tuple[Tensor, ...]]] = {name: [] for name in everything}
    seconds: dict[tuple[str, float], list[float]] = {name: [] for name in everything}
    prices = meter(model)
    with torch.inference_mode():
        for images, labels in data:
            full, took = time_logits(model, images)
            seconds["none", 0.0].append(took)
            for name, recipe in everything.items():
                step(f"evaluating {'the unmerged model' if name[0] == 'none' else name[0]}", 1)
                with applied(model, recipe):
                    merged, took = time_logits(model, images)
                    counts = trace(model).counts
                if name[0] != "none":
                    seconds[name].append(took)
                top1, _, _, agreement, kl = judge(full, merged, labels)
                judged[name].append((top1.double(), agreement.double(), kl, prices.cost(counts, recipe).true))
    # The first batch is a warm-up.
    time_of = {name: sum(took[1:] or took) for name, took in seconds.items()}
    rows = []
    for (method, cut), batches in judged.items():
        top1, agreement, kl, macs = (torch.cat(column).mean().item() for column in zip(*batches, strict=True))
        row = {"method": method, "target_cut": cut, "images": sum(len(labels) for _, labels in data)}
        row |= {"top1": top1, "agreement": agreement, "kl": kl, "gmacs": macs / 1e9}
        row |= {"cut": 1 - macs / prices.unmerged().true.item()}
        rows.append({**row, "speedup": time_of["none", 0.0] / time_of[method, cut]})
    return rows


def draw_mosaic(model: nn.Module, recipes: Mapping[str, Recipe], drawn: Scenes, path: Path) -> Path:
    """Four scenes, from plain to cluttered, with the tokens that each recipe leaves and what the model then sees."""
    with torch.inference_mode():
        right = torch.cat([model(preprocess(part)).argmax(1) for part in drawn.images.split(BATCH)]) == drawn.labels
    # Of the scenes that the unmerged model gets right, so that a wrong answer comes from merging.
    by_clutter = [index for index in drawn.clutter.argsort().tolist() if right[index]] or [0]
    chosen = torch.tensor(by_clutter)[torch.linspace(0, len(by_clutter) - 1, 4).long()]
    labels = drawn.labels[chosen].tolist()
    columns: dict[str, MethodColumn] = {}
    for method, recipe in recipes.items():
        with applied(model, recipe), torch.inference_mode():
            answers = model(preprocess(drawn.images[chosen])).argmax(1).tolist()
            seen = trace(model)
        captions = [
            f"{left} tokens  {'✓' if answer == label else '✗ ' + CLASSES[answer]}"
            for answer, label, left in zip(answers, labels, seen.counts[:, -2].tolist(), strict=True)
        ]
        # The last layer may merge all that is left, because the head reads the class token only.
        columns[method] = MethodColumn(seen.slots(-2), captions, "tokens that enter the last layer")
    titles = [CLASSES[label] for label in labels]
    return side_by_side(drawn.images[chosen], columns, path, titles=titles)


def draw_tradeoff(rows: list[Row], path: Path) -> Path:
    """Agreement against compute saved, with the method that wins at the larger cut as a thick line."""
    curves = {
        method: [(row["cut"], row["agreement"]) for row in rows if row["method"] == method]
        for method in (TUNED, PRESET, TOME, PUBLISHED)
    }
    title = f"The embedded model on {rows[0]['images']} generated images"
    winner = best_of(rows, max(CUTS))["method"]
    return tradeoff(curves, 1.0, path, winner=winner, title=title, quantity="same answer as the unmerged model (%)")


def best_of(rows: list[Row], cut: float) -> Row:
    """The row of a cut that changes the output of the model least."""
    return min((row for row in rows if row["target_cut"] == cut), key=lambda row: row["kl"])


def make_table(rows: list[Row]) -> Table:
    """The rows as a table of less than 80 columns; the best of each cut is marked."""
    table = Table(
        title=f"The embedded model on {rows[0]['images']} generated images",
        caption="same answer: as the unmerged model.  best: lowest KL(unmerged ‖ merged) at\n"
        "this cut.  speed: images per second, unmerged = 1, measured in this run.",
        caption_justify="left",
    )
    for column in ("method", "cut", "top-1", "same answer", "KL", "speed", ""):
        table.add_column(column, justify="left" if column in ("method", "") else "right", no_wrap=True)
    table.add_row("unmerged", "0%", f"{rows[0]['top1']:.1%}", "100.0%", "0", "1.00×", "", end_section=True)
    for cut in CUTS:
        here = [row for row in rows if row["target_cut"] == cut]
        best = best_of(rows, cut)
        for row in here:
            table.add_row(
                row["method"],
                f"{row['cut']:.0%}",
                f"{row['top1']:.1%}",
                f"{row['agreement']:.1%}",
                f"{row['kl']:.2g}",
                f"{row['speedup']:.2f}×",
                "◀ best" if row is best else "",
                style="bold green" if row is best else None,
                end_section=row is here[-1],
            )
    return table
