"""Back to the host's shape: every patch gets a copy of the token it became part of."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Int
from torch import Tensor

from adamerge.core.types import AllTokens
from adamerge.runtime.packed import layout as ragged
from adamerge.runtime.packed.layout import Layout, Packed
from adamerge.runtime.triton.kernels.launch import blocks, next_pow2, pdl_options, pdl_wait


@triton.jit
@no_type_check
def _unfold(
    x, history, offsets, out, patches, prefix, stride,
    WIDTH: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    pdl_wait(EARLY)
    image = tl.program_id(1)
    tokens = prefix + patches
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    past = tl.load(history + image * patches + row - prefix, mask=(row >= prefix) & (row < tokens), other=0)
    came = tl.load(offsets + image) + tl.where(row < prefix, row, prefix + past)
    channel = tl.arange(0, CHANNELS)
    inside = (row < tokens)[:, None] & (channel < WIDTH)[None, :]
    value = tl.load(x + came.to(tl.int64)[:, None] * stride + channel[None, :], mask=inside, other=0.0)
    goes = (image * tokens + row).to(tl.int64)[:, None] * WIDTH + channel[None, :]
    tl.store(out + goes, value, mask=inside)


def unfold(x: Packed, history: Int[Tensor, "b patches"], layout: Layout) -> AllTokens:
    """The tokens as `(b, prefix + patches, d)`."""
    images, patches = history.shape
    width, tokens = x.shape[1], layout.prefix + history.shape[1]
    out = torch.empty((images, tokens, width), dtype=x.dtype, device=x.device)
    if images:
        channels = next_pow2(width)
        rows = max(1, 4096 // channels)
        _unfold[(blocks(tokens, rows), images)](
            x, history, layout.offsets, out, patches, layout.prefix, x.stride(0),
            WIDTH=width, CHANNELS=channels, ROWS=rows, num_warps=4,
            **pdl_options(x),
        )  # fmt: skip
    return out


unfold_reference = ragged.unfold
