"""The evidence of packed tokens: groups of images, each padded to a width that does not depend on the batch."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor

from adamerge.core.decision import Decision
from adamerge.core.evidence import Evidence, Heads
from adamerge.core.lazy import deferred
from adamerge.core.match import Links
from adamerge.core.plan import Plan, first, keep_all
from adamerge.core.recipe import Recipe
from adamerge.core.types import PerImage, Slots
from adamerge.runtime.packed.layout import Layout, PackedHeads, pad
from adamerge.runtime.packed.state import PackedState

# Query, key and value of all packed rows, and the scale of their scores.
PackedAttention = tuple[PackedHeads, PackedHeads, PackedHeads, float]
# How many widths there are to which images are padded when they are decided on.
WIDTHS = 8


@dataclass(frozen=True)
class Group:
    """Some images of a batch, in the order of the batch, with `width` patch tokens each after padding.

    `images` are their numbers in the batch; None for all images, each as long as `width` or shorter.
    """

    images: Int[Tensor, " g"] | None
    width: int


def whole_batch(layout: Layout) -> Group:
    """All images, padded to the longest."""
    return Group(None, layout.most)


def groups_of(state: PackedState, recipe: Recipe) -> list[Group]:
    """The groups in which images are decided on: one on a GPU, and one if all images have the same length by design.

    Sums over padded arrays round by the width.  So with adaptive counts on a CPU, the width of an image is its own
    number of patch tokens, rounded up: its decision is the same to the bit in any batch.
    """
    layout, patches = state.layout, state.history.shape[1]
    if state.x.device.type != "cpu" or not recipe.ragged or not layout.images:
        return [whole_batch(layout)]
    step = max(patches // WIDTHS, 1)
    widths = [min(-(-count // step) * step, patches) for count in layout.patches.tolist()]
    if len(set(widths)) == 1:
        return [Group(None, widths[0])]
    return [
        Group(torch.tensor([image for image, own in enumerate(widths) if own == width]), width)
        for width in sorted(set(widths))
    ]


def build_evidence(
    state: PackedState, recipe: Recipe, depth: int, heads: PackedAttention | None, group: Group
) -> Evidence:
    """The evidence for one merge of a group.  Tokens, places and heads are padded when first read."""
    layout = state.layout
    count = layout.patches if group.images is None else layout.patches[group.images]
    padded = not layout.uniform or group.width != layout.most
    return Evidence(
        raw=deferred(lambda: pad_group(state.x, layout, group)),
        size=pad_group(state.size, layout, group, 0.0).to(torch.promote_types(state.x.dtype, torch.float32)),
        layer=state.layer,
        depth=depth,
        prefix=layout.prefix,
        class_token=state.class_token,
        count=count.long() if padded else None,
        heads=None if heads is None else _padded_heads(state, recipe, heads, group),
        place=deferred(lambda: _places(state, group)),
        patches=state.history.shape[1],
    )


def pad_group(packed: Tensor, layout: Layout, group: Group, fill: float | None = None) -> Tensor:
    """Per-token values, packed `(total, …)`, as a padded `(g, width, …)` array of the patches alone.

    Padding has the value `fill`, or with None some value of the same image, on a CPU.
    """
    exact = group.images is None and group.width == layout.most
    if exact and (layout.uniform or packed.device.type != "cpu"):
        return pad(packed, layout, group.width, 0.0 if fill is None else fill)
    first_row, last_row = layout.offsets[:-1, None] + layout.prefix, layout.offsets[1:, None] - 1
    if group.images is not None:
        first_row, last_row = first_row[group.images], last_row[group.images]
    row = first_row + torch.arange(group.width, device=first_row.device)
    beyond = row > last_row
    row = torch.where(beyond, last_row, row).clamp_min(0)
    padded = packed.index_select(0, row.flatten()).unflatten(0, row.shape)
    return padded if fill is None else padded.masked_fill_(beyond.view(*beyond.shape, *[1] * (packed.dim() - 1)), fill)


def join(groups: list[Group], decisions: list[Decision], layout: Layout) -> Decision:
    """The decisions for the groups of a batch as one, padded to its longest image."""
    most = layout.most
    if len(groups) == 1:
        only = decisions[0]
        if groups[0].width == most:
            return only
        links = only.links
        cut = Links(links.value[:, :most], links.partner[:, :most], links.source[:, :most], None)
        plan = replace(only.plan, slot=only.plan.slot[:, :most])
        return Decision(plan, only.weight[:, :most], only.salience[:, :most], cut)
    images = [group.images for group in groups if group.images is not None]

    def joined(parts: list[Tensor], fill: int) -> Tensor:
        out = parts[0].new_full((layout.images, most), fill)
        for number, part in zip(images, parts, strict=True):
            out[number, : part.shape[1]] = part[:, :most]
        return out

    plans, links = [decision.plan for decision in decisions], [decision.links for decision in decisions]
    count = plans[0].count.new_empty(layout.images)
    for number, plan in zip(images, plans, strict=True):
        count[number] = plan.count
    fewest, width = torch.stack([count.amin(), count.amax()]).tolist()
    together = Links(
        joined([link.value for link in links], 0),
        joined([link.partner for link in links], 0),
        joined([link.source for link in links], 0),
        None,
    )
    return Decision(
        Plan(joined([plan.slot for plan in plans], -1), count, width, ragged=fewest != width),
        joined([decision.weight for decision in decisions], 0),
        joined([decision.salience for decision in decisions], 0),
        together,
    )


def redundancy_of(groups: list[Group], decisions: list[Decision], layout: Layout) -> PerImage:
    """The redundancy of every image, from its own group, so that its last bits do not depend on the batch."""
    found = [decision.links.redundancy for decision in decisions]
    if len(groups) == 1:
        return found[0]
    out = found[0].new_empty(layout.images)
    for group, part in zip(groups, found, strict=True):
        out[group.images] = part
    return out


def _padded_heads(state: PackedState, recipe: Recipe, heads: PackedAttention, group: Group) -> Heads:
    """Queries, keys and values of all tokens, `(g, tokens, heads, k)`; each array is padded when first read."""
    query, key, value, scale = heads
    all_tokens = replace(state.layout, prefix=0)
    wide = replace(group, width=state.layout.prefix + group.width)
    return Heads(
        query=deferred(lambda: pad_group(query, all_tokens, wide)),
        key=deferred(lambda: pad_group(key, all_tokens, wide)),
        value=deferred(lambda: pad_group(value, all_tokens, wide)),
        scale=scale,
        bias=_bias(state, recipe, all_tokens, wide),
    )


def _places(state: PackedState, group: Group) -> Slots:
    """The first original patch that each patch token stands for, `(g, n)`; 0 in padding."""
    history, count = state.history.long(), state.layout.patches.long()
    if group.images is not None:
        history, count = history[group.images], count[group.images]
    past = Plan(history, count, group.width)
    images, patches = history.shape
    return first(keep_all(images, patches, state.x.device).slot, past)


def _bias(state: PackedState, recipe: Recipe, all_tokens: Layout, wide: Group) -> Tensor | None:
    """What this block's attention added to its scores, `(g, 1, 1, tokens)`: log sizes, and -inf for padding."""
    proportional = recipe.proportional_attention and state.merged
    if all_tokens.uniform and wide.width == all_tokens.longest and not proportional:
        return None
    size = pad_group(state.size, all_tokens, wide, 0.0)
    value = size.log() if proportional else torch.where(size > 0, 0.0, float("-inf"))
    return value[:, None, None, :].to(state.x.dtype)
