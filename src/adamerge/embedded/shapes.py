"""The objects of the embedded data set, drawn from signed distances in a frame from -1 to 1, and its classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from adamerge.embedded.distances import box, circle, common, ellipse, polygon, ring, segment, star, union
from adamerge.embedded.lookalikes import draw_clock, draw_die, draw_face, draw_fish, draw_flower, draw_key
from adamerge.embedded.sketches import Layer, Sketch


@dataclass(frozen=True)
class Family:
    """An object: the class names of its variants, and the function that draws it."""

    variants: tuple[str, ...]
    draw: Callable[[Sketch], list[Layer]]


def _draw_house(s: Sketch) -> list[Layer]:
    x, y = s.x, s.y
    walls = box(x, y, 0.0, 0.4, 0.64, 0.5, 0.02)
    roof = polygon(x, y, (-0.9, 0.0), (0.0, -0.85), (0.9, 0.0))
    chimney = box(x, y, 0.45, -0.55, 0.11, 0.3)
    pane = box(x, y, 0.3, 0.38, 0.19, 0.19, 0.02)
    return [
        Layer(chimney, torch.lerp(s.second, s.dark, 0.4), solid=True),
        Layer(walls, torch.lerp(s.main, s.light, 0.35), solid=True),
        Layer(roof, s.second, solid=True),
        Layer(box(x, y, -0.25, 0.58, 0.17, 0.32, 0.03), s.dark),
        Layer(pane, s.light),
        Layer(common(pane, union((x - 0.3).abs(), (y - 0.38).abs()) - 0.03), s.dark),
    ]


def _draw_tree(s: Sketch) -> list[Layer]:
    x, y = s.x, s.y
    trunk = polygon(x, y, (-0.1, 0.1), (0.1, 0.1), (0.17, 0.95), (-0.17, 0.95))
    crown = union(
        circle(x, y, 0.0, -0.5, 0.42),
        circle(x, y, -0.4, -0.12, 0.38),
        circle(x, y, 0.4, -0.12, 0.38),
        circle(x, y, 0.0, -0.05, 0.38),
    )
    glints = union(circle(x, y, -0.14, -0.6, 0.13), circle(x, y, -0.45, -0.2, 0.12), circle(x, y, 0.3, -0.25, 0.12))
    leaves = torch.lerp(s.main, s.leaf, 0.8)
    return [
        Layer(trunk, s.wood, solid=True),
        Layer(crown, leaves, solid=True),
        Layer(glints, torch.lerp(leaves, s.light, 0.3)),
    ]


def _draw_star(s: Sketch) -> list[Layer]:
    outer = star(s.x, s.y - 0.06, 1.0, 0.45)
    return [
        Layer(outer, s.main, solid=True),
        Layer(outer + 0.12, torch.lerp(s.main, s.light, 0.4)),
    ]


def _draw_car(s: Sketch) -> list[Layer]:
    x = torch.where(s.variation[0] < 0.5, s.x, -s.x)
    y = s.y
    cabin = polygon(x, y, (-0.58, 0.05), (-0.36, -0.42), (0.24, -0.42), (0.54, 0.05))
    glass = cabin + 0.09
    wheel = circle(x.abs(), y, 0.52, 0.42, 0.24)
    return [
        Layer(cabin, s.main, solid=True),
        Layer(common(glass, 0.04 - (x + 0.06).abs()), s.light),
        Layer(box(x, y, 0.0, 0.2, 0.95, 0.24, 0.14), s.main, solid=True),
        Layer(box(x, y, 0.0, 0.22, 0.95, 0.035), torch.lerp(s.main, s.dark, 0.45)),
        Layer(circle(x, y, 0.84, 0.12, 0.08), s.light),
        Layer(wheel, s.dark, solid=True),
        Layer(wheel + 0.13, s.light),
    ]


def _draw_sailboat(s: Sketch) -> list[Layer]:
    x = torch.where(s.variation[0] < 0.5, s.x, -s.x)
    y = s.y
    return [
        Layer(segment(x, y, 0.0, -0.9, 0.0, 0.5, 0.04), s.dark, solid=True),
        Layer(polygon(x, y, (0.08, -0.8), (0.78, 0.38), (0.08, 0.38)), s.light, solid=True),
        Layer(polygon(x, y, (-0.08, -0.6), (-0.08, 0.38), (-0.62, 0.38)), s.second, solid=True),
        Layer(polygon(x, y, (-0.95, 0.48), (0.95, 0.48), (0.6, 0.9), (-0.65, 0.9)), s.main, solid=True),
        Layer(box(x, y, 0.0, 0.58, 0.76, 0.035), s.light),
    ]


def _draw_mug(s: Sketch) -> list[Layer]:
    x = torch.where(s.variation[0] < 0.5, s.x, -s.x)
    y = s.y
    handle = ring(ellipse(x, y, 0.42, 0.12, 0.38, 0.36), 0.085)
    cup = box(x, y, -0.15, 0.15, 0.58, 0.7, 0.14)
    return [
        Layer(handle, s.main, solid=True),
        Layer(cup, s.main, solid=True),
        Layer(common(cup, (y - 0.28).abs() - 0.13), s.second),
        Layer(ellipse(x, y, -0.15, -0.5, 0.58, 0.17), torch.lerp(s.main, s.light, 0.55), solid=True),
        Layer(ellipse(x, y, -0.15, -0.48, 0.48, 0.1), s.dark),
    ]


def _draw_mushroom(s: Sketch) -> list[Layer]:
    x, y = s.x, s.y
    cap = common(ellipse(x, y, 0.0, 0.05, 0.92, 0.9), y - 0.08)
    spots = union(
        circle(x, y, -0.05, -0.52, 0.15),
        circle(x, y, 0.45, -0.25, 0.13),
        circle(x, y, -0.5, -0.22, 0.14),
        circle(x, y, 0.0, -0.13, 0.11),
    )
    stalk = torch.lerp(s.light, s.second, 0.2)
    return [
        Layer(polygon(x, y, (-0.24, 0.0), (0.24, 0.0), (0.34, 0.9), (-0.34, 0.9)), stalk, solid=True),
        Layer(cap, s.main, solid=True),
        Layer(spots, s.light),
    ]


def _draw_umbrella(s: Sketch) -> list[Layer]:
    x, y = s.x, s.y
    scallops = circle(((x + 0.9) / 0.6).frac().sub_(0.5).mul_(0.6), y, 0.0, 0.16, 0.33)
    canopy = common(circle(x, y, 0.0, 0.02, 0.92), y - 0.02, -scallops)
    middle = common(canopy, ellipse(x, y, 0.0, 0.02, 0.32, 0.95))
    hook = common(ring(circle(x, y, 0.17, 0.72, 0.17), 0.055), 0.72 - y)
    stick = union(segment(x, y, 0.0, -0.98, 0.0, 0.72, 0.05), hook)
    return [
        Layer(stick, s.dark, solid=True),
        Layer(canopy, s.main, solid=True),
        Layer(middle, s.second),
    ]


def _draw_cat(s: Sketch) -> list[Layer]:
    x, y = s.x, s.y
    side = x.abs()
    ears = polygon(side, y, (0.12, -0.45), (0.72, -0.95), (0.78, 0.0))
    inner = polygon(side, y, (0.34, -0.48), (0.64, -0.74), (0.68, -0.25))
    whiskers = union(segment(side, y, 0.32, 0.28, 0.98, 0.16, 0.022), segment(side, y, 0.32, 0.36, 0.98, 0.44, 0.022))
    mouth = common(ring(circle(side, y, 0.12, 0.36, 0.12), 0.028), 0.36 - y)
    return [
        Layer(ears, s.main, solid=True),
        Layer(inner, s.second),
        Layer(ellipse(x, y, 0.0, 0.15, 0.85, 0.74), s.main, solid=True),
        Layer(ellipse(side, y, 0.36, -0.02, 0.15, 0.18), s.light),
        Layer(union(ellipse(side, y, 0.36, -0.02, 0.06, 0.16), whiskers, mouth), s.dark),
        Layer(polygon(x, y, (-0.12, 0.2), (0.12, 0.2), (0.0, 0.33)), s.second),
    ]


FAMILIES: tuple[Family, ...] = (
    Family(("clock before six", "clock after six"), draw_clock),
    Family(("flower with five petals", "flower with eight petals"), draw_flower),
    Family(("plain fish", "striped fish", "spotted fish"), draw_fish),
    Family(("smiling face", "frowning face", "surprised face"), draw_face),
    Family(("key with one tooth", "key with two teeth"), draw_key),
    Family(("die showing four", "die showing five", "die showing six"), draw_die),
    Family(("house",), _draw_house),
    Family(("tree",), _draw_tree),
    Family(("star",), _draw_star),
    Family(("car",), _draw_car),
    Family(("sailboat",), _draw_sailboat),
    Family(("mug",), _draw_mug),
    Family(("mushroom",), _draw_mushroom),
    Family(("umbrella",), _draw_umbrella),
    Family(("cat",), _draw_cat),
)

CLASSES: tuple[str, ...] = tuple(name for family in FAMILIES for name in family.variants)
