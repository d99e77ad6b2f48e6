"""Packed examples of awkward sizes for the kernels, on the device if there is one."""

from itertools import pairwise

import torch
from torch import Tensor

from adamerge.runtime.packed.layout import Layout, ragged_layout

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

# Tokens of each image with the prefix counted, and the prefix: one token, odd numbers, tile edges, mixed lengths.
LENGTHS = {
    "one": ([2, 1, 3], 1),
    "edges": ([17, 16, 18, 3], 1),
    "no prefix": ([5, 1, 4], 0),
    "registers": ([9, 40, 6], 5),
    "vit": ([197, 60], 1),
    "large": ([577], 1),
}

# Dtypes of tokens, of a branch, and of the factor of the branch.  No product here is rounded to bfloat16: where a
# device rounds, the interpreter truncates.
FULL, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16
MIXED = [(FULL, HALF, FULL), (FULL, HALF, HALF), (HALF, HALF, FULL), (FULL, BRAIN, FULL), (BRAIN, BRAIN, FULL)]


def layout(name: str) -> Layout:
    lengths, prefix = LENGTHS[name]
    return ragged_layout([n - prefix for n in lengths], prefix, DEVICE)


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def sources(where: Layout, split) -> Tensor:
    """Which rows are sources."""
    mask = torch.zeros(where.total, dtype=torch.bool, device=DEVICE)
    bounds = where.offsets.tolist()
    for begin, end in pairwise(bounds):
        mask[begin + where.prefix + split.sides(end - begin - where.prefix, DEVICE)[0]] = True
    return mask
