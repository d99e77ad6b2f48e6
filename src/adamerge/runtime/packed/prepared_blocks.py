"""The blocks of a model as oneDNN runs them, kept from one pass to the next."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from adamerge.runtime.block_view import View
from adamerge.runtime.module_watch import ModuleWatch
from adamerge.runtime.packed.onednn import OneDnnView, available, with_onednn

# The dtype of the tokens, that of autocast, and whether oneDNN may be used.
Conditions = tuple[torch.dtype, torch.dtype | None, bool]
# Numbers and words of norms and activations that the views copied.
COPIED_ATTRIBUTES = ("eps", "approximate")


class PreparedBlocks:
    """Gives the views of all blocks for a batch.  Reading a block anew takes as long as a small layer runs."""

    def __init__(self, views: Sequence[View]):
        self.views = views
        self._kept: _Kept | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy has modules of its own."""
        return {"views": self.views, "_kept": None}

    def views_for(self, x: Tensor, autocast: torch.dtype | None) -> Sequence[View]:
        """The views for tokens like `x`: those that call oneDNN where a block can run so."""
        conditions, kept = (x.dtype, autocast, available()), self._kept
        if kept is not None and kept.conditions == conditions and kept.is_current():
            return kept.views
        views = [with_onednn(view, x, autocast) for view in self.views]
        modules = [view.__dict__.get("block") for view in self.views]
        blocks = [module for module in modules if isinstance(module, nn.Module)]
        quick = [view for view in views if isinstance(view, OneDnnView)]
        may_keep = len(blocks) == len(quick) == len(views) and _all_owned(quick, blocks)
        self._kept = _Kept(conditions, quick, blocks) if may_keep else None
        return views

    def all_in_onednn(self, x: Tensor, autocast: torch.dtype | None) -> bool:
        """Whether oneDNN runs every block."""
        return all(isinstance(view, OneDnnView) for view in self.views_for(x, autocast))


class _Kept:
    """Views of blocks, and what tells whether they are still right."""

    def __init__(self, conditions: Conditions, views: Sequence[OneDnnView], blocks: Sequence[nn.Module]):
        self.conditions, self.views = conditions, views
        self._watch = ModuleWatch(blocks)
        self._attributes = [vars(module) for block in blocks for module in block.modules()]
        self._settings = [
            (own, name, own[name]) for own in self._attributes for name in COPIED_ATTRIBUTES if name in own
        ]
        layers = [layer for view in views for layer in (view.qkv_layer, view.project_layer, view.fc1, view.fc2)]
        copied = [both for layer in layers for both in layer.copied]
        self._all_kept = all(kept is not None for _, kept in copied)
        # A flat list: this is read at every pass.
        self._copied = [
            (source, *before)
            for sources, kept in copied
            if kept is not None
            for source, before in zip(sources, kept.before, strict=True)
        ]

    def is_current(self) -> bool:
        """Whether the same modules would give the same views again."""
        if not self._all_kept or self._watch.changed():
            return False
        for attributes in self._attributes:
            if "forward" in attributes:
                return False
        for own, name, before in self._settings:
            if own[name] != before:
                return False
        # That the sources are the same tensors in the same memory was seen by the watch.
        for source, version, sample, values in self._copied:
            if source._version != version or sample.tobytes() != values:
                return False
        return True


def _all_owned(views: Sequence[OneDnnView], blocks: Sequence[nn.Module]) -> bool:
    """Whether all tensors that the views read are parameters or buffers of the blocks, which can be watched."""
    modules = [module for block in blocks for module in block.modules()]
    owned = {id(each) for module in modules for each in (*module._parameters.values(), *module._buffers.values())}
    return all(tensor is None or id(tensor) in owned for view in views for tensor in view.tensors)
