"""Numbers that a budget has for each layer: its own, and calibrated ones."""

from adamerge.core.errors import BadOption, BadStats
from adamerge.core.stats import LayerStats


def wanted(r: float | tuple[float, ...], layer: int, name: str = "r") -> float:
    """The number of a layer: `r` itself, or its entry for the layer if `r` has one for each."""
    if not isinstance(r, tuple):
        return r
    if layer >= len(r):
        raise BadOption(
            f"{name} gives a number for each of {len(r)} layers but layer {layer} was asked for; "
            "was it tuned for another model? Give one number for each block of this one."
        )
    return r[layer]


def calibrated(stats: LayerStats | None, layer: int) -> LayerStats:
    """`stats`, checked: an error if there are none or they do not cover this layer."""
    if stats is None:
        raise BadStats(
            "this recipe adapts to calibrated statistics and has none; make them with "
            "`stats = adamerge.calibrate(model, images, recipe)` and pass stats=stats"
        )
    if layer >= stats.depth:
        raise BadStats(
            f"stats cover {stats.depth} layers but layer {layer} was asked for; "
            "were they calibrated on another model? Run `adamerge calibrate` on this one."
        )
    return stats


def check_length(name: str, r: float | tuple[float, ...], depth: int) -> None:
    """Refuse a number for each layer if there are more or fewer of them than blocks."""
    if isinstance(r, tuple) and len(r) != depth:
        raise BadOption(
            f"{name} gives {len(r)} numbers, one for each layer, and the model has {depth} blocks; "
            "was it tuned for another model? Give one number for each block of this one."
        )
