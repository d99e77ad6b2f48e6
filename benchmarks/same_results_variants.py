"""The recipes that `same_results.py` records: every method, its options, the presets."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

import adamerge
from adamerge import LayerStats, Recipe

Make = Callable[["Subject"], Recipe]


@dataclass(frozen=True)
class Subject:
    """A model, images to run it on and to calibrate it on, and how it is run."""

    name: str
    model: nn.Module
    images: Tensor
    calibration: Tensor
    see: Callable[[Any, Tensor], Tensor] = lambda model, images: model(images)


def method(name: str, how: Mapping[str, Any] | None = None, **options: Any) -> Make:
    """A method with these options, calibrated so if it adapts."""
    return lambda subject: ready(getattr(adamerge.methods, name)(**options), subject, **(how or {}))


def preset(how: Mapping[str, Any] | None = None, **options: Any) -> Make:
    """The preset with these options, calibrated so if it adapts."""
    return lambda subject: ready(adamerge.presets.protect(**options), subject, **(how or {}))


def best(**options: Any) -> Make:
    """The preset at a wanted cost."""
    return lambda subject: adamerge.presets.best(subject.model, subject.calibration, **options)


def ready(recipe: Recipe, subject: Subject, **how: Any) -> Recipe:
    """The recipe with statistics, if it adapts and has none."""
    if recipe.stats is not None:
        return recipe
    try:
        recipe.with_stats(None)
    except adamerge.AdamergeError:
        return recipe
    return recipe.with_stats(adamerge.calibrate(subject.model, subject.calibration, recipe, progress=False, **how))


FLIPPED: dict[str, Any] = dict(
    alpha=2.0,
    temperature=0.7,
    affinity="cosine",
    split="alternating",
    direction="protecting",
    averaging="salience_size",
    proportional_attention=True,
)
SEQUENTIAL = {"how": "sequential"}

# For three blocks and sixteen patches.
TINY: dict[str, Make] = {
    "adamerge": method("adamerge", r_max=6.0),
    "tome": method("tome", r=3),
    "pitome": method("pitome", r=3),
    "dsm": method("dsm", r=4, delay=1),
    "tofu": method("tofu", r=3),
    "evit": method("evit", keep=0.6),
    "ats": method("ats", tokens=9),
    "dymu": method("dymu", r=3),
    "vid_tldr": method("vid_tldr", r=3),
    "random": method("random", r=3),
    "none": method("none"),
    "adamerge, flipped": method("adamerge", SEQUENTIAL, r_max=6.0, **FLIPPED),
    "adamerge, fixed": method("adamerge", r=2.5),
    "protect": preset(r=3.0),
    "protect without class token": preset(r=3.0, class_token=False),
    "best, static": best(cut=0.2, static=True),
}

DEPTH = 12
BY_HAND = LayerStats((0.005,) * DEPTH, (0.005,) * DEPTH)
LATE = (0.0,) * 4 + (6.5, 8.0, 0.0, 9.25, 10.0, 12.0, 4.0, 20.0)

# For the embedded model: twelve blocks and 196 patches.
METHODS: dict[str, Make] = {
    "adamerge": method("adamerge", r_max=14.0),
    "tome": method("tome", r=8),
    "pitome": method("pitome", r=8),
    "dsm": method("dsm", r=10),
    "tofu": method("tofu", r=8),
    "evit": method("evit", keep=0.7),
    "ats": method("ats", tokens=150),
    "dymu": method("dymu", r=8),
    "vid_tldr": method("vid_tldr", r=8),
    "random": method("random", r=8),
    "none": method("none"),
}
ADAMERGE: dict[str, Make] = {
    "adamerge, cosine": method("adamerge", r_max=14.0, affinity="cosine"),
    "adamerge, scaled": method("adamerge", r_max=14.0, affinity="scaled"),
    "adamerge, protecting": method("adamerge", r_max=14.0, direction="protecting"),
    "adamerge, no direction": method("adamerge", r_max=14.0, direction="off"),
    "adamerge, alternating": method("adamerge", r_max=14.0, split="alternating"),
    "adamerge, by size": method("adamerge", r_max=14.0, averaging="size"),
    "adamerge, by salience and size": method("adamerge", r_max=14.0, averaging="salience_size"),
    "adamerge, proportional": method("adamerge", r_max=14.0, proportional_attention=True),
    "adamerge, sharp": method("adamerge", r_max=14.0, alpha=2.0, temperature=0.5),
    "adamerge, flipped": method("adamerge", r_max=14.0, **FLIPPED),
    "adamerge, strong": method("adamerge", r_max=23.0),
    "adamerge, one pass": method("adamerge", {"passes": 1}, r_max=14.0),
    "adamerge, three passes": method("adamerge", {"passes": 3}, r_max=14.0),
    "adamerge, sequential": method("adamerge", SEQUENTIAL, r_max=14.0),
    "adamerge, by layer": method("adamerge", r_max=LATE),
    "adamerge, by layer, sequential": method("adamerge", SEQUENTIAL, r_max=LATE),
    "adamerge, too few layers": method("adamerge", r_max=LATE[:5]),
    "adamerge, by hand": method("adamerge", r_max=14.0, stats=BY_HAND),
    "adamerge, nothing": method("adamerge", r_max=0.0),
    "adamerge, fixed": method("adamerge", r=8),
    "adamerge, fixed fraction": method("adamerge", r=7.4),
}
OTHERS: dict[str, Make] = {
    "tome, fraction": method("tome", r=2.5),
    "tome, by layer": method("tome", r=(1.5, 2.0, 9.25, 10.0, 3.75, 8.0, 12.0, 7.5, 6.0, 5.0, 4.0, 3.0)),
    "tome, late": method("tome", r=LATE),
    "tome, too few layers": method("tome", r=LATE[:5]),
    "tome, plain attention": method("tome", r=8, proportional_attention=False),
    "tome, nothing": method("tome", r=0),
    "tome, everything": method("tome", r=98),
    "pitome, share": method("pitome", ratio=0.95),
    "pitome, as its code": method("pitome", r=8, margin=0.75, proportional_attention=False),
    "dsm, windows": method("dsm", r=8, delay=1, windows=True),
    "tofu, early": method("tofu", r=8, until=0.25),
    "evit, proportional": method("evit", keep=0.7, proportional_attention=True),
    "ats, from the first": method("ats", tokens=180, first=0.0, proportional_attention=True),
    "dymu, by layer": method("dymu", r=LATE),
    "vid_tldr, plain attention": method("vid_tldr", r=8, proportional_attention=False),
    "random, other seed": method("random", r=8, seed=3),
}
PRESETS: dict[str, Make] = {
    "protect": preset(r=8.0),
    "protect, static": preset(r=8.0, static=True),
    "protect, late": preset(r=LATE),
    "protect, late, static": preset(r=LATE, static=True),
    "protect, by distance": preset(r=8.0, strength=0.0),
    "protect without class token": preset(r=8.0, class_token=False),
    "protect without class token, static": preset(r=8.0, class_token=False, static=True),
    "best": best(cut=0.3),
    "best, static": best(cut=0.3, static=True),
    "best, in the paper's count": best(cut=0.2, cost="paper"),
    "best, much": best(cut=0.5, loss="features"),
    "best, no saving": best(cut=0.0),
}
