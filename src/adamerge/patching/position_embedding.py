"""Adds timm's class token, registers and position embedding to the patches with one kernel."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from adamerge.hosts.base import Host
from adamerge.patching.module_patch import MethodPatch
from adamerge.patching.patch_embedding import half_precision_inference
from adamerge.runtime.backend import BackendSelector, why_no_kernels


def position_patches(host: Host, selector: BackendSelector) -> tuple[MethodPatch, ...]:
    """The patch by which a kernel adds the host's positions.  `selector` knows whether kernels run."""
    return () if host.positions is None else (MethodPatch(*host.positions, add_positions_fused, selector),)


def add_positions_fused(own: Callable[..., Tensor], self: Any, selector: BackendSelector, x: Tensor) -> Tensor:
    """What timm's `_pos_embed`, which is `own`, gives for patches `(b, n, d)`: `(b, prefix + n, d)`."""
    if not kernel_pays(selector, self, x):
        return own(self, x)
    from adamerge.runtime.triton.kernels.embed import embed
    from adamerge.runtime.triton.kernels.launch import CannotRun

    try:
        return self.pos_drop(embed(x, self.pos_embed, self.cls_token, self.reg_token))
    except CannotRun as error:
        selector.disable_triton(error)
        return own(self, x)


def kernel_pays(selector: BackendSelector, model: Any, x: Tensor) -> bool:
    """Whether kernels run here, and this one gives what the host gives, in less time.

    Compilers come no further than the first check: they cannot follow the search for packages.
    """
    if not (positions_match(model, x) and half_precision_inference(x, model.pos_embed)):
        return False
    return selector.triton_failure is None and why_no_kernels() is None


def positions_match(model: Any, x: Tensor) -> bool:
    """Whether the position embedding has a row for every token or patch; with dynamic image sizes it has a grid."""
    positions = model.pos_embed
    if positions is None or x.dim() != 3 or not x.is_contiguous():
        return False
    prefix = 0 if model.no_embed_class else model.num_prefix_tokens
    return positions.shape[1:] == (prefix + x.shape[1], x.shape[2]) and positions.is_contiguous()
