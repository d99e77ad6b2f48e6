"""The models of the page, with the names of their classes."""

from torch import nn

from adamerge.embedded import CLASSES, load
from adamerge.explore.explorer import ExploredModel, check_explorable
from adamerge.explore.ladders import Ladder, embedded_ladders

IMAGENET_CLASSES = 1000


def embedded_model() -> ExploredModel:
    """The built-in model, with recipes that need no calibration."""
    ladders: dict[str, Ladder] = dict(embedded_ladders())
    return ExploredModel(load(), CLASSES, ladders)


def other_model(model: nn.Module) -> ExploredModel:
    """Another classifier; each method is calibrated on drawn images when somebody first looks at it."""
    check_explorable(model)
    return ExploredModel(model, _imagenet_names() if getattr(model, "num_classes", 0) == IMAGENET_CLASSES else ())


def _imagenet_names() -> list[str]:
    """The names of ImageNet's classes, as timm has them."""
    from timm.data import ImageNetInfo  # pyright: ignore[reportPrivateImportUsage]

    info = ImageNetInfo("imagenet-1k")
    return [info.index_to_description(index) for index in range(IMAGENET_CLASSES)]
