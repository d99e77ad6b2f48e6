"""The merging methods: each is a function that returns a Recipe, and `METHODS` lists them by name."""

from adamerge.methods.papers.adamerge import adamerge
from adamerge.methods.papers.ats import ats
from adamerge.methods.papers.dsm import dsm
from adamerge.methods.papers.dymu import dymu
from adamerge.methods.papers.evit import evit
from adamerge.methods.papers.none import none
from adamerge.methods.papers.pitome import pitome
from adamerge.methods.papers.random import random
from adamerge.methods.papers.tofu import tofu
from adamerge.methods.papers.tome import tome
from adamerge.methods.papers.vid_tldr import vid_tldr
from adamerge.methods.registry import Method

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
