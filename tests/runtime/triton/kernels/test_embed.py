"""Class tokens, registers and positions come to the patches as the host brings them."""

import pytest
import torch
from awkward import noise

from adamerge.runtime.triton.kernels.embed import embed, embed_reference


@pytest.mark.parametrize("everybody", [True, False], ids=["all have positions", "patches have positions"])
@pytest.mark.parametrize("first, more", [(1, 0), (0, 0), (1, 4), (0, 3)])
@pytest.mark.parametrize("images, patches, width", [(1, 1, 96), (3, 16, 200), (2, 17, 768), (1, 196, 1280)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_as_the_host_does(images, patches, width, first, more, everybody, dtype):
    x = noise(images, patches, width, dtype=dtype)
    positions = noise(1, patches + (first + more) * everybody, width, seed=1, dtype=dtype)
    others = [noise(1, n, width, seed=2 + n, dtype=dtype) if n else None for n in (first, more)]
    assert torch.equal(embed(x, positions, *others), embed_reference(x, positions, *others))


def test_no_image_at_all():
    x, positions = noise(0, 5, 96, dtype=torch.float16), noise(1, 6, 96, dtype=torch.float16)
    assert embed(x, positions, positions[:, :1]).shape == (0, 6, 96)


def test_it_reads_nothing_of_another_image():
    x, positions = noise(3, 7, 96, dtype=torch.float16), noise(1, 8, 96, seed=1, dtype=torch.float16)
    broken = x.clone()
    broken[1] = float("nan")
    clean, dirty = (embed(patches, positions, positions[:, :1]) for patches in (x, broken))
    assert torch.equal(clean[[0, 2]], dirty[[0, 2]]) and dirty[1, 1:].isnan().all() and not dirty[1, 0].isnan().any()
