"""Figures: merged tokens and salience of single images, galleries, and plots of results."""

from adamerge.plots.figures import frontier, gallery, layers
from adamerge.plots.one_image import heat, mosaic, slots_entering

__all__ = ["frontier", "gallery", "heat", "layers", "mosaic", "slots_entering"]
