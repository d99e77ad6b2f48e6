"""Token merging for pretrained Vision Transformers: faster without training, in one call, undoable."""

from adamerge import flops, methods, presets
from adamerge.calibration import calibrate
from adamerge.core.errors import AdamergeError
from adamerge.core.recipe import Recipe
from adamerge.core.stats import LayerStats
from adamerge.patching.apply import apply, remove, trace
from adamerge.patching.cuda_graphs import capture, warmup
from adamerge.patching.dense import unmerge
from adamerge.patching.explain import explain
from adamerge.recipe_files import load_recipe, save_recipe
from adamerge.search.tuner import tune

__version__ = "0.1.0"

__all__ = [
    "AdamergeError",
    "LayerStats",
    "Recipe",
    "apply",
    "calibrate",
    "capture",
    "explain",
    "flops",
    "load_recipe",
    "methods",
    "presets",
    "remove",
    "save_recipe",
    "trace",
    "tune",
    "unmerge",
    "warmup",
]
