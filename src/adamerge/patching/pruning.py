"""Refuses to cut blocks off a merged model."""

from collections.abc import Callable
from typing import Any

from adamerge.core.errors import PatchConflict
from adamerge.hosts.base import Host
from adamerge.patching.module_patch import MethodPatch

# timm's method, which keeps the first blocks only; `features_only` wrappers call it.
PRUNE = "prune_intermediate_layers"


def pruning_patches(host: Host) -> tuple[MethodPatch, ...]:
    """The patch that refuses pruning, where the host can prune."""
    return (MethodPatch(host.owner, PRUNE, refuse_pruning),) if hasattr(type(host.owner), PRUNE) else ()


def refuse_pruning(own: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """What runs instead of the host's method."""
    raise PatchConflict(
        f"{PRUNE} would cut blocks off a merged model. Call adamerge.remove(model), prune or wrap it, then "
        "adamerge.apply again; a recipe with one number for each block needs as many as are left."
    )
