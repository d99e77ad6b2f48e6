"""The shape vocabulary: b images, n tokens, d channels, m tokens left after a merge, k channels compared."""

from jaxtyping import Bool, Float, Int
from torch import Tensor

Features = Float[Tensor, "b n d"]
PerToken = Float[Tensor, "b n"]
PerImage = Float[Tensor, "b"]
Slots = Int[Tensor, "b n"]
Mask = Bool[Tensor, "b n"]
Counts = Int[Tensor, "b"]
