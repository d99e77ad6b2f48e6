"""vid-TLDR: merging guided by the sharpness of attention (Choi et al., CVPR 2024)."""

from adamerge.core.budget import Fixed
from adamerge.core.combine import BySalienceAndSize
from adamerge.core.match import Alternating, Bipartite, SimilarityOnly, Tokens
from adamerge.core.recipe import Recipe
from adamerge.core.salience import Sharpness


def vid_tldr(r: float, *, proportional_attention: bool = True) -> Recipe:
    """Merge similar tokens, averaged in proportion to how sharply they attend; background counts for nothing.

    From the paper: saliency is the negative entropy of a token's attention, scaled to [0, 1], with everything below
    the mean taken as background; merging weighs tokens by it.  Our reading: pairs are ToMe's even and odd tokens
    compared by their features, and every layer merges `r`.  The original merges in the first few layers of video
    models and drops background tokens there outright.  It needs the whole attention matrix, so that fused attention
    has to be paid for twice.

    Args:
        r: tokens merged at each layer; a fraction is spread over the layers.
        proportional_attention: count a merged token as often as the patches it stands for.
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
