"""vid-TLDR: merging guided by the sharpness of attention (Choi et al., CVPR 2024)."""

from adamerge.core.budget import Fixed
from adamerge.core.combine import BySalienceAndSize
from adamerge.core.match import Alternating, Bipartite, SimilarityOnly, Tokens
from adamerge.core.recipe import Recipe
from adamerge.core.salience import Sharpness


def vid_tldr(r: float, *, proportional_attention: bool = True) -> Recipe:
    """Merge similar tokens, weighted by how sharply they attend; background tokens get weight 0.

    From the paper: saliency is the negative entropy of a token's attention, scaled to [0, 1]; values below the mean are
    background; merging weights tokens by it.  Our reading: even tokens merge into odd ones as in ToMe, compared by
    their features, and every layer merges `r`.  The original merges in the first few layers of video models and drops
    background tokens there.  The method needs the full attention matrix, so that scores are computed a second time when
    attention is fused.

    Args:
        r: tokens merged at each layer; fractions carry over to later layers.
        proportional_attention: add the log of its size to the attention scores of a merged token.
    """
    return Recipe(
        site="after_attention",
        salience=Sharpness(),
        links=Bipartite(Alternating(from_prefix=True), Tokens(), SimilarityOnly()),
        budget=Fixed(r),
        weight=BySalienceAndSize(),
        order="sources_first",
        proportional_attention=proportional_attention,
    )
