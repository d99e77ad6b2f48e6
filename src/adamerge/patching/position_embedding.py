"""timm's class tokens and positions put to the patches in one pass of a kernel."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from adamerge.hosts.base import Host
from adamerge.patching.module_patch import MethodPatch
from adamerge.patching.patch_embedding import half_precision_inference
from adamerge.runtime.backend import why_no_kernels


def position_patches(host: Host) -> tuple[MethodPatch, ...]:
    """The patch that lets a kernel add the host's positions, where it can."""
    return () if host.positions is None else (MethodPatch(*host.positions, add_positions_fused),)


def add_positions_fused(own: Callable[..., Tensor], self: Any, x: Tensor) -> Tensor:
    """What the host's `_pos_embed`, which is `own`, gives."""
    if not kernel_pays(self, x):
        return own(self, x)
    from adamerge.runtime.triton.kernels.embed import embed
    from adamerge.runtime.triton.kernels.launch import CannotRun

    try:
        return self.pos_drop(embed(x, self.pos_embed, self.cls_token, self.reg_token))
    except CannotRun as error:
        self.blocks.selector.disable_triton(error)
        return own(self, x)


def kernel_pays(model: Any, x: Tensor) -> bool:
    """Whether the kernel does what the host would, and faster, and kernels run here at all."""
    runs = model.blocks.selector.triton_failure is None and why_no_kernels() is None
    return runs and positions_match(model, x) and half_precision_inference(x, model.pos_embed)


def positions_match(model: Any, x: Tensor) -> bool:
    """Whether there is a position for every token, or for every patch; images of any size have a grid instead."""
    positions = model.pos_embed
    if positions is None or x.dim() != 3 or not x.is_contiguous():
        return False
    prefix = 0 if model.no_embed_class else model.num_prefix_tokens
    return positions.shape[1:] == (prefix + x.shape[1], x.shape[2]) and positions.is_contiguous()
