"""ToMe: token merging (Bolya et al., ICLR 2023)."""

from adamerge.core.budget import Fixed
from adamerge.core.combine import BySize
from adamerge.core.match import Alternating, Bipartite, Keys, SimilarityOnly
from adamerge.core.recipe import Recipe
from adamerge.core.salience import Uniform


def tome(r: float, *, proportional_attention: bool = True) -> Recipe:
    """Merge the `r` most similar pairs between attention and MLP of each block, the same number in every image.

    From the paper: keys averaged over heads, cosine, even tokens into odd ones with the class token counted in,
    averaging by size, proportional attention.  The original code is the same; it switches proportional attention off
    for MAE models only.

    Args:
        r: tokens merged at each layer; a fraction is spread over the layers.
        proportional_attention: count a merged token as often as the patches it stands for.
    """
    return Recipe(
        site="after_attention",
        salience=Uniform(),
        links=Bipartite(Alternating(from_prefix=True), Keys(), SimilarityOnly()),
        budget=Fixed(r),
        weight=BySize(),
        order="sources_first",
        proportional_attention=proportional_attention,
    )
