"""DSM: delayed spatial merging (Heo et al., 2024)."""

from adamerge.core.budget import Fixed
from adamerge.core.combine import BySize
from adamerge.core.match import Alternating, Bipartite, Everywhere, Keys, SameWindow, SimilarityOnly
from adamerge.core.recipe import Recipe
from adamerge.core.salience import Uniform


def dsm(r: float, delay: int = 4, *, windows: bool = False, proportional_attention: bool = True) -> Recipe:
    """ToMe that merges nothing in the first `delay` blocks, then `r` tokens per block.

    From the paper: merging starts late, because attention has not converged in early blocks; merging within spatial
    windows first and globally later finds redundancy at several scales.  Our reading: the windows are the four quarters
    of the image, used in the first half of the blocks.  There is no public official code.

    Args:
        r: tokens merged at each layer after the delay; fractions carry over to later layers.
        delay: how many blocks at the start merge nothing.
        windows: merge only within quarters of the image in the first half of the blocks.
        proportional_attention: add the log of its size to the attention scores of a merged token.
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
