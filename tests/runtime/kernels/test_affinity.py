"""Column sums and partners from one pass over the tokens are those of the whole affinity matrix."""

from itertools import pairwise

import pytest
import torch
from awkward import LENGTHS, layout, noise, sources

from adamerge.runtime.kernels.affinity import affinity, affinity_reference
from adamerge.runtime.kernels.match import Split
from adamerge.runtime.kernels.residual import add
from adamerge.runtime.ragged import Layout


def whole(parts: torch.Tensor, rows: int, where: Layout) -> torch.Tensor:
    """The sums of an image's parts."""
    sums = torch.zeros(where.total, device=parts.device)
    bounds = where.offsets.tolist()
    for begin, end in pairwise(bounds):
        base = begin + where.prefix
        sums[base:end] = parts[: -(-(end - base) // rows), base:end].sum(0)
    return sums


@pytest.mark.parametrize("kind", ["dot", "scaled", "cosine"])
@pytest.mark.parametrize("name, width", [(name, 96) for name in LENGTHS] + [("registers", 1280), ("edges", 200)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_salience_and_partner(name, width, kind, dtype):
    where, split = layout(name), Split(kind == "scaled", 1)
    x = noise(where.total, width, dtype=dtype) * 0.3
    inverse = add(x, None, inverse=True)[2]
    assert inverse is not None
    parts, rows, value, partner = affinity(x, inverse, where, split, kind)
    sums, expected, expected_partner = affinity_reference(x.cpu(), where, split, kind)
    mask = sources(where, split)
    patches = torch.ones(where.total, dtype=torch.bool)
    for begin in where.offsets[:-1].tolist():
        patches[begin : begin + where.prefix] = False
    torch.testing.assert_close(whole(parts, rows, where)[patches].cpu(), sums[patches], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(value[mask].cpu(), expected[mask.cpu()], rtol=0, atol=1e-5)
    assert torch.equal(partner[mask].cpu(), expected_partner[mask.cpu()])
