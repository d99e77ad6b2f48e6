"""Digests that name cached results and identify journals: one for tensors, one for JSON data."""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

from torch import Tensor

# Values of a tensor that enter its digest, at least, where it has so many.
SAMPLES = 4096


def digest_tensors(tensors: Iterable[Tensor]) -> str:
    """SHA-256 of evenly spaced values of each tensor, as float64; shapes, dtypes and devices do not enter.

    Journals of the tuner hold this digest: another definition would make them another task, and no search resumable.
    """
    digest = hashlib.sha256()
    for tensor in tensors:
        values = tensor.detach().flatten()[:: max(1, tensor.numel() // SAMPLES)]
        digest.update(values.cpu().double().numpy().tobytes())
    return digest.hexdigest()


def digest_json(data: Any) -> str:
    """SHA-256 of JSON data, the first 24 digits; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:24]
