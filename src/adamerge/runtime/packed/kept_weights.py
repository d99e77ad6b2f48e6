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
    """A tensor made from weights or biases, and what these were like then.

    torch counts the changes of a tensor, but not those through `.data`.  So some numbers are compared too, at least one
    of every row and of every column.
    """

    def __init__(self, sources: Sequence[Tensor], made: Tensor):
        self.made = made
        # Not the sources themselves: what is kept for a tensor must not keep that tensor.
        samples = [_sample(source) for source in sources]
        self._places = [(id(source), source.data_ptr()) for source in sources]
        # How often each had been changed, a view of some of its numbers, and what these were.
        self.before = [
            (source._version, sample, sample.tobytes()) for source, sample in zip(sources, samples, strict=True)
        ]

    def is_current(self, sources: Sequence[Tensor]) -> bool:
        """Whether the sources are what they were."""
        if [(id(source), source.data_ptr()) for source in sources] != self._places:
            return False
        return all(
            source._version == version and sample.tobytes() == values
            for source, (version, sample, values) in zip(sources, self.before, strict=True)
        )


# By the first of the sources; it is forgotten together with that tensor.
_kept: Any = WeakIdKeyDictionary()


def keep_joined(sources: Sequence[Tensor], dtype: torch.dtype) -> KeptWeight | None:
    """The weights or biases, one below the other, as one in `dtype`; weights in oneDNN's blocks, if that pays.

    None for one that is used as it is, and where torch does not count changes: in tensors made in inference mode.
    """
    first = sources[0]
    packs = first.dim() > 1 and 0 < sum(source.numel() for source in sources) * dtype.itemsize <= MOST_BYTES
    as_it_is = len(sources) == 1 and first.dtype is dtype
    if (as_it_is and not packs) or any(source.is_inference() for source in sources):
        return None
    forms = _kept.setdefault(first, {})
    kept = forms.get((dtype, packs))
    if kept is None or not kept.is_current(sources):
        kept = forms[dtype, packs] = KeptWeight(sources, _made(sources, dtype, packs))
    return kept


def join(sources: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The weights or biases, one below the other, as one in `dtype`."""
    return _made(sources, dtype, False)


def _made(sources: Sequence[Tensor], dtype: torch.dtype, packs: bool) -> Tensor:
    weight = torch.cat([source.detach() for source in sources]) if len(sources) > 1 else sources[0].detach()
    weight = weight.to(dtype)
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), USUAL_ROWS) if packs else weight


def _sample(source: Tensor) -> Any:
    """A NumPy view of some numbers of a tensor: of every row and of every column of a matrix."""
    same_size = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[source.dtype.itemsize]
    if source.dim() == 1:
        return source.detach().view(same_size).numpy()
    rows, columns = source.shape
    step = min(rows, columns)
    while step > 1 and math.gcd(step, columns) != 1:
        step -= 1
    if not source.is_contiguous():
        return source.detach().view(same_size).numpy().diagonal()
    return source.detach().view(same_size).flatten().numpy()[:: max(step, 1)]
