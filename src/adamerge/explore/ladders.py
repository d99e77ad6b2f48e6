"""Ladders: recipes of a method from gentle to strong, with their mean cost, so that a slider needs no calibration."""

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from adamerge.core.errors import BadOption
from adamerge.core.recipe import Recipe
from adamerge.methods import METHODS, Method
from adamerge.patching.apply import temporarily_patched
from adamerge.search.solve import KnobCosts
from adamerge.search.solve_variant import solve_variant
from adamerge.search.target import Target
from adamerge.search.variants import PRESET, find_variant

# The methods of the page, in its order.
LABELS = (
    PRESET,
    "adamerge",
    "adamerge (cosine, exchanged)",
    "tome",
    "pitome",
    "dsm",
    "tofu",
    "evit",
    "ats",
    "dymu",
    "vid_tldr",
    "random",
)
# Ladders of the embedded model on `IMAGES` of its own images; benchmarks/explore_ladders.py writes the file.
EMBEDDED = Path(__file__).with_name("embedded_ladders.json.gz")
IMAGES = 16
STRONGEST_CUT = 0.65
COUNTS = (*range(1, 13), *range(14, 62, 2))
SHARES = tuple(round(1 - step / 20, 2) for step in range(1, 17))
SAMPLES = (9800, 4000, 2000, 1000, 600, 400, 300, 250, 200, 150, 100, 60, 30)
CUTS = tuple(round(step / 20, 2) for step in range(1, 13))


@dataclass(frozen=True)
class Rung:
    """A recipe, the value of its method's knob (None for a preset), and the share of the true cost it saves."""

    knob: float | None
    cut: float
    recipe: Recipe


Ladder = Sequence[Rung]


def build_ladder(model: nn.Module, images: Tensor, label: str) -> list[Rung]:
    """The recipes of a method from gentle to strong, calibrated on `images`; the model is not changed."""
    variant = find_variant(label)
    if variant.method == PRESET:
        solved = (solve_variant(model, images, variant, Target(cut=cut), tolerance=0.02) for cut in CUTS)
        return [Rung(None, found.cut, found.recipe) for found in solved]
    method = METHODS[variant.method]
    rungs: list[Rung] = []
    with temporarily_patched(model), torch.inference_mode():
        costs = KnobCosts(model, images, method, "true", variant.options, variant.how)
        for knob in _knobs(method):
            found = costs.measure(knob)
            rungs.append(Rung(knob, 1 - found.macs / costs.full, found.recipe))
            if rungs[-1].cut > STRONGEST_CUT:
                break
    return rungs


def _knobs(method: Method) -> Iterator[float]:
    """Values of a method's knob, from gentle to strong."""
    values = {"keep": SHARES, "tokens": SAMPLES}.get(str(method.knob), COUNTS)
    yield from values


def at_cut(ladder: Ladder, cut: float) -> Rung:
    """The recipe whose mean saving is nearest to `cut`."""
    return min(ladder, key=lambda rung: abs(rung.cut - cut))


def at_count(ladder: Ladder, label: str, count: float) -> Rung:
    """The recipe whose r or r_max is nearest to `count`; other methods have no such knob."""
    knob = None if label == PRESET else METHODS[find_variant(label).method].knob
    if knob not in ("r", "r_max"):
        other = "it has no knob" if knob is None else f"its knob is {knob!r}"
        raise BadOption(f"{label} has neither r nor r_max: {other}. Choose 'compute saved' instead.")
    return min(ladder, key=lambda rung: abs((rung.knob or 0) - count))


def write_ladders(ladders: dict[str, list[Rung]]) -> bytes:
    """The ladders as the content of the file `EMBEDDED`."""
    data = {
        label: [{"knob": rung.knob, "cut": rung.cut, "recipe": rung.recipe.to_json()} for rung in ladder]
        for label, ladder in ladders.items()
    }
    return gzip.compress(json.dumps(data, separators=(",", ":")).encode(), mtime=0)


@cache
def embedded_ladders() -> dict[str, list[Rung]]:
    """The ladders of the embedded model, which are part of the package."""
    data = json.loads(gzip.decompress(EMBEDDED.read_bytes()))
    return {
        label: [Rung(rung["knob"], rung["cut"], Recipe.from_json(rung["recipe"])) for rung in ladder]
        for label, ladder in data.items()
    }
