"""Names for tensor shapes: b images, n patch tokens, t tokens with the prefix, d channels, m tokens after a merge."""

from jaxtyping import Bool, Float, Int
from torch import Tensor

Features = Float[Tensor, "b n d"]
AllTokens = Float[Tensor, "b t d"]
PerToken = Float[Tensor, "b n"]
PerImage = Float[Tensor, " b"]
Slots = Int[Tensor, "b n"]
Mask = Bool[Tensor, "b n"]
Counts = Int[Tensor, " b"]
