"""Pictures of what merging does: mosaics and heat maps of single images, galleries, and figures of results."""

from adamerge.show.figures import frontier, gallery, layers
from adamerge.show.mosaic import heat, mosaic, slots_entering

__all__ = ["frontier", "gallery", "heat", "layers", "mosaic", "slots_entering"]
