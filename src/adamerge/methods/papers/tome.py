"""ToMe: token merging (Bolya et al., ICLR 2023)."""

from adamerge.core.budget import Fixed
from adamerge.core.combine import BySize
from adamerge.core.match import Alternating, Bipartite, Keys, SimilarityOnly
from adamerge.core.recipe import Recipe
from adamerge.core.salience import Uniform


def tome(r: float, *, proportional_attention: bool = True) -> Recipe:
    """Merge the `r` most similar pairs between attention and MLP of each block, the same number in every image.

    From the paper: cosine similarity of keys averaged over heads; even tokens merge into odd ones, and the class token
    counts as token 0; averages weighted by size; proportional attention.  The original code does the same; it turns
    proportional attention off for MAE models only.

    Args:
        r: tokens merged at each layer; fractions carry over to later layers.
        proportional_attention: add the log of its size to the attention scores of a merged token.
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
