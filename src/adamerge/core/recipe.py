"""A merging method is a choice of parts."""

import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from adamerge.core.budget import Adaptive, Budget, Fixed, Threshold, ZScore
from adamerge.core.combine import Average, Combine, Weight
from adamerge.core.decision import Decision
from adamerge.core.errors import BadOption, BadStats
from adamerge.core.evidence import Evidence
from adamerge.core.files import read_json, write_atomically
from adamerge.core.match import Links, Matching, no_links
from adamerge.core.parts import from_json, part, to_json
from adamerge.core.salience import Salience
from adamerge.core.select import Order, select
from adamerge.core.stats import LayerStats
from adamerge.core.types import PerToken

SCHEMA = 1
# What a recipe is called beside weights.
NAME = "adamerge.json"
ADVICE = "Make it with `adamerge tune` or adamerge.save_recipe, or give a recipe such as adamerge.methods.tome(8)."

Site = Literal["before_block", "after_attention"]


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
    combine: Combine = field(default=Average())
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
