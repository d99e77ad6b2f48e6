"""DyMU: dynamic token merging by thresholds (Wang et al., 2025)."""

from adamerge.core.budget import Threshold
from adamerge.core.combine import BySize
from adamerge.core.match import Alternating, Bipartite, Keys, SimilarityOnly
from adamerge.core.recipe import Recipe
from adamerge.core.salience import Uniform
from adamerge.core.stats import LayerStats


def dymu(r: float, stats: LayerStats | None = None, *, proportional_attention: bool = True) -> Recipe:
    """ToMe that merges all links above a threshold per layer, so that redundant images merge more tokens.

    From the paper: the thresholds are found layer by layer on calibration images, such that `r` tokens merge on
    average over the batch.  The original pads a batch to its longest image, and restores merged tokens for language
    models ("virtual unmerging"), which classification does not need.

    Args:
        r: tokens merged at each layer, on average over the calibration images.
        stats: the thresholds, from `calibrate`.  Without them the recipe can be calibrated but not applied.
        proportional_attention: add the log of its size to the attention scores of a merged token.
    """
    return Recipe(
        site="after_attention",
        salience=Uniform(),
        links=Bipartite(Alternating(from_prefix=True), Keys(), SimilarityOnly()),
        budget=Threshold(r, stats),
        weight=BySize(),
        order="sources_first",
        proportional_attention=proportional_attention,
    )
