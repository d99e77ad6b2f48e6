"""What a recipe decided at one layer."""

from dataclasses import dataclass

from adamerge.core.match import Links
from adamerge.core.plan import Plan
from adamerge.core.types import Mask, PerToken


@dataclass(frozen=True)
class Decision:
    """A plan, the weight of each token in the average, and the salience and links that led to it."""

    plan: Plan
    weight: PerToken
    salience: PerToken
    links: Links

    @property
    def kept(self) -> Mask:
        """True for tokens that were not merged into another: alone in their slot, or the destination of others."""
        slot = self.plan.slot
        return ~(self.links.source & (slot == slot.gather(1, self.links.partner)))
