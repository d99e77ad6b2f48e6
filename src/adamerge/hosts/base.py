"""Finds the library that a model comes from, and describes where the model keeps its blocks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from adamerge.core.errors import BadOption, BadStats, UnsupportedModel
from adamerge.core.stats import LayerStats
from adamerge.core.weight_patch import WeightPatch
from adamerge.hosts.call_convention import CallConvention
from adamerge.runtime.block_view import View

# Methods, each of a module.
Methods = tuple[tuple[nn.Module, str], ...]


class BlockStack(nn.Module):
    """What stands in the place of a host's block container while merging is applied.

    `looped` says whether a compiler follows the host's loop over the blocks, which reads nothing between them.
    """

    looped = False

    @property
    def container(self) -> nn.Module:
        """The host's own block container."""
        raise NotImplementedError


@dataclass(frozen=True)
class Host:
    """Where a model keeps its blocks, and how to read them.

    `model` is the model that was passed to `find_host`; `owner` is the module in it whose `attribute` is the block
    container.  `image` is the shape of one input.  `entry` is what takes images, where that is not the model itself:
    the vision tower of a model that wants texts as well.  `head` lists the methods that make the model's output of what
    the blocks gave, as far as they multiply matrices.  `positions` is the method that adds class token and positions to
    the patches, where it is timm's own, so that a kernel can do the same.  `loop` names the method of the owner that
    calls the blocks one after the other, where it hands the tokens on and nothing else.
    """

    model: nn.Module
    owner: nn.Module
    attribute: str
    views: tuple[View, ...]
    prefix: int
    class_token: bool
    image: tuple[int, ...]
    convention: CallConvention = field(default_factory=CallConvention)
    entry: nn.Module | None = None
    head: Methods = ()
    positions: tuple[nn.Module, str] | None = None
    loop: str | None = None

    @property
    def container(self) -> nn.Module:
        """The host's own block container, whether or not a stack stands in its place now."""
        return self.blocks.container if isinstance(self.blocks, BlockStack) else self.blocks

    @property
    def blocks(self) -> nn.Module:
        """What is in the container's place now."""
        return getattr(self.owner, self.attribute)

    @property
    def depth(self) -> int:
        """How many blocks there are."""
        return len(self.views)

    def fingerprint(self) -> dict[str, Any]:
        """A few numbers that tell this model from others, and survive a change of dtype or device."""
        sketch: list[float] = []
        for block in self.container.children():
            matrices = [p for p in block.parameters() if p.dim() == 2]
            for p in matrices:
                flat = p.detach().flatten()
                sketch += flat[:: max(1, len(flat) // 2)][:2].float().tolist()
        return {
            "class": type(self.owner).__name__,
            "depth": self.depth,
            "prefix": self.prefix,
            "parameters": sum(p.numel() for p in self.container.parameters()),
            "sketch": [float(f"{v:.6g}") for v in sketch],
        }

    def check_patch(self, patch: WeightPatch) -> None:
        """Refuse a patch that was made for another model."""
        wrong = self._difference(patch.model)
        if wrong is not None:
            raise BadOption(f"the patch of this recipe was made for {wrong}. Run adamerge.repair on this one.")

    def check(self, stats: LayerStats) -> None:
        """Refuse statistics that were calibrated on another model."""
        if stats.depth != self.depth:
            raise BadStats(
                f"these statistics cover {stats.depth} layers, the model has {self.depth}; "
                "they were calibrated on another model. Run `adamerge calibrate` on this one."
            )
        wrong = self._difference(stats.model) if stats.model else None
        if wrong is not None:
            raise BadStats(f"these statistics were calibrated on {wrong}. Run `adamerge calibrate` on this one.")

    def _difference(self, theirs: Mapping[str, Any]) -> str | None:
        """How this model differs from the one with this fingerprint; None where it does not."""
        mine = self.fingerprint()
        for name in ("class", "prefix", "parameters"):
            if mine[name] != theirs.get(name):
                return f"another model: its {name} is {theirs.get(name)!r}, this model's is {mine[name]!r}"
        a, b = torch.tensor(mine["sketch"]), torch.tensor(theirs.get("sketch", []))
        # bfloat16 keeps 8 bits; the tolerance lets a model pass in any dtype.
        if a.shape != b.shape or not torch.allclose(a, b, rtol=1e-2, atol=1e-5):
            return "a model of the same shape with other weights"
        return None


# Library -> module with `host(model) -> Host | None`.  A library is imported only for its own models.
LIBRARIES = {
    "timm": "adamerge.hosts.timm",
    "transformers": "adamerge.hosts.transformers",
    "torchvision": "adamerge.hosts.torchvision",
    "open_clip": "adamerge.hosts.open_clip",
}


def image_entry(model: nn.Module) -> nn.Module:
    """What takes images: the model itself, or the vision tower of a model that wants texts as well."""
    return find_host(model).entry or model


def find_host(model: nn.Module) -> Host:
    """The host view of a supported model; any other is refused with the list of what is supported."""
    if not isinstance(model, nn.Module):
        raise UnsupportedModel(f"expected a torch.nn.Module, got {type(model).__name__}; pass the model itself")
    if isinstance(model, GraphModule):
        raise UnsupportedModel(
            f"this {type(model).__name__} is a graph that torch.fx made of a model, which has no blocks to merge in; "
            "pass the model itself, and read features of merged blocks by forward hooks"
        )
    roots = {base.__module__.partition(".")[0] for base in type(model).__mro__}
    for library, module in LIBRARIES.items():
        if library in roots:
            look: Callable[[nn.Module], Host] = import_module(module).host
            return look(model)
    raise UnsupportedModel(
        f"{type(model).__module__}.{type(model).__name__} is not supported; supported are vision transformers "
        f"of {', '.join(LIBRARIES)}; the README lists them. If it is wrapped (DataParallel, a pipeline), pass the "
        "inner model, such as model.module or, after torch.compile, model._orig_mod."
    )
