"""Digests of tensors and of JSON data; they identify stored results and journals of the tuner."""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

# At least this many values of a tensor enter its digest; all values if it has fewer.
SAMPLES = 4096


def digest_tensors(tensors: Iterable[Tensor]) -> str:
    """SHA-256 of evenly spaced values of each tensor, as float64.  Shapes, dtypes and devices do not enter.

    Journals of the tuner contain this digest.  With another definition, no older journal could be resumed.
    """
    return digest_samples(map(sample, tensors))


def sample(tensor: Tensor) -> bytes:
    """What of a tensor enters its digest."""
    values = tensor.detach().flatten()[:: max(1, tensor.numel() // SAMPLES)]
    return values.cpu().double().numpy().tobytes()


def digest_samples(samples: Iterable[bytes]) -> str:
    """The digest of tensors of which these are samples."""
    digest = hashlib.sha256()
    for one in samples:
        digest.update(one)
    return digest.hexdigest()


def digest_json(data: Any) -> str:
    """The first 24 hexadecimal digits of the SHA-256 of JSON data; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:24]


def identify_model(model: nn.Module) -> dict[str, str]:
    """Digests of all parameters and buffers of a model: names, shapes and dtypes, and sampled values."""
    state = model.state_dict()
    shapes = [[name, list(tensor.shape), str(tensor.dtype)] for name, tensor in state.items()]
    return {"parameters": digest_json(shapes), "weights": digest_tensors(state.values())}
