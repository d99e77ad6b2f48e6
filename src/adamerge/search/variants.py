"""Variants: methods by label, with the options that stay fixed while the knob is solved for a cost."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from adamerge.calibration import How
from adamerge.core.errors import BadOption


@dataclass(frozen=True)
class Variant:
    """A method by name, its options besides the knob, and how it is calibrated (`how` of `calibrate`)."""

    method: str
    options: Mapping[str, Any] = field(default_factory=dict)
    how: How | None = None


_UNWEIGHTED = {"proportional_attention": False}
_EXCHANGED = {"split": "alternating", "averaging": "size", "proportional_attention": True}
# Compared by default: every method, and the choices that its paper or code leaves open.
VARIANTS: dict[str, Variant] = {
    "adamerge": Variant("adamerge"),
    "adamerge (sequential calibration)": Variant("adamerge", how="sequential"),
    "adamerge (cosine)": Variant("adamerge", {"affinity": "cosine"}),
    "adamerge (cosine, exchanged)": Variant("adamerge", {"affinity": "cosine", **_EXCHANGED}),
    "adamerge (protecting, exchanged)": Variant("adamerge", {"direction": "protecting", **_EXCHANGED}),
    "tome": Variant("tome"),
    "tome (no proportional attention)": Variant("tome", _UNWEIGHTED),
    "pitome": Variant("pitome"),
    "pitome (no proportional attention)": Variant("pitome", _UNWEIGHTED),
    "dsm": Variant("dsm", {"delay": 4}),
    "dsm (windows)": Variant("dsm", {"delay": 4, "windows": True}),
    "tofu": Variant("tofu"),
    "evit": Variant("evit"),
    "ats": Variant("ats"),
    "dymu": Variant("dymu"),
    "vid_tldr": Variant("vid_tldr"),
    "random": Variant("random"),
}

# The name that stands for `adamerge.presets.best` where methods are named.  It has no knob: its rates are scaled.
PRESET = "preset"
PRESETS: dict[str, Variant] = {PRESET: Variant(PRESET), "preset (static)": Variant(PRESET, {"static": True})}


def find_variant(label: str) -> Variant:
    """The variant or the preset of that label."""
    known = {**VARIANTS, **PRESETS}
    if label not in known:
        raise BadOption(f"there is no variant {label!r}; choose from {', '.join(known)}")
    return known[label]
