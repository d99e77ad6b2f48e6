"""The trace of a forward pass: counts, slots, salience and sizes for each image and layer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from jaxtyping import Float, Int
from torch import Tensor

from adamerge.core.errors import BadOption
from adamerge.core.plan import Plan
from adamerge.core.types import Counts, PerImage, PerToken


@dataclass(frozen=True)
class LayerTrace:
    """One layer's merge: its plan, the salience before it, the sizes after it, and the measured redundancy."""

    plan: Plan
    salience: PerToken
    size: Float[Tensor, "b m"]
    redundancy: PerImage

    @property
    def merged_salience(self) -> Float[Tensor, "b m"]:
        """The salience of the tokens after the merge: the greatest of each token's members, eq. (6) (D12)."""
        slot = self.plan.slot
        lowest = self.salience.new_full((slot.shape[0], self.plan.width), float("-inf"))
        seen = torch.where(slot < 0, float("-inf"), self.salience)
        best = lowest.scatter_reduce(1, slot.clamp_min(0), seen, "amax")
        return torch.where(best.isneginf(), 0, best)


@dataclass(frozen=True)
class Trace:
    """The merges of one forward pass, layer by layer.  It covers patch tokens; prefix tokens are never merged.

    `prefix` is the number of prefix tokens.  `before_block` says whether merges come before a block or inside it,
    between attention and MLP.
    """

    layers: tuple[LayerTrace, ...]
    prefix: int
    before_block: bool

    @property
    def patches(self) -> int:
        """How many patch tokens each image started with."""
        return self.layers[0].plan.slot.shape[1]

    @property
    def counts(self) -> Int[Tensor, "b l"]:
        """How many patch tokens each image has after each layer's merge."""
        return torch.stack([layer.plan.count for layer in self.layers], 1)

    @property
    def r(self) -> Int[Tensor, "b l"]:
        """How many patch tokens each image loses at each layer."""
        start = torch.full_like(self.counts[:, :1], self.patches)
        return -torch.diff(self.counts, dim=1, prepend=start)

    @property
    def merged(self) -> Counts:
        """How many patch tokens each image loses in all layers together."""
        return self.patches - self.counts[:, -1]

    @property
    def redundancy(self) -> Float[Tensor, "b l"]:
        """The measured redundancy of each image at each layer."""
        return torch.stack([layer.redundancy for layer in self.layers], 1)

    def plan(self, layer: int = -1) -> Plan:
        """All merges up to and including `layer` as one plan, which starts at the original patches."""
        depth = len(self.layers)
        if layer not in range(-depth, depth):
            raise BadOption(
                f"layer {layer} was asked for, and this forward pass has run {depth} layers. Give a layer from 0 to "
                f"{depth - 1}; in a hook the pass is not at its end, so keep the features and ask after model(images)."
            )
        last = range(depth)[layer]
        return reduce(Plan.then, (step.plan for step in self.layers[: last + 1]))

    def slots(self, layer: int = -1) -> Int[Tensor, "b n"]:
        """For every original patch, the number of the token that it is part of after `layer`."""
        return self.plan(layer).slot

    def __str__(self) -> str:
        r, counts = self.r, self.counts
        images = len(r)
        lines = [f"{images} image{'s' * (images != 1)}, {self.patches} patch tokens + {self.prefix} prefix"]
        if images == 0:
            return lines[0]
        lines.append(f"{'layer':>5}  {'mean r':>7}  {'min':>4}  {'max':>4}  {'tokens left':>11}")
        for layer in range(len(self.layers)):
            column, left = r[:, layer], counts[:, layer].double().mean()
            mean, low, high = column.double().mean(), int(column.min()), int(column.max())
            lines.append(f"{layer:>5}  {mean:>7.2f}  {low:>4}  {high:>4}  {left:>11.1f}")
        merged = self.merged.double()
        lines.append(f"merged {merged.mean():.1f} ± {merged.std(correction=0):.1f} of {self.patches} per image")
        return "\n".join(lines)


# Builds a trace when somebody reads it.
BuildTrace = Callable[[], Trace]


@dataclass(frozen=True)
class LazyTrace:
    """Builds a trace when somebody calls it.  `left` gives the patch tokens that each image has at the end, without
    building the trace, which would read counts from the device.
    """

    build: BuildTrace
    left: Callable[[], Counts]

    def __call__(self) -> Trace:
        return self.build()


def first_images(trace: Trace, images: int) -> Trace:
    """The trace of the first `images` images, in memory of its own and padded no wider than they need."""
    layers: list[LayerTrace] = []
    before = trace.patches
    for layer in trace.layers:
        count = layer.plan.count[:images].clone()
        fewest, width = torch.stack([count.amin(), count.amax()]).tolist() if images else (0, 0)
        slot, salience = (rows[:images, :before].clone() for rows in (layer.plan.slot, layer.salience))
        plan = Plan(slot, count, width, ragged=fewest != width)
        layers.append(
            LayerTrace(plan, salience, layer.size[:images, :width].clone(), layer.redundancy[:images].clone())
        )
        before = width
    return Trace(tuple(layers), trace.prefix, trace.before_block)


def join(traces: Sequence[Trace]) -> Trace:
    """The traces of several batches of one model as one trace, padded to the longest image."""
    if len(traces) == 1:
        return traces[0]
    layers = [_join_layer(steps) for steps in zip(*(trace.layers for trace in traces), strict=True)]
    return Trace(tuple(layers), traces[0].prefix, traces[0].before_block)


def _join_layer(steps: Sequence[LayerTrace]) -> LayerTrace:
    """The same layer of several batches as one."""
    width = max(step.plan.width for step in steps)
    plan = Plan(
        slot=_pad_and_cat([step.plan.slot for step in steps], -1),
        count=torch.cat([step.plan.count for step in steps]),
        width=width,
        ragged=any(step.plan.ragged or step.plan.width != width for step in steps),
    )
    salience, size = _pad_and_cat([step.salience for step in steps], 0), _pad_and_cat([step.size for step in steps], 0)
    return LayerTrace(plan, salience, size, torch.cat([step.redundancy for step in steps]))


def _pad_and_cat(rows: Sequence[Tensor], fill: int) -> Tensor:
    """Arrays `(b, n)` of different widths as one, filled up to the widest."""
    width = max(row.shape[1] for row in rows)
    return torch.cat([torch.nn.functional.pad(row, (0, width - row.shape[1]), value=fill) for row in rows])
