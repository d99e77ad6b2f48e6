"""Copies go back to where their tokens came from."""

import torch
from awkward import DEVICE, LENGTHS, layout, noise

from adamerge.runtime.triton.kernels.unfold import unfold, unfold_reference


def test_every_patch_gets_its_token():
    for name in LENGTHS:
        where = layout(name)
        x = noise(where.total, 96)
        random = torch.rand(where.images, 31, generator=torch.Generator().manual_seed(0)).to(DEVICE)
        history = (random * where.patches[:, None]).int()
        assert torch.equal(unfold(x, history, where), unfold_reference(x, history, where))
