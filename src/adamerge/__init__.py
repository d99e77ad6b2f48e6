"""Token merging for pretrained Vision Transformers: faster without training, in one call, undoable."""

from adamerge import flops, methods, presets
from adamerge.calibrate import calibrate
from adamerge.core.errors import AdamergeError
from adamerge.core.recipe import Recipe
from adamerge.core.stats import LayerStats
from adamerge.models.dense import unmerge
from adamerge.models.graphs import capture
from adamerge.models.surgery import apply, remove, trace
from adamerge.saving import load_recipe, save_recipe
from adamerge.tune import tune

__version__ = "0.1.0"

__all__ = [
    "AdamergeError",
    "LayerStats",
    "Recipe",
    "apply",
    "calibrate",
    "capture",
    "flops",
    "load_recipe",
    "methods",
    "presets",
    "remove",
    "save_recipe",
    "trace",
    "tune",
    "unmerge",
]
