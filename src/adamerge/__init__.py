"""Token merging for pretrained Vision Transformers: faster without training, in one call, undoable."""

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adamerge import flops, methods, presets
    from adamerge.calibration import calibrate
    from adamerge.core.errors import AdamergeError
    from adamerge.core.recipe import Recipe
    from adamerge.core.stats import LayerStats
    from adamerge.evaluation import evaluate
    from adamerge.exporting.api import export
    from adamerge.finetuning.trainer import finetune
    from adamerge.patching.apply import applied, apply, remove, trace
    from adamerge.patching.cuda_graphs import capture, warmup
    from adamerge.patching.dense import unmerge
    from adamerge.patching.explain import explain
    from adamerge.prediction.api import embed, predict
    from adamerge.recipe_files import load_recipe, save_recipe
    from adamerge.repairing.repairer import repair
    from adamerge.search.tuner import tune

__version__ = "0.1.0"

__all__ = [
    "AdamergeError",
    "LayerStats",
    "Recipe",
    "applied",
    "apply",
    "calibrate",
    "capture",
    "embed",
    "evaluate",
    "explain",
    "export",
    "finetune",
    "flops",
    "load_recipe",
    "methods",
    "predict",
    "presets",
    "remove",
    "repair",
    "save_recipe",
    "trace",
    "tune",
    "unmerge",
    "warmup",
]

# Name -> the module of it.  They are imported when first used, so that the command line shows its help without torch.
_MODULES = {
    "AdamergeError": "core.errors",
    "LayerStats": "core.stats",
    "Recipe": "core.recipe",
    "applied": "patching.apply",
    "apply": "patching.apply",
    "calibrate": "calibration",
    "capture": "patching.cuda_graphs",
    "embed": "prediction.api",
    "evaluate": "evaluation",
    "explain": "patching.explain",
    "export": "exporting.api",
    "finetune": "finetuning.trainer",
    "load_recipe": "recipe_files",
    "predict": "prediction.api",
    "remove": "patching.apply",
    "repair": "repairing.repairer",
    "save_recipe": "recipe_files",
    "trace": "patching.apply",
    "tune": "search.tuner",
    "unmerge": "patching.dense",
    "warmup": "patching.cuda_graphs",
}

# What long calls tell about their progress goes to the logger "adamerge"; `logging.basicConfig(level="INFO")` shows it.
logging.getLogger(__name__).addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    """A public name, or a module of the package, at its first use."""
    if name in _MODULES:
        # Some methods have parts of their own, which a recipe in a file may name.
        import_module(f"{__name__}.methods")
        value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    elif name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    else:
        try:
            value = import_module(f"{__name__}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":
                raise
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
