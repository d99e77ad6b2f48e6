"""Weights in the form in which oneDNN computes, kept from one pass to the next.

oneDNN reads weights in blocks.  Given a plain weight it copies it into blocks at every call, which takes up to a fifth
of the time of a small model.  A kept weight is made again when the weight it was made from changed.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

# Larger weights take little of their time to copy, and much memory to keep.
MOST_BYTES = 5 << 20
# For so many rows oneDNN chooses the blocks; it computes with them for any number.
USUAL_ROWS = 197


class KeptWeight:
    """A tensor made from others, and what these were like then.

    torch counts the changes of a tensor, but not those through `.data`.  So some numbers are compared too, at least one
    of every row and of every column.
    """

    def __init__(self, sources: Sequence[Tensor], made: Tensor):
        self.made = made
        self._before = [_identity(source) for source in sources]
        self._samples = [_sample(source) for source in sources]
        self._values = [sample.tobytes() for sample in self._samples]

    def is_current(self, sources: Sequence[Tensor]) -> bool:
        """Whether the sources are what they were."""
        if [_identity(source) for source in sources] != self._before:
            return False
        return all(sample.tobytes() == values for sample, values in zip(self._samples, self._values, strict=True))


# By the first of the sources; it is forgotten together with that tensor.
_kept: Any = WeakIdKeyDictionary()


def packed_weight(sources: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The weights, one below the other, as one weight in `dtype` for oneDNN: in its blocks, if that pays."""
    first = sources[0]
    packs = 0 < sum(source.numel() for source in sources) * dtype.itemsize <= MOST_BYTES
    if any(source.is_inference() for source in sources):
        # torch does not count the changes of these.
        return _made(sources, dtype, False)
    if not packs and len(sources) == 1 and first.dtype is dtype:
        return first
    forms = _kept.setdefault(first, {})
    kept = forms.get((dtype, packs))
    if kept is None or not kept.is_current(sources):
        kept = forms[dtype, packs] = KeptWeight(sources, _made(sources, dtype, packs))
    return kept.made


def joined_bias(sources: Sequence[Tensor | None], rows: Sequence[int], dtype: torch.dtype) -> Tensor | None:
    """The biases of layers with so many rows, as one in `dtype`; a layer without a bias has a bias of 0."""
    given = [bias for bias in sources if bias is not None]
    if not given:
        return None
    if len(given) == len(sources) == 1:
        return given[0].to(dtype)
    parts = zip(sources, rows, strict=True)
    return torch.cat([given[0].new_zeros(n) if bias is None else bias for bias, n in parts]).to(dtype)


def _made(sources: Sequence[Tensor], dtype: torch.dtype, packs: bool) -> Tensor:
    weight = torch.cat([source.detach() for source in sources]) if len(sources) > 1 else sources[0].detach()
    weight = weight.to(dtype)
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), USUAL_ROWS) if packs else weight


def _identity(source: Tensor) -> tuple[int, int, int]:
    return id(source), source.data_ptr(), source._version


def _sample(source: Tensor) -> Any:
    """A NumPy view of some numbers of a weight: of every row and of every column."""
    same_size = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[source.dtype.itemsize]
    rows, columns = source.shape
    step = min(rows, columns)
    while step > 1 and math.gcd(step, columns) != 1:
        step -= 1
    if not source.is_contiguous():
        return source.detach().view(same_size).numpy().diagonal()
    return source.detach().view(same_size).flatten().numpy()[:: max(step, 1)]
