"""The result of `Recipe.decide`: what one layer merges, and how."""

from dataclasses import dataclass

from adamerge.core.match import Links
from adamerge.core.plan import Plan
from adamerge.core.types import Mask, PerToken


@dataclass(frozen=True)
class Decision:
    """A plan, the weight of each token in the average of its slot, and the salience and links it was made from."""

    plan: Plan
    weight: PerToken
    salience: PerToken
    links: Links

    @property
    def kept(self) -> Mask:
        """True for tokens that are not merged into another one: those alone in their slot, and destinations."""
        slot = self.plan.slot
        return ~(self.links.source & (slot == slot.gather(1, self.links.partner)))
