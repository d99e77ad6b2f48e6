"""Signed distances to shapes, negative inside; y points down.  All drawings are made from them."""

from __future__ import annotations

import math
from functools import reduce

import torch
from torch import Tensor

Number = float | Tensor


def circle(x: Tensor, y: Tensor, cx: Number, cy: Number, radius: Number) -> Tensor:
    """A circle around (cx, cy)."""
    dx, dy = x - cx, y - cy
    return dx.mul_(dx).add_(dy.mul_(dy)).sqrt_().sub_(radius)


def ellipse(x: Tensor, y: Tensor, cx: Number, cy: Number, width: float, height: float) -> Tensor:
    """An ellipse with half axes `width` and `height`; the distance is a first-order approximation, exact at 0."""
    px, py = (x - cx).div_(width), (y - cy).div_(height)
    level = (px * px).add_(py * py).sqrt_()
    px, py = px.div_(width), py.div_(height)
    slope = px.mul_(px).add_(py.mul_(py)).sqrt_().add_(1e-6)
    return (level - 1.0).mul_(level).div_(slope)


def box(x: Tensor, y: Tensor, cx: Number, cy: Number, width: Number, height: Number, corner: Number = 0.0) -> Tensor:
    """A box with half sides `width` and `height`, its corners rounded with radius `corner`."""
    dx = (x - cx).abs_().sub_(width - corner)
    dy = (y - cy).abs_().sub_(height - corner)
    inside = torch.maximum(dx, dy).clamp_(max=0.0)
    dx, dy = dx.clamp_(min=0.0), dy.clamp_(min=0.0)
    return dx.mul_(dx).add_(dy.mul_(dy)).sqrt_().add_(inside).sub_(corner)


def segment(x: Tensor, y: Tensor, ax: Number, ay: Number, bx: Number, by: Number, radius: Number) -> Tensor:
    """A line from a to b with round ends, `radius` to each side."""
    ux, uy = bx - ax, by - ay
    px, py = x - ax, y - ay
    along = (px * ux).add_(py * uy).div_(ux * ux + uy * uy).clamp_(0.0, 1.0)
    px.sub_(along * ux)
    py.sub_(along.mul_(uy))
    return px.mul_(px).add_(py.mul_(py)).sqrt_().sub_(radius)


def polygon(x: Tensor, y: Tensor, *corners: tuple[float, float]) -> Tensor:
    """A convex polygon, corners clockwise as seen on the screen."""
    edges = []
    for (ax, ay), (bx, by) in zip(corners, corners[1:] + corners[:1], strict=True):
        length = math.hypot(bx - ax, by - ay)
        nx, ny = (by - ay) / length, (ax - bx) / length
        edges.append((x * nx).add_(y * ny).sub_(ax * nx + ay * ny))
    return common(*edges)


def star(x: Tensor, y: Tensor, radius: float, depth: float) -> Tensor:
    """A five-pointed star around the origin; `depth` is its inner radius over its outer one."""
    # By symmetry every point is mirrored into one tenth of the star, where one edge is nearest.
    px, py = x.abs(), -y
    for nx, ny in ((0.80901699, -0.58778525), (-0.80901699, -0.58778525)):
        beyond = (px * nx).add_(py * ny).clamp_(min=0.0).mul_(2.0)
        px.sub_(beyond * nx)
        py.sub_(beyond.mul_(ny))
    px, py = px.abs_(), py.sub_(radius)
    ex, ey = depth * 0.58778525, depth * 0.80901699 - 1.0
    along = (px * ex).add_(py * ey).div_(ex * ex + ey * ey).clamp_(0.0, radius)
    outside = (py * ex).sub_(px * ey).sign_()
    px.sub_(along * ex)
    py.sub_(along.mul_(ey))
    return px.mul_(px).add_(py.mul_(py)).sqrt_().mul_(outside)


def ring(distance: Tensor, half_width: Number) -> Tensor:
    """The band of `half_width` to both sides of a shape's boundary."""
    return distance.abs().sub_(half_width)


def union(*distances: Tensor) -> Tensor:
    """The points inside any of the shapes."""
    return reduce(torch.minimum, distances)


def common(*distances: Tensor) -> Tensor:
    """The points inside all of the shapes."""
    return reduce(torch.maximum, distances)
