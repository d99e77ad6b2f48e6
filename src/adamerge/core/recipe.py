"""Recipes: a merging method as a choice of parts."""

import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from adamerge.core.budget import Adaptive, Budget
from adamerge.core.combine import Average, Combine, Weight
from adamerge.core.decision import Decision
from adamerge.core.errors import BadOption, BadStats
from adamerge.core.evidence import Evidence
from adamerge.core.files import is_schema, is_special, read_json, write_atomically
from adamerge.core.match import Links, Matching, no_links
from adamerge.core.parts import LEFT_OUT_IF_NONE, check_parts, from_json, part, to_json
from adamerge.core.salience import Salience
from adamerge.core.select import Order, select
from adamerge.core.stats import LayerStats
from adamerge.core.types import PerToken
from adamerge.core.weight_patch import WeightPatch, file_name, read_patch_file, refer_to_file

SCHEMA = 1
# The file name of a recipe in a folder of weights.
NAME = "adamerge.json"
ADVICE = "Make it with `adamerge tune` or adamerge.save_recipe, or give a recipe such as adamerge.methods.tome(8)."

Site = Literal["before_block", "after_attention"]
# The salience of a layer's tokens and the links between them.
Linked = tuple[PerToken, Links]


@part
@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A complete description of how to merge.

    Args:
        site: where in a block the merge is: before the block, or between its attention and its MLP.
        salience: how much each token matters.
        links: which token may merge into which, and how strong each link is.
        budget: how many tokens merge at a layer.
        weight: the weight of each token in the average.
        combine: how one token is made of several.
        order: how the remaining tokens are ordered.
        proportional_attention: add the log of a token's size to the attention scores of its key.
        patch: changes of the model's parameters that belong to the recipe, made by `adamerge.repair`.
    """

    site: Site
    salience: Salience
    links: Matching
    budget: Budget
    weight: Weight
    combine: Combine = field(default=Average())
    order: Order = "kept"
    proportional_attention: bool = False
    patch: WeightPatch | None = field(default=None, metadata={LEFT_OUT_IF_NONE: True})

    def __post_init__(self) -> None:
        for name, choices in (("site", Site), ("order", Order)):
            if getattr(self, name) not in get_args(choices):
                raise BadOption(f"{name} must be one of {', '.join(get_args(choices))}; got {getattr(self, name)!r}")
        check_parts(self)

    def decide(self, evidence: Evidence, linked: Linked | None = None) -> Decision:
        """Decide one merge without carrying it out; `linked` is the result of `link`, if it was called before."""
        salience, links = self.link(evidence) if linked is None else linked
        if not self.may_merge(evidence.layer, evidence.depth):
            plan = select(no_links(salience), 0, evidence.valid, self.order)
            return Decision(plan, torch.ones_like(salience), salience, links)
        plan = select(links, self.budget(links, evidence), evidence.valid, self.order)
        return Decision(plan, self.weight(evidence, salience), salience, links)

    @property
    def ragged(self) -> bool:
        """Whether images of one batch may end with different numbers of tokens."""
        return self.budget.ragged

    def may_merge(self, layer: int, depth: int) -> bool:
        """Whether images may merge tokens at `layer` of `depth` layers.

        Where not, the layer is idle: every salience is 1, there are no links, and the redundancy is 0.
        """
        return self.budget.may_merge(layer, depth)

    @property
    def adaptive(self) -> Adaptive | None:
        """The budget, if it compares images with calibrated statistics."""
        return self.budget if isinstance(self.budget, Adaptive) else None

    def link(self, evidence: Evidence) -> Linked:
        """The salience of every token and the links between tokens; ones and no links at an idle layer."""
        if not self.may_merge(evidence.layer, evidence.depth):
            ones = torch.ones_like(evidence.size)
            return ones, no_links(ones)
        salience = self.salience(evidence)
        return salience, self.links(evidence, salience)

    @property
    def stats(self) -> LayerStats | None:
        """The calibrated statistics of an adaptive recipe."""
        return None if self.adaptive is None else self.adaptive.stats

    def with_stats(self, stats: LayerStats | None) -> "Recipe":
        """The same recipe with other statistics, or with none."""
        if self.adaptive is None:
            raise BadOption(
                f"only adaptive budgets have statistics; this recipe's is {self.budget}. "
                "It needs no calibration and can be applied as it is."
            )
        return replace(self, budget=self.adaptive.with_stats(stats))

    @property
    def plain(self) -> "Recipe":
        """The same recipe without statistics and without a patch."""
        return replace(self if self.adaptive is None else self.with_stats(None), patch=None)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the recipe with its statistics to a JSON file.  Every write is atomic.

        A patch is written to a file beside it, with the suffix `.safetensors`.
        """
        path = Path(path)
        if self.patch is None or is_special(path):
            return write_atomically(path, self.file_text())
        beside = path.with_suffix(".safetensors")
        write_atomically(beside, self.patch.data)
        write_atomically(path, _file_text(refer_to_file(to_json(self), self.patch, beside.name)))

    def file_text(self) -> str:
        """The text of a file from which `load` reads the whole recipe, the patch included."""
        return _file_text(to_json(self))

    @staticmethod
    def load(path: str | os.PathLike[str]) -> "Recipe":
        """Read the recipe that `save` wrote, or the `adamerge.json` of a folder."""
        path = Path(path) / NAME if Path(path).is_dir() else path
        content = read_json(path, "recipe", ADVICE, BadOption)
        try:
            name = file_name(content)
            return _recipe(content if name is None else read_patch_file(content, Path(path).parent / name))
        except (BadOption, BadStats) as error:
            raise type(error)(f"{path}: {error}") from error

    def to_json(self) -> str:
        """The recipe, with its statistics, as JSON text."""
        return json.dumps(to_json(self), indent=1)

    @staticmethod
    def from_json(text: str) -> "Recipe":
        """The recipe that `to_json` wrote, or the text of a file that `save` wrote."""
        try:
            content = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise BadOption(
                f"a recipe is JSON text as `Recipe.to_json` writes it; this is not JSON: {error}"
            ) from error
        return _recipe(content)


def _file_text(recipe: Any) -> str:
    return json.dumps({"schema": SCHEMA, "recipe": recipe}, indent=1) + "\n"


def _recipe(content: Any) -> Recipe:
    """The recipe in JSON data: bare, or as a file has it, under its schema."""
    if isinstance(content, dict) and "mean" in content and "std" in content:
        raise BadOption(
            "this is a file of statistics, as `adamerge calibrate` writes it, not of a recipe. Give it as the "
            "statistics of a method: --method adamerge --r-max … --stats FILE, or stats=adamerge.LayerStats.load(file)."
        )
    if isinstance(content, dict) and "schema" in content:
        if not is_schema(content["schema"], SCHEMA) or "recipe" not in content:
            raise BadOption(
                f"a recipe's file has schema {SCHEMA} and a recipe; this one has schema {content['schema']!r} and the "
                f"fields {', '.join(content)}. {ADVICE}"
            )
        content = content["recipe"]
    try:
        recipe = from_json(content)
    except RecursionError as error:
        raise BadOption(f"the parts of this recipe are nested too deeply. {ADVICE}") from error
    if not isinstance(recipe, Recipe):
        raise BadOption(f"a recipe is JSON text as `Recipe.to_json` writes it; this describes {type(recipe).__name__}")
    return recipe
