"""Presets: good recipes at any cost, without a search."""

from torch import nn

from adamerge.core.recipe import Recipe
from adamerge.data.batches import Images
from adamerge.flops import CostCount
from adamerge.search.evaluator import Evaluator, Loss, gather_images
from adamerge.search.families import families, protect, rates
from adamerge.search.options import check_merge_every
from adamerge.search.scaling import preset_at
from adamerge.search.target import Target

__all__ = ["best", "families", "protect", "rates"]


def best(
    model: nn.Module,
    images: Images,
    cut: float = 0.3,
    *,
    cost: CostCount = "true",
    gmacs: float | None = None,
    loss: Loss | None = None,
    static: bool = False,
    merge_every: int = 1,
) -> Recipe:
    """The preset at a given cost, calibrated on unlabelled images in a few passes, without a search.

    Args:
        model: a supported model; it is not changed.
        images: the images on which the mean cost is met: a tensor, or an iterable of batches or of `(images, labels)`.
        cut: the share of the cost to save.
        cost: which count of multiply-accumulates: "true" or "paper"; see `adamerge.flops`.
        gmacs: instead of `cut`, 10^9 multiply-accumulates per image.
        loss: how outputs are compared; see `tune`.
        static: merge the same number in every image; see `tune`.
        merge_every: merge at every k-th block only; see `tune`.
    """
    check_merge_every(merge_every)
    evaluator = Evaluator(model, gather_images(model, images), cost=cost, loss=loss)
    target = Target(gmacs=gmacs) if gmacs is not None else Target(cut=cut)
    return preset_at(evaluator, target, static, merge_every)
