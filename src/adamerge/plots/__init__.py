"""Figures: merged tokens and salience of single images, galleries, and plots of results."""

from adamerge.plots.cost_plot import tradeoff
from adamerge.plots.figures import frontier, gallery, layers
from adamerge.plots.method_columns import MethodColumn, side_by_side
from adamerge.plots.one_image import heat, mosaic, slots_entering, survivors

__all__ = [
    "MethodColumn",
    "frontier",
    "gallery",
    "heat",
    "layers",
    "mosaic",
    "side_by_side",
    "slots_entering",
    "survivors",
    "tradeoff",
]
