"""Hosts of transformers 4.5x and 5.x: ViT, DeiT, DINOv2, DINOv3, CLIP, SigLIP, VideoMAE and similar models."""

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import attrgetter
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import __version__ as VERSION

from adamerge.core.errors import BadOption, UnsupportedModel
from adamerge.hosts.base import BlockStack, Host
from adamerge.hosts.block_params import extract_block
from adamerge.hosts.call_convention import WEIGHTS, CallConvention
from adamerge.hosts.transformers_layers import plain_layers
from adamerge.hosts.transformers_towers import HEADS, PAIRED, REASONS, SUPPORTED, TOWERS, BlockPaths, Kind
from adamerge.runtime.block_view import AttendHeads, BlockShape, PlainBlockParams, Rotation, SplitBlockParams
from adamerge.runtime.hooks import call_as

# The module whose hooks record hidden states in 5.x.
RECORDER = "transformers.utils.output_capturing"

try:
    from transformers.utils.output_capturing import _active_collector as collector
except ImportError:  # 4.x has none
    collector = None


def _records(hook: Any) -> bool:
    """Whether a hook is the library's own, which records hidden states and attention weights on request."""
    return getattr(hook, "__module__", "") == RECORDER


@dataclass(frozen=True)
class Block:
    """A transformers block as a View.  Operations run in the library's order, so that results are equal bit for bit."""

    block: Any
    layout: BlockPaths

    @property
    def attention(self) -> Any:
        return self.block.get_submodule(self.layout.attention)

    @property
    def heads(self) -> int:
        return getattr(self.attention, self.layout.heads)

    @property
    def fused(self) -> bool:
        return self.attention.config._attn_implementation != "eager"

    @property
    def scale(self) -> float:
        return getattr(self.attention, self.layout.scale)

    @property
    def dropout(self) -> float:
        return getattr(self.attention, self.layout.dropout) if self.attention.training else 0.0

    @property
    def shape(self) -> BlockShape:
        query, key, value = attrgetter(*self.layout.projections)(self.attention)
        qkv = query.weight.numel() + key.weight.numel() + value.weight.numel()
        project = query.weight.numel()
        every = sum(part.weight.numel() for part in self.block.modules() if isinstance(part, nn.Linear))
        key_dim = query.out_features // self.heads
        return BlockShape(query.in_features, self.heads, key_dim, qkv, project, every - qkv - project)

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self._heads(self._call((self.layout.norm,), x))

    def _heads(self, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        parts: list[Any] = list(attrgetter(*self.layout.projections)(self.attention))
        if self.layout.biases:
            first, last = (getattr(self.attention, name) for name in self.layout.biases)
            biases = first, torch.zeros_like(last, requires_grad=False), last
            made = [linear(y, part.weight, bias) for part, bias in zip(parts, biases, strict=True)]
        else:
            made = [part(y) for part in parts]
        query, key, value = (part.unflatten(-1, (self.heads, -1)) for part in made)
        return query, key, value

    def project(self, attended: Tensor) -> Tensor:
        return self._call(self.layout.project, attended.flatten(-2))

    def attention_branch(self, x: Tensor, attend: AttendHeads) -> Tensor:
        inner = self.layout.inner_projections

        def forward(y: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
            return self._call(inner, attend(*self._heads(y), None).flatten(-2)), None

        out, *_ = call_as(self.attention, forward, self._call((self.layout.norm,), x))
        return self._call(self.layout.project[len(inner) :], out)

    @property
    def uncalled(self) -> tuple[nn.Module, ...]:
        """The modules of the block that are not called here, though the host may call them."""
        layout = self.layout
        projections = [f"{layout.attention}.{name}" for name in layout.projections]
        parts = [self.block.get_submodule(path) for path in (layout.norm, *projections, *layout.project, *layout.mlp)]
        called = {self.block, self.attention, *(module for part in parts for module in part.modules())}
        return tuple(module for module in self.block.modules() if module not in called)

    def mlp(self, x: Tensor) -> Tensor:
        return self._call(self.layout.mlp, x)

    def params(self) -> PlainBlockParams | SplitBlockParams | None:
        layers = plain_layers(self.block, self.layout)
        return None if layers is None else extract_block(layers, _records)

    def _call(self, paths: tuple[str, ...], x: Tensor) -> Tensor:
        return reduce(lambda y, path: self.block.get_submodule(path)(y), paths, x)


class RotaryBlock(Block):
    """A block whose queries and keys are rotated.  The host passes the tables of cosines and sines, in this order."""

    def turn(self, x: Tensor, rows: tuple[Tensor, ...]) -> Tensor:
        cos, sin = rows
        low, high = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        return (x * cos) + (torch.cat((-high, low), dim=-1) * sin)

    def rotation(self, tables: tuple[Tensor, ...]) -> Rotation:
        cos, sin = tables
        return Rotation(cos, sin, interleaved=False)


@dataclass(frozen=True)
class TransformersConvention(CallConvention):
    """Knows whether transformers records hidden states or attention weights in this pass, which it does by hooks."""

    attention: Any = None

    def check_can_run(self, owner: nn.Module, blocks: Sequence[Any]) -> None:
        super().check_can_run(owner, blocks)
        asked = collector.get() if collector is not None else None
        # 4.x records by replacing `forward` of every attention module by a function.
        replaced = isinstance(vars(self.attention).get("forward"), FunctionType)
        if replaced:
            # 4.x does not undo this after an error; left as it is, every later pass would be refused as well.
            for block in blocks:
                for module in block.modules():
                    vars(module).pop("forward", None)
        if replaced or (asked is not None and "attentions" in asked):
            raise BadOption(WEIGHTS)

    def records_tokens(self, blocks: Sequence[nn.Module]) -> bool:
        asked = collector.get() if collector is not None else None
        # 4.56 and 4.57 replace `forward` of every block by a function.
        replaced = any(isinstance(vars(block).get("forward"), FunctionType) for block in blocks)
        return replaced or (asked is not None and "hidden_states" in asked)

    def ignores_hook(self, hook: Any) -> bool:
        return _records(hook)

    def rotary_tables(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
        # Older releases of torch have no `is_exporting`; they cannot export these models.
        exporting = getattr(torch.compiler, "is_exporting", bool)()
        # 5.x passes a mask that hides nothing while it is traced or captured.  During export a mask has no strides.
        args = tuple(
            value for value in args if not (isinstance(value, Tensor) and (exporting or _hides_nothing(value)))
        )
        kwargs = {
            name: value for name, value in kwargs.items() if name != "attention_mask" or not _hides_nothing(value)
        }
        return super().rotary_tables(args, kwargs)


def _hides_nothing(mask: Any) -> bool:
    """Whether a mask has, by its memory layout, one value for all keys of a query, so that it changes no attention."""
    return isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[-1] > 1 and mask.stride(-1) == 0


def host(model: nn.Module) -> Host:
    """The host of a transformers model, or of the vision tower in one.  Other models are refused, with the reason."""
    tower, kind = _tower(model)
    owner, attribute = _place(tower, kind)
    found = Host(model, owner, attribute, (), kind.prefix(tower.config), kind.class_token, kind.image(tower.config))
    views = tuple(_views(found.container, kind))
    # Until transformers 4.56, and for CLIP in all of 4.x, blocks return a tuple and can be asked for attention.
    asks = "output_attentions" in inspect.signature(type(views[0].block).forward).parameters
    branch_first = views[0].layout is not PAIRED
    # From 5.0 on only hooks record hidden states.  Before, loops over the blocks collect them as well.
    clean = collector is not None
    convention = TransformersConvention(kind.tables, asks, True, branch_first, clean, attention=views[0].attention)
    takes_images = getattr(model, "main_input_name", "") == "pixel_values"
    entry, head = None if takes_images else tower, tuple(_head(model, owner))
    return replace(found, views=views, convention=convention, entry=entry, head=head, loop=None if clean else "forward")


def _head(model: nn.Module, owner: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    for outer in model.modules():
        if any(inner is owner for inner in outer.modules()):
            yield from ((child, "forward") for name, child in outer.named_children() if name in HEADS)


def _tower(model: nn.Module) -> tuple[Any, Kind]:
    found: dict[str, tuple[Any, Kind]] = {}
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{outer}." if outer else "") for outer in found)
        kinds = [TOWERS[base.__name__] for base in type(module).__mro__ if base.__name__ in TOWERS]
        if kinds and not inside:
            found[path] = module, kinds[0]
    if len(found) == 1:
        return next(iter(found.values()))
    name = type(model).__name__
    if found:
        raise UnsupportedModel(f"{name} has {len(found)} vision towers; pass one of {', '.join(found)} instead")
    reasons = [reason for start, reason in REASONS.items() if name.startswith(start)]
    why = f": {reasons[0]}" if reasons else ""
    raise UnsupportedModel(
        f"transformers' {name} is not supported{why}. Supported are {SUPPORTED}, alone or as the vision tower of "
        "another model. The nearest is ViTForImageClassification."
    )


def _place(tower: nn.Module, kind: Kind) -> tuple[nn.Module, str]:
    for owner in tower.modules():
        for name, child in owner.named_children():
            blocks = list(child.children())
            if isinstance(child, (nn.ModuleList, BlockStack)) and blocks and _is(blocks[0], kind.layer):
                return owner, name
    raise UnsupportedModel(
        f"{type(tower).__name__} of transformers {VERSION} has no list of {kind.layer}; versions 4.5x and 5.x have"
    )


def _is(block: nn.Module, layer: str) -> bool:
    return any(base.__name__ == layer for base in type(block).__mro__)


def _views(container: nn.Module, kind: Kind) -> Iterator[Block]:
    for number, block in enumerate(container.children()):
        layouts = [layout for layout in kind.layouts if _is(block, kind.layer) and layout.fits(block)]
        if not layouts:
            raise UnsupportedModel(
                f"block {number} of this model is a {type(block).__name__} built otherwise than {kind.layer} is in "
                f"transformers 4.5x and 5.x (this is {VERSION}); supported are {SUPPORTED} as the library makes them"
            )
        yield (RotaryBlock if kind.tables else Block)(block, layouts[0])
