"""Lowers a recipe to the options of the decision kernels, where they can decide it."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from adamerge.core.budget import SMALLEST_STD, Fixed, Threshold, ZScore
from adamerge.core.combine import (
    Average,
    BySalience,
    BySalienceAndSize,
    BySize,
    Combine,
    Drop,
    KeepNorm,
    MeanNorm,
    part_at,
    parts_of,
)
from adamerge.core.layer_numbers import calibrated
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
from adamerge.core.salience import Affinity, AttentionShare, Centrality, ClassShare, Sharpness, Uniform
from adamerge.runtime.triton.kernels.choice import Length, Policy, Score, Weigh
from adamerge.runtime.triton.kernels.match import Split

SCORES: dict[type, Score] = {
    SimilarityOnly: "similarity",
    SalientFirst: "first",
    SalientLast: "last",
    Protect: "protect",
}
WEIGHTS: dict[type, Weigh] = {BySalience: "salience", BySize: "size", BySalienceAndSize: "salience_size"}

# The combine parts that the merge kernel knows, with the length of a merged token.
LENGTHS: dict[type, Length | None] = {Average: None, Drop: None, MeanNorm: "mean", KeepNorm: "largest"}

# Whose attention is the salience: the class token's, that of all tokens, or each token's own by its entropy.
AttentionFrom = Literal["class token", "all tokens", "entropy"]
ATTENTION_FROM: dict[type, AttentionFrom] = {
    ClassShare: "class token",
    AttentionShare: "all tokens",
    Sharpness: "entropy",
}


@dataclass(frozen=True)
class Lowered:
    """The options of the decision kernels for a recipe.

    `affinity` gives salience and similarity at once.  Where it is None, `attention_from` says whose attention is the
    salience; None if all tokens are equal.  `by_keys` says whether keys are compared or tokens.
    """

    affinity: Affinity | None
    attention_from: AttentionFrom | None
    by_keys: bool
    policy: Policy
    combine: Combine
    budget: Fixed | ZScore | Threshold

    def policy_at(self, layer: int, depth: int) -> Policy:
        """The options of the decision at a layer."""
        dropped = isinstance(part_at(self.combine, layer, depth), Drop)
        return replace(self.policy, weigh="keep") if dropped else self.policy

    def known_merges(self, layer: int, depth: int, patches: int) -> int | None:
        """How many merges every image of `patches` tokens gets at a layer; None where that depends on the image."""
        count = self.budget.fixed_count(layer, depth, patches)
        return None if count is None else min(count, self.policy.split.most_merges(patches))

    def numbers(self, depth: int, device: torch.device) -> Tensor | None:
        """The calibrated numbers of the count rule, one row per layer; an error where there are none."""
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


@dataclass(frozen=True)
class NotLowered:
    """The kernels cannot decide a recipe: `reason` names the part they do not know."""

    reason: str


def lower(recipe: Recipe, prefix: int, class_token: bool) -> Lowered | NotLowered:
    """The options of the decision kernels for a recipe on a host with `prefix` tokens before the patches."""
    reason = _unknown_part(recipe, class_token)
    return _lower_known(recipe, prefix) if reason is None else NotLowered(reason)


def known_combine(combine: Combine) -> bool:
    """Whether the merge kernel can combine so at every layer."""
    return all(type(each) in LENGTHS for each in parts_of(combine))


def length_at(combine: Combine, layer: int, depth: int) -> Length | None:
    """The length that the merge kernel gives to a merged token at a layer; None for that of the average."""
    return LENGTHS[type(part_at(combine, layer, depth))]


def _unknown_part(recipe: Recipe, class_token: bool) -> str | None:
    """The first part of a recipe that the kernels do not know."""
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
    if not known_combine(recipe.combine):
        return f"combine {type(recipe.combine).__name__}"
    if type(recipe.combine) is not Drop and type(recipe.weight) not in WEIGHTS:
        return f"weight {type(recipe.weight).__name__}"
    salience, metric = type(recipe.salience), type(links.metric)
    known = {Uniform, *ATTENTION_FROM} - (set() if class_token else {ClassShare})
    together = salience is Centrality and metric is Tokens and recipe.site == "before_block"
    apart = salience in known and metric in (Keys, Tokens) and recipe.site == "after_attention"
    if not together and not apart:
        return f"salience {salience.__name__} with metric {metric.__name__} at {recipe.site}"
    return None


def _lower_known(recipe: Recipe, prefix: int) -> Lowered:
    links = recipe.links
    assert isinstance(links, Bipartite)
    counted = isinstance(links.split, Alternating) and links.split.from_prefix
    policy = Policy(
        split=Split(isinstance(links.split, Alternating), prefix % 2 if counted else 0, half=counted),
        score=SCORES[type(links.score)],
        strength=links.score.strength if isinstance(links.score, Protect) else 0.0,
        weigh=WEIGHTS.get(type(recipe.weight), "keep"),
        sources_first=recipe.order == "sources_first",
    )
    return Lowered(
        affinity=recipe.salience.affinity if isinstance(recipe.salience, Centrality) else None,
        attention_from=ATTENTION_FROM.get(type(recipe.salience)),
        by_keys=isinstance(links.metric, Keys),
        policy=policy,
        combine=recipe.combine,
        budget=recipe.budget,  # pyright: ignore[reportArgumentType]
    )
