"""One paper = one file = one function that returns a Recipe; `METHODS` lists them by name."""

from adamerge.methods.adamerge import adamerge
from adamerge.methods.ats import ats
from adamerge.methods.dsm import dsm
from adamerge.methods.dymu import dymu
from adamerge.methods.evit import evit
from adamerge.methods.none import none
from adamerge.methods.pitome import pitome
from adamerge.methods.random import random
from adamerge.methods.registry import Method
from adamerge.methods.tofu import tofu
from adamerge.methods.tome import tome
from adamerge.methods.vid_tldr import vid_tldr

METHODS: dict[str, Method] = {
    "adamerge": Method(adamerge, "r_max", 0, 98),
    "tome": Method(tome, "r", 0, 98),
    "pitome": Method(pitome, "r", 0, 98),
    "dsm": Method(dsm, "r", 0, 98),
    "tofu": Method(tofu, "r", 0, 98),
    "evit": Method(evit, "keep", 1, 0.01),
    "ats": Method(ats, "tokens", 9800, 1),
    "dymu": Method(dymu, "r", 0, 98),
    "vid_tldr": Method(vid_tldr, "r", 0, 98),
    "random": Method(random, "r", 0, 98),
    "none": Method(none),
}

__all__ = [
    "METHODS",
    "Method",
    "adamerge",
    "ats",
    "dsm",
    "dymu",
    "evit",
    "none",
    "pitome",
    "random",
    "tofu",
    "tome",
    "vid_tldr",
]
