"""A merging method is a choice of parts."""

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from adamerge.core.budget import Adaptive, Budget, Fixed, Threshold, ZScore
from adamerge.core.errors import BadOption, BadStats
from adamerge.core.evidence import Evidence, Widths
from adamerge.core.files import read_json, write_atomically
from adamerge.core.match import Links, Matching, no_links
from adamerge.core.parts import from_json, part, to_json
from adamerge.core.plan import Plan, fold
from adamerge.core.select import Order, select
from adamerge.core.stats import LayerStats
from adamerge.core.types import Features, Mask, PerToken

SCHEMA = 1
# What a recipe is called beside weights.
NAME = "adamerge.json"
ADVICE = "Make it with `adamerge tune` or adamerge.save_recipe, or give a recipe such as adamerge.methods.tome(8)."

Site = Literal["before_block", "after_attention"]


@runtime_checkable
class Salience(Protocol):
    """What a recipe needs of a measure of importance."""

    def __call__(self, evidence: Evidence) -> PerToken: ...

    def macs(self, n: Tensor, at: Widths) -> Tensor: ...


@runtime_checkable
class Weight(Protocol):
    """What a recipe needs of a way to average."""

    def __call__(self, evidence: Evidence, salience: PerToken) -> PerToken: ...


@part
@dataclass(frozen=True)
class BySalience:
    """Merged tokens are averaged in proportion to their salience (published, eq. 5)."""

    def __call__(self, evidence: Evidence, salience: PerToken) -> PerToken:
        return salience


@part
@dataclass(frozen=True)
class BySize:
    """Merged tokens are averaged in proportion to the patches they stand for (ToMe)."""

    def __call__(self, evidence: Evidence, salience: PerToken) -> PerToken:
        return evidence.size


@part
@dataclass(frozen=True)
class BySalienceAndSize:
    """Merged tokens are averaged in proportion to salience times size."""

    def __call__(self, evidence: Evidence, salience: PerToken) -> PerToken:
        return salience * evidence.size


@runtime_checkable
class Combine(Protocol):
    """What a recipe needs of a way to make one token of several."""

    def __call__(self, x: Features, decision: "Decision", evidence: Evidence) -> Float[Tensor, "b m d"]: ...


@part
@dataclass(frozen=True)
class Average:
    """The weighted mean of a slot's tokens."""

    def __call__(self, x: Features, decision: "Decision", evidence: Evidence) -> Float[Tensor, "b m d"]:
        return fold(x, decision.plan, decision.weight)


@part
@dataclass(frozen=True)
class Drop:
    """Pruning: the token that keeps its slot stays as it is, those merged into it are lost."""

    def __call__(self, x: Features, decision: "Decision", evidence: Evidence) -> Float[Tensor, "b m d"]:
        return fold(x, decision.plan, decision.kept.to(decision.weight.dtype))


@dataclass(frozen=True)
class Decision:
    """What a recipe decided at one layer: the plan, the weights to average with, and what led to it."""

    plan: Plan
    weight: PerToken
    salience: PerToken
    links: Links

    @property
    def kept(self) -> Mask:
        """The tokens that were not merged away: each is in a slot of its own or the destination of others."""
        slot = self.plan.slot
        return ~(self.links.source & (slot == slot.gather(1, self.links.partner)))


@part
@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Eight answers: where, what matters, who with whom, how many, by which weights, combined how, in which order, and
    whether attention counts a merged token as often as the patches it stands for."""

    site: Site
    salience: Salience
    links: Matching
    budget: Budget
    weight: Weight
    combine: Combine = Average()
    order: Order = "kept"
    proportional_attention: bool = False

    def __post_init__(self) -> None:
        for name, choices in (("site", Site), ("order", Order)):
            if getattr(self, name) not in get_args(choices):
                raise BadOption(f"{name} must be one of {', '.join(get_args(choices))}; got {getattr(self, name)!r}")

    def decide(self, evidence: Evidence) -> Decision:
        """Decide one merge from the evidence, without carrying it out."""
        if self.idle(evidence.layer):
            ones = torch.ones_like(evidence.size)
            plan = select(no_links(ones), 0, evidence.valid, self.order)
            return Decision(plan, ones, ones, no_links(ones))
        salience, links = self.link(evidence)
        plan = select(links, self.budget(links, evidence), evidence.valid, self.order)
        return Decision(plan, self.weight(evidence, salience), salience, links)

    @property
    def ragged(self) -> bool:
        """Whether images of one batch may end with different numbers of tokens."""
        return self.budget.ragged

    def idle(self, layer: int) -> bool:
        """Whether no image merges anything at a layer, whatever its tokens are: then nobody need look at them."""
        return isinstance(self.budget, (Fixed, Threshold, ZScore)) and self.budget.idle(layer)

    def link(self, evidence: Evidence) -> tuple[PerToken, Links]:
        """What matters, and who would merge into whom."""
        salience = self.salience(evidence)
        return salience, self.links(evidence, salience)

    @property
    def stats(self) -> LayerStats | None:
        """The calibrated statistics of an adaptive recipe."""
        return self.budget.stats if isinstance(self.budget, Adaptive) else None

    def with_stats(self, stats: LayerStats | None) -> "Recipe":
        """The same recipe with other statistics, or with none."""
        if not isinstance(self.budget, Adaptive):
            raise BadOption(
                f"only adaptive budgets have statistics; this recipe's is {self.budget}. "
                "It needs no calibration and can be applied as it is."
            )
        return replace(self, budget=self.budget.with_stats(stats))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the recipe with its statistics to a JSON file, whole or not at all."""
        write_atomically(path, json.dumps({"schema": SCHEMA, "recipe": to_json(self)}, indent=1) + "\n")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> "Recipe":
        """Read the recipe that `save` wrote, or the `adamerge.json` of a folder."""
        path = Path(path) / NAME if Path(path).is_dir() else path
        content = read_json(path, "recipe", ADVICE, BadOption)
        try:
            return _recipe(content)
        except (BadOption, BadStats) as error:
            raise type(error)(f"{path}: {error}") from error

    def to_json(self) -> str:
        """The recipe, with its statistics, as JSON text."""
        return json.dumps(to_json(self), indent=1)

    @staticmethod
    def from_json(text: str) -> "Recipe":
        """The recipe that `to_json` wrote, or the text of a file that `save` wrote."""
        try:
            return _recipe(json.loads(text))
        except json.JSONDecodeError as error:
            raise BadOption(
                f"a recipe is JSON text as `Recipe.to_json` writes it; this is not JSON: {error}"
            ) from error


def _recipe(content: Any) -> Recipe:
    """The recipe in JSON data: bare, or as a file has it, under its schema."""
    if isinstance(content, dict) and "schema" in content:
        if content["schema"] != SCHEMA or "recipe" not in content:
            raise BadOption(
                f"a recipe's file has schema {SCHEMA} and a recipe; this one has schema {content['schema']!r} and the "
                f"fields {', '.join(content)}. {ADVICE}"
            )
        content = content["recipe"]
    recipe = from_json(content)
    if not isinstance(recipe, Recipe):
        raise BadOption(f"a recipe is JSON text as `Recipe.to_json` writes it; this describes {type(recipe).__name__}")
    return recipe
