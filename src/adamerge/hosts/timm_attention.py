"""timm's attention modules in parts: heads before attention, and what follows it."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from adamerge.runtime.block_view import AttendHeads
from adamerge.runtime.hooks import call_as


def split_heads(attn: Any, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of tokens `y`, `(…, heads, k)`."""
    if attn.qkv is None:
        query, key, value = (
            part(y).unflatten(-1, (-1, head_dim(attn))) for part in (attn.q_proj, attn.k_proj, attn.v_proj)
        )
    else:
        query, key, value = _packed(attn, y).unflatten(-1, (3, attn.num_heads, head_dim(attn))).unbind(-3)
    query, key = attn.q_norm(query), attn.k_norm(key)
    groups = getattr(attn, "num_kv_groups", 1)
    if groups > 1:
        key, value = key.repeat_interleave(groups, -2), value.repeat_interleave(groups, -2)
    return query, key, value


def head_dim(attn: Any) -> int:
    """The width of one head."""
    # In older releases of timm, Eva's attention has no attribute `head_dim`.
    return linear_in(attn.proj).in_features // attn.num_heads


def linear_in(layer: Any) -> Any:
    """The linear layer itself, or the first one inside of a module that wraps it, as adapters do."""
    return next((part for part in layer.modules() if isinstance(part, nn.Linear)), layer)


def _packed(attn: Any, y: Tensor) -> Tensor:
    # Only EVA has biases outside of its linear layer; the bias of the keys is a buffer of zeros.
    if getattr(attn, "q_bias", None) is None:
        return attn.qkv(y)
    bias = separate_bias(attn)
    return attn.qkv(y) + bias if attn.qkv_bias_separate else linear(y, attn.qkv.weight, bias)


def separate_bias(attn: Any) -> Tensor:
    """The bias of queries, keys and values where EVA keeps them apart from the weights."""
    return torch.cat((attn.q_bias, attn.k_bias, attn.v_bias))


def project_heads(attn: Any, attended: Tensor) -> Tensor:
    """What the module computes after attention of `(…, heads, k)`."""
    return attn.proj_drop(attn.proj(attn.norm(attended.flatten(-2))))


def call_attention(attn: Any, y: Tensor, attend: AttendHeads) -> Tensor:
    """The attention module called on tokens `y`, with `attend` in the place of its own attention."""

    def forward(y: Tensor) -> Tensor:
        return project_heads(attn, attend(*split_heads(attn, y), attn.attn_drop))

    return call_as(attn, forward, y)
