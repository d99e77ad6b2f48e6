"""Which recipes the kernels can decide, and how they are told."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from adamerge.core.budget import SMALLEST_STD, Fixed, Threshold, ZScore, calibrated
from adamerge.core.combine import Average, BySalience, BySalienceAndSize, BySize, Drop, MeanNorm
from adamerge.core.match import (
    Alternating,
    Bipartite,
    Everywhere,
    Keys,
    Protect,
    SalientFirst,
    SalientLast,
    Sequential,
    SimilarityOnly,
    Tokens,
)
from adamerge.core.recipe import Recipe
from adamerge.core.salience import Affinity, Centrality, ClassShare, Uniform

SCORES = {SimilarityOnly: "similarity", SalientFirst: "first", SalientLast: "last", Protect: "protect"}
WEIGHTS = {BySalience: "salience", BySize: "size", BySalienceAndSize: "salience_size"}


@dataclass(frozen=True)
class Lowered:
    """A recipe in the kernels' words.

    `affinity` gives salience and similarity at once; where it is None, `glances` says whether the class token's
    attention is the salience, and `keys` whether keys are compared or tokens.
    """

    affinity: Affinity | None
    glances: bool
    keys: bool
    alternating: bool
    first: int
    half: bool
    score: Literal["similarity", "first", "last", "protect"]
    strength: float
    weigh: Literal["salience", "size", "salience_size", "keep"]
    keep_length: bool
    sources_first: bool
    budget: Fixed | ZScore | Threshold

    def may_merge(self, layer: int) -> bool:
        """Whether a layer can merge anything, as far as that is known before anybody looks at the tokens."""
        budget = self.budget
        if isinstance(budget, Fixed):
            return budget.at(layer) > 0
        return budget.wanted(layer) > 0 if isinstance(budget, Threshold) else budget.most(layer) >= 1

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
            pairs = enumerate(zip(stats.mean, stats.std, strict=True))
            rows = [[mean, max(std, SMALLEST_STD), budget.most(layer), slope] for layer, (mean, std) in pairs]
        return torch.tensor(rows, dtype=torch.float64, device=device)


def lower(recipe: Recipe, prefix: int, class_token: bool) -> Lowered | str:
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
    if type(recipe.combine) not in (Average, Drop, MeanNorm):
        return f"combine {type(recipe.combine).__name__}"
    if type(recipe.combine) is not Drop and type(recipe.weight) not in WEIGHTS:
        return f"weight {type(recipe.weight).__name__}"
    salience, metric = type(recipe.salience), type(links.metric)
    known = (Uniform, ClassShare) if class_token else (Uniform,)
    together = salience is Centrality and metric is Tokens and recipe.site == "before_block"
    apart = salience in known and metric in (Keys, Tokens) and recipe.site == "after_attention"
    if not together and not apart:
        return f"salience {salience.__name__} with metric {metric.__name__} at {recipe.site}"
    counted = isinstance(links.split, Alternating) and links.split.from_prefix
    return Lowered(
        affinity=recipe.salience.affinity if isinstance(recipe.salience, Centrality) else None,
        glances=salience is ClassShare,
        keys=metric is Keys,
        alternating=isinstance(links.split, Alternating),
        first=prefix % 2 if counted else 0,
        half=counted,
        score=SCORES[type(links.score)],  # pyright: ignore[reportArgumentType]
        strength=links.score.strength if isinstance(links.score, Protect) else 0.0,
        weigh="keep" if isinstance(recipe.combine, Drop) else WEIGHTS[type(recipe.weight)],  # pyright: ignore
        keep_length=isinstance(recipe.combine, MeanNorm),
        sources_first=recipe.order == "sources_first",
        budget=recipe.budget,  # pyright: ignore[reportArgumentType]
    )
