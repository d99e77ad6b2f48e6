"""Uniform random numbers that depend only on a seed, the index of an image and the name of a parameter."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

_LOW_32_BITS = 0xFFFFFFFF


def mix(value: Tensor) -> Tensor:
    """Hash non-negative 32-bit integers, stored in int64, to such integers."""
    # Both multipliers are below 2**31, so the products fit into int64 and nothing relies on overflow.
    value = value ^ (value >> 16)
    value = (value * 0x21F0AAAD) & _LOW_32_BITS
    value = value ^ (value >> 15)
    value = (value * 0x735A2D97) & _LOW_32_BITS
    return value ^ (value >> 15)


@dataclass(frozen=True)
class Draws:
    """The random numbers of a batch of images.  Each image has a 64-bit key, as two 32-bit halves of shape (n,)."""

    upper: Tensor
    lower: Tensor

    @classmethod
    def of(cls, indices: Tensor, seed: int) -> Draws:
        """The random numbers of the images with these indices, for this seed."""
        # 64 bits: 32-bit keys would collide between millions of training images and thousands of test images.
        words = (indices & _LOW_32_BITS, (indices >> 32) & _LOW_32_BITS)
        halves = []
        for start in (0x243F6A88, 0x13198A2E):
            key = mix(torch.full_like(indices, (seed ^ start) & _LOW_32_BITS))
            key = mix(key ^ ((seed >> 32) & _LOW_32_BITS))
            for word in words:
                key = mix((key + word) & _LOW_32_BITS)
            halves.append(key)
        return cls(*halves)

    def select(self, rows: Tensor) -> Draws:
        """The random numbers of some images of the batch."""
        return Draws(self.upper[rows], self.lower[rows])

    def integers(self, name: str, count: int) -> Tensor:
        """32-bit integers of shape (images, count)."""
        counters = torch.arange(count, device=self.upper.device) + zlib.crc32(name.encode())
        first = mix((self.upper[:, None] + counters) & _LOW_32_BITS)
        return mix(first ^ self.lower[:, None])

    def uniform(self, name: str, count: int) -> Tensor:
        """Numbers in [0, 1) of shape (images, count)."""
        # float32 represents 24 bits exactly, so that all devices give the same bits.
        return (self.integers(name, count) >> 8).float() * 2.0**-24

    def scalars(self, name: str, count: int) -> tuple[Tensor, ...]:
        """`count` tensors of numbers in [0, 1), each (images, 1, 1) to broadcast over pixels."""
        return self.uniform(name, count).t()[:, :, None, None].unbind(0)
