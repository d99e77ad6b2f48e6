"""The recipe families of presets and tuner, and their default merge rates per layer at any cost."""

from dataclasses import replace

from adamerge.core.budget import Fixed, Threshold
from adamerge.core.combine import BySalience, BySize, MeanNorm
from adamerge.core.match import Alternating, Bipartite, Keys, Protect, Tokens
from adamerge.core.recipe import Recipe
from adamerge.core.salience import AttentionShare, ClassShare, Uniform
from adamerge.search.schedule import MERGE_ALL, Rates, at_every, linear_rates

# The constants below were found on calibration images of vit_tiny and deit_tiny; see docs/frontier.md.
STRENGTH = 0.75
STRENGTH_WITHOUT_CLASS_TOKEN = 0.5
# For cuts up to the first number: the share of the depth before the first merge, and the slope of the rates after it.
SPREADS = (
    (0.15, 0.42, 1.0),
    (0.25, 0.34, 1.0),
    (0.35, 0.34, 0.0),
    (0.45, 0.25, 0.0),
    (0.55, 0.17, 2.0),
    (1, 0.09, 2.0),
)


def protect(
    strength: float | None = None,
    *,
    class_token: bool = True,
    static: bool = False,
    r: float | tuple[float, ...] = 0.0,
) -> Recipe:
    """Merge where little is lost: unattended tokens even when dissimilar, attended ones only with near-duplicates.

    The score of a pair is its distance times the class-token attention of the source to the power `strength`.  Each
    layer merges the pairs below a calibrated threshold, so the number of merged tokens differs between images.  Merged
    tokens are averaged with the attention they get as weights, and get the mean of their norms.  For a model without a
    class token, the score uses the attention from all tokens; there, tokens are compared instead of keys, and averaged
    by size.

    Args:
        strength: the power, 0.75 with a class token, else 0.5; 0 scores by distance alone.
        class_token: whether the model has one.
        static: merge the same number in every image.  The loss is higher, but all shapes are known in advance.
        r: tokens merged at each layer, on average over the calibration images; `best` and `tune` choose them.
    """
    if strength is None:
        strength = STRENGTH if class_token else STRENGTH_WITHOUT_CLASS_TOKEN
    return Recipe(
        site="after_attention",
        salience=ClassShare() if class_token else AttentionShare(),
        links=_links(Keys() if class_token else Tokens(), strength),
        budget=Fixed(r) if static else Threshold(r),
        weight=BySalience() if class_token else BySize(),
        combine=MeanNorm(),
        proportional_attention=True,
    )


def families(class_token: bool, static: bool = False) -> list[Recipe]:
    """The recipe families that the tuner tries, the most promising first."""
    first = protect(class_token=class_token, static=static)
    if class_token:
        return [first, replace(first, links=_links(Tokens(), STRENGTH)), replace(first, weight=BySize())]
    plain = replace(first, salience=Uniform(), links=_links(Tokens(), 0.0))
    return [first, plain, replace(plain, links=_links(Keys(), 0.0))]


def _links(metric: Tokens | Keys, strength: float) -> Bipartite:
    return Bipartite(Alternating(from_prefix=True), metric, Protect(strength))


def rates(cut: float, depth: int, reads_patches: bool = False, merge_every: int = 1) -> Rates:
    """The preset's rate at each layer for a cut: late merges for a small cut, earlier ones for a larger.

    Where the head reads no patches, the last layer merges all it can, which loses nothing; `reads_patches=True` gives
    it the rate of the others.  `merge_every=2` merges at every second layer only.
    """
    last = None if reads_patches else MERGE_ALL
    return at_every(linear_rates(depth, *first_layer_and_slope(cut, depth), last), merge_every)


def first_layer_and_slope(cut: float, depth: int) -> tuple[int, float]:
    """The layer where the preset begins to merge, and the slope of its rates from there."""
    first, slope = next((first, slope) for largest, first, slope in SPREADS if cut <= largest)
    return min(round(first * depth), depth - 1), slope
