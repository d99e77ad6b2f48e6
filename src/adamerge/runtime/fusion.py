"""Which recipes the kernels can decide, and how they are told."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from adamerge.core.budget import SMALLEST_STD, Fixed, Threshold, ZScore, calibrated
from adamerge.core.match import (
    Alternating,
    Bipartite,
    Everywhere,
    Keys,
    SalientFirst,
    SalientLast,
    Sequential,
    SimilarityOnly,
    Tokens,
)
from adamerge.core.recipe import Average, BySalience, BySalienceAndSize, BySize, Drop, Recipe
from adamerge.core.salience import Affinity, Centrality, Uniform

SCORES = {SimilarityOnly: "similarity", SalientFirst: "first", SalientLast: "last"}
WEIGHTS = {BySalience: "salience", BySize: "size", BySalienceAndSize: "salience_size"}


@dataclass(frozen=True)
class Fusion:
    """A recipe in the kernels' words.  `affinity` is None where salience is uniform and keys are compared."""

    affinity: Affinity | None
    alternating: bool
    first: int
    half: bool
    score: Literal["similarity", "first", "last"]
    weigh: Literal["salience", "size", "salience_size", "keep"]
    sources_first: bool
    budget: Fixed | ZScore | Threshold

    def may_merge(self, layer: int) -> bool:
        """Whether a layer can merge anything, as far as that is known before anybody looks at the tokens."""
        budget = self.budget
        if isinstance(budget, Fixed):
            return budget.at(layer) > 0
        return budget.wanted(layer) > 0 if isinstance(budget, Threshold) else budget.ragged

    def merges(self, layer: int, patches: int) -> int | None:
        """How many merges every image of `patches` tokens gets at a layer; None where that depends on the image."""
        if not isinstance(self.budget, Fixed):
            return None
        taking_turns = (patches + 1 - self.first) // 2 if patches > 1 else 0
        sources = taking_turns if self.alternating else patches // 2
        room = min(sources, patches - sources) if self.half else sources
        return min(self.budget.at(layer), room)

    def numbers(self, depth: int, device: torch.device) -> Tensor | None:
        """What the count rule compares with, one row a layer; refused where it was not calibrated."""
        budget = self.budget
        if isinstance(budget, Fixed):
            return None
        if isinstance(budget, Threshold):
            rows = [[budget.known(layer)] for layer in range(depth)]
        else:
            stats, slope = calibrated(budget.stats, depth - 1), budget.alpha / budget.temperature
            pairs = zip(stats.mean, stats.std, strict=True)
            rows = [[mean, max(std, SMALLEST_STD), budget.r_max, slope] for mean, std in pairs]
        return torch.tensor(rows, dtype=torch.float64, device=device)


def recognise(recipe: Recipe, prefix: int) -> Fusion | str:
    """The recipe in the kernels' words, or which of its parts they do not know."""
    links = recipe.links
    if type(links) is not Bipartite:
        return f"links {type(links).__name__}"
    if type(links.reach) is not Everywhere:
        return f"reach {type(links.reach).__name__}"
    if type(links.split) not in (Sequential, Alternating):
        return f"split {type(links.split).__name__}"
    if type(links.score) not in SCORES:
        return f"score {type(links.score).__name__}"
    if type(recipe.budget) not in (Fixed, ZScore, Threshold):
        return f"budget {type(recipe.budget).__name__}"
    if type(recipe.combine) not in (Average, Drop):
        return f"combine {type(recipe.combine).__name__}"
    if type(recipe.combine) is Average and type(recipe.weight) not in WEIGHTS:
        return f"weight {type(recipe.weight).__name__}"
    tokens = type(recipe.salience) is Centrality and type(links.metric) is Tokens and recipe.site == "before_block"
    keys = type(recipe.salience) is Uniform and type(links.metric) is Keys and recipe.site == "after_attention"
    if not tokens and not keys:
        return f"salience {type(recipe.salience).__name__} with metric {type(links.metric).__name__} at {recipe.site}"
    counted = isinstance(links.split, Alternating) and links.split.from_prefix
    return Fusion(
        affinity=recipe.salience.affinity if isinstance(recipe.salience, Centrality) else None,
        alternating=isinstance(links.split, Alternating),
        first=prefix % 2 if counted else 0,
        half=counted,
        score=SCORES[type(links.score)],  # pyright: ignore[reportArgumentType]
        weigh="keep" if isinstance(recipe.combine, Drop) else WEIGHTS[type(recipe.weight)],  # pyright: ignore
        sources_first=recipe.order == "sources_first",
        budget=recipe.budget,  # pyright: ignore[reportArgumentType]
    )
