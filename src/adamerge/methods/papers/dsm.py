"""DSM: delayed spatial merging (Heo et al., 2024)."""

from adamerge.core.budget import Fixed
from adamerge.core.combine import BySize
from adamerge.core.match import Alternating, Bipartite, Everywhere, Keys, SameWindow, SimilarityOnly
from adamerge.core.recipe import Recipe
from adamerge.core.salience import Uniform


def dsm(r: float, delay: int = 4, *, windows: bool = False, proportional_attention: bool = True) -> Recipe:
    """ToMe with the first `delay` blocks left whole, then `r` merges a block.

    From the paper: merging starts late, because early attention has not converged; and merging first inside spatial
    windows, then globally, catches redundancy at several scales.  Our reading: windows are the four quarters of the
    image and hold for the first half of the blocks.  No official code is public.

    Args:
        r: tokens merged at each layer after the delay; a fraction is spread over the layers.
        delay: how many blocks run on all tokens.
        windows: merge only inside quarters of the image in the first half of the blocks.
        proportional_attention: count a merged token as often as the patches it stands for.
    """
    reach = SameWindow() if windows else Everywhere()
    return Recipe(
        site="after_attention",
        salience=Uniform(),
        links=Bipartite(Alternating(from_prefix=True), Keys(), SimilarityOnly(), reach),
        budget=Fixed(r, delay),
        weight=BySize(),
        order="sources_first",
        proportional_attention=proportional_attention,
    )
