"""Backgrounds from plain to cluttered, fragments behind the object, occluders in front of it, and noise."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from adamerge.embedded.distances import box
from adamerge.embedded.draws import Draws, mix

FRAGMENTS = 12
OCCLUDERS = 3


def mix_colour(hue: Tensor, saturation: Tensor, value: Tensor) -> Tensor:
    """RGB of shape (n, 3, 1, 1) from hue, saturation and value in [0, 1], each (n, 1, 1)."""
    channels = []
    for offset in (5.0, 3.0, 1.0):
        phase = (hue * 6.0 + offset) % 6.0
        channels.append(value * (1.0 - saturation * torch.minimum(phase, 4.0 - phase).clamp(0.0, 1.0)))
    return torch.stack(channels, dim=1)


def cover(distance: Tensor, per_pixel: Tensor | float) -> Tensor:
    """The share of each pixel that the shape covers, (n, 1, height, width); `per_pixel` is pixels per unit."""
    return (distance * -per_pixel).add_(0.5).clamp_(0.0, 1.0).unsqueeze(1)


def paint_backdrop(x: Tensor, y: Tensor, draws: Draws, clutter: Tensor) -> Tensor:
    """Backgrounds (n, 3, height, width); `x` and `y` run from -1 to 1, `clutter` (n, 1, 1) is 0 for plain ones."""
    size = x.shape[-1]
    hue, saturation, value, shift, fade, turn = draws.scalars("backdrop", 6)
    near = mix_colour(hue, 0.12 + 0.5 * saturation, 0.45 + 0.5 * value)
    far = mix_colour(hue + 0.22 * (shift - 0.5), 0.1 + 0.4 * saturation, (0.45 + 0.5 * value) * (0.65 + 0.35 * fade))
    angle = turn * (2.0 * math.pi)
    across = (x * angle.cos() + y * angle.sin()).mul_(0.4).add_(0.5).clamp_(0.0, 1.0).unsqueeze(1)
    image = torch.lerp(near, far, across)

    fields = _value_noise(draws, size)
    texture_hue, texture_value, blob_level, blobs_on, stripes_on, stripe_turn, stripe_rate, stripe_width = (
        draws.scalars("texture", 8)
    )
    grain = (fields[:, :1] - 0.5).mul_((0.9 * clutter).unsqueeze(1))
    image = image.add_(grain)

    strength = clutter * (0.35 + 0.5 * texture_value)
    blob_colour = mix_colour(hue + 0.5 * (texture_hue - 0.5), 0.15 + 0.5 * texture_value, 0.35 + 0.6 * texture_hue)
    blobs = (fields[:, 1:] - (0.5 + 0.12 * blob_level).unsqueeze(1)).mul_(18.0).clamp_(0.0, 1.0)
    image = torch.lerp(image, blob_colour, blobs.mul_((strength * (blobs_on < 0.7)).unsqueeze(1)))

    angle = stripe_turn * math.pi
    rate = 2.0 + 7.0 * stripe_rate
    wave = (x * (angle.cos() * rate) + y * (angle.sin() * rate)).frac_().abs_().sub_(0.5).abs_()
    stripes = (wave - (0.15 + 0.2 * stripe_width)).mul_(size * 0.5 / rate).clamp_(0.0, 1.0).unsqueeze(1)
    tint = mix_colour(hue + 0.3 + 0.4 * stripe_width, 0.2 + 0.4 * stripe_rate, 0.3 + 0.65 * stripe_turn)
    image = torch.lerp(image, tint, stripes.mul_((0.6 * strength * (stripes_on < 0.5)).unsqueeze(1)))
    return image.clamp_(0.0, 1.0)


def scatter_fragments(image: Tensor, x: Tensor, y: Tensor, draws: Draws, amount: Tensor) -> Tensor:
    """Draw random fragments on the background; `amount` (n, 1, 1) is the probability of each fragment."""
    for number in range(FRAGMENTS):
        shape, colour = _fragment(x, y, draws, f"fragment {number}", 0.07, 0.33, amount)
        image = torch.lerp(image, colour, shape)
    return image


def scatter_occluders(
    image: Tensor, x: Tensor, y: Tensor, draws: Draws, amount: Tensor, target: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Draw small fragments over the object at `target` (x, y, half side); gives the images and what is covered."""
    cx, cy, half = target
    hidden = torch.zeros_like(image[:, :1])
    for number in range(OCCLUDERS):
        # Sizes and positions are relative to the object; otherwise a small object would be covered completely.
        shape, colour = _fragment(
            (x - cx) / half, (y - cy) / half, draws, f"occluder {number}", 0.06, 0.24, amount, half
        )
        image = torch.lerp(image, colour, shape)
        hidden = torch.maximum(hidden, shape)
    return image, hidden


def add_grain(image: Tensor, draws: Draws, strength: Tensor) -> Tensor:
    """Add uniform noise, the same in the three channels; `strength` (n, 1, 1) is its amplitude."""
    size = image.shape[-1]
    rows, columns = draws.integers("grain", 2 * size).split(size, dim=1)
    noise = mix(rows[:, :, None] ^ columns[:, None, :]).to(torch.float32).mul_(2.0**-31).sub_(1.0)
    return image + noise.mul_(strength).unsqueeze(1)


def _value_noise(draws: Draws, size: int) -> Tensor:
    """Two smooth random fields (n, 2, size, size) around 0.5, summed over four octaves."""
    field: Tensor | None = None
    weight = 0.5
    for cells in (5, 10, 20, 40):
        octave = draws.uniform(f"noise {cells}", 2 * cells * cells).view(-1, 2, cells, cells) * weight
        if field is not None:
            octave += F.interpolate(field, size=(cells, cells), mode="bilinear", align_corners=True)
        field, weight = octave, weight * 0.5
    assert field is not None
    return F.interpolate(field, size=(size, size), mode="bilinear", align_corners=True).add_(0.03125)


def _fragment(
    x: Tensor,
    y: Tensor,
    draws: Draws,
    name: str,
    smallest: float,
    largest: float,
    amount: Tensor,
    unit: Tensor | float = 1.0,
) -> tuple[Tensor, Tensor]:
    """A rounded box, possibly hollow and cut by a line: its cover (n, 1, height, width) and colour (n, 3, 1, 1).

    So discs, bars, rings, arcs, wedges and frames occur.  `amount` is the probability that it is drawn, `unit` the
    length of 1 in half images.
    """
    present, cx, cy, turn, width, height, corner, hollow, cut, hue, saturation, value = draws.scalars(name, 12)
    angle = turn * math.pi
    cos, sin = angle.cos(), angle.sin()
    dx, dy = x - (2.0 * cx - 1.0), y - (2.0 * cy - 1.0)
    u, v = dx * cos + dy * sin, dy * cos - dx * sin
    # Squaring makes small sizes more frequent; half of the boxes have a height of their own, which gives bars.
    width = smallest + (largest - smallest) * width * width
    height = torch.where(corner < 0.5, width, smallest * 0.5 + (largest - smallest) * height * height)
    rounding = torch.minimum(width, height) * ((corner * 2.0) % 1.0 * 1.6).clamp(max=1.0)
    distance = box(u, v, 0.0, 0.0, width, height, rounding)
    distance = torch.where(hollow < 0.4, distance.abs() - 0.2 * torch.minimum(width, height), distance)
    distance = torch.maximum(distance, u * 0.6 + v * 0.8 - (1.6 * cut - 0.3) * width)
    distance = distance + (present >= amount) * 1e3
    shape = cover(distance, unit * (0.5 * x.shape[-1]))
    return shape, mix_colour(hue, 0.25 + 0.65 * saturation, 0.3 + 0.65 * value)
