"""Objects whose variants are different classes that differ in one small detail."""

from __future__ import annotations

import math

import torch

from adamerge.embedded.distances import box, circle, common, ellipse, polygon, ring, segment, union
from adamerge.embedded.sketches import Layer, Sketch, only


def draw_clock(s: Sketch) -> list[Layer]:
    x, y = s.x, s.y
    case = circle(x, y, 0.0, 0.12, 0.76)
    bells = circle(x.abs(), y, 0.5, -0.62, 0.27)
    feet = segment(x.abs(), y, 0.4, 0.7, 0.6, 0.95, 0.08)
    ticks = union(
        segment(x.abs(), y, 0.5, 0.12, 0.54, 0.12, 0.035),
        segment(x, y, 0.0, 0.62, 0.0, 0.66, 0.035),
    )
    # The hour hand points to 1-5 or to 7-11, by class; the minute hand does not depend on the class.
    hour = (30.0 + 120.0 * s.variation[0] + 180.0 * s.variant) * (math.pi / 180.0)
    minute = s.variation[1] * (2.0 * math.pi)
    short = segment(x, y, 0.0, 0.12, 0.34 * hour.sin(), 0.12 - 0.34 * hour.cos(), 0.075)
    long = segment(x, y, 0.0, 0.12, 0.52 * minute.sin(), 0.12 - 0.52 * minute.cos(), 0.03)
    return [
        Layer(union(bells, feet), s.second, solid=True),
        Layer(case, s.main, solid=True),
        Layer(case + 0.14, s.light),
        Layer(union(ticks, short, long), s.dark),
        Layer(circle(x, y, 0.0, -0.38, 0.06), s.main),
    ]


def draw_flower(s: Sketch) -> list[Layer]:
    x, y = s.x, s.y
    cx, cy = 0.0, -0.3
    petals_wanted = 5.0 + 3.0 * s.variant
    turn = s.variation[0] * 0.8
    width = 0.235 - 0.06 * s.variant
    dx, dy = x - cx, y - cy
    petals = []
    for number in range(8):
        angle = (2.0 * math.pi * number) / petals_wanted + turn
        cos, sin = angle.cos(), angle.sin()
        along = (dx * cos + dy * sin - 0.38) / 0.29
        across = (dy * cos - dx * sin) / width
        petals.append(only(circle(along, across, 0.0, 0.0, 1.0) * width, petals_wanted > number))
    stem = segment(x, y, 0.0, 0.1, 0.1 * s.variation[1] - 0.05, 0.95, 0.055)
    leaf = ellipse(x - 0.6 * y, y, -0.2, 0.68, 0.26, 0.1)
    heart = circle(dx, dy, 0.0, 0.0, 0.2)
    return [
        Layer(union(stem, leaf), s.leaf, solid=True),
        Layer(union(*petals), s.main, solid=True),
        Layer(heart, s.second, solid=True),
        Layer(heart + 0.09, s.light),
    ]


def draw_fish(s: Sketch) -> list[Layer]:
    # Half of the fish are mirrored.
    x = torch.where(s.variation[0] < 0.5, s.x, -s.x)
    y = s.y
    body = ellipse(x, y, 0.12, 0.0, 0.78, 0.46)
    tail = common(polygon(x, y, (-0.95, -0.5), (-0.4, 0.0), (-0.95, 0.5)), -circle(x, y, -1.1, 0.0, 0.28))
    fins = union(
        polygon(x, y, (-0.2, -0.66), (0.25, -0.38), (-0.25, -0.3)),
        polygon(x, y, (-0.2, 0.62), (-0.2, 0.32), (0.2, 0.4)),
    )
    belly = common(body, ellipse(x, y, 0.1, 0.42, 0.8, 0.36))
    inner = body + 0.05
    stripes = union(*(box(x, y, cx, 0.0, 0.05, 1.0) for cx in (-0.32, -0.08, 0.16)))
    spots = union(circle(x, y, -0.34, -0.02, 0.085), circle(x, y, -0.1, -0.2, 0.085), circle(x, y, 0.14, -0.02, 0.085))
    pattern = union(only(stripes, s.variant == 1), only(spots, s.variant == 2))
    return [
        Layer(union(tail, fins), s.second, solid=True),
        Layer(body, s.main, solid=True),
        Layer(belly, torch.lerp(s.main, s.light, 0.45)),
        Layer(common(inner, pattern), s.dark),
        Layer(circle(x, y, 0.56, -0.12, 0.12), s.light),
        Layer(circle(x, y, 0.59, -0.12, 0.06), s.dark),
    ]


def draw_face(s: Sketch) -> list[Layer]:
    x, y = s.x, s.y
    eyes = ellipse(x.abs(), y, 0.3, -0.24, 0.1, 0.15)
    smile = common(ring(circle(x, y, 0.0, 0.1, 0.36), 0.06), 0.24 - y)
    frown = common(ring(circle(x, y, 0.0, 0.66, 0.36), 0.06), y - 0.52)
    gasp = ellipse(x, y, 0.0, 0.38, 0.17, 0.2)
    mouth = union(only(smile, s.variant == 0), only(frown, s.variant == 1), only(gasp, s.variant == 2))
    cheeks = circle(x.abs(), y, 0.56, 0.12, 0.14)
    return [
        Layer(circle(x, y, 0.0, 0.0, 0.92), s.main, solid=True),
        Layer(cheeks, torch.lerp(s.main, s.second, 0.5)),
        Layer(union(eyes, mouth), s.dark),
    ]


def draw_key(s: Sketch) -> list[Layer]:
    x, y = s.x, s.y
    bow = ring(circle(x, y, -0.58, 0.0, 0.28), 0.12)
    shaft = segment(x, y, -0.2, 0.0, 0.9, 0.0, 0.085)
    collar = box(x, y, -0.12, 0.0, 0.06, 0.17, 0.03)
    tooth = box(x, y, 0.78, 0.17, 0.075, 0.2, 0.02)
    other = only(box(x, y, 0.5, 0.17, 0.075, 0.2, 0.02), s.variant == 1)
    return [
        Layer(union(bow, shaft, tooth, other), s.main, solid=True),
        Layer(collar, s.second, solid=True),
    ]


def draw_die(s: Sketch) -> list[Layer]:
    x, y = s.x, s.y
    face = box(x, y, -0.08, 0.08, 0.74, 0.74, 0.16)
    side = box(x, y, 0.1, -0.1, 0.74, 0.74, 0.16)
    px, py = (x + 0.08).abs(), y - 0.08
    corners = circle(px, py.abs(), 0.4, 0.4, 0.125)
    centre = only(circle(px, py, 0.0, 0.0, 0.125), s.variant == 1)
    middles = only(circle(px, py, 0.4, 0.0, 0.125), s.variant == 2)
    return [
        Layer(side, torch.lerp(s.main, s.dark, 0.35), solid=True),
        Layer(face, s.main, solid=True),
        Layer(union(corners, centre, middles), s.light),
    ]
