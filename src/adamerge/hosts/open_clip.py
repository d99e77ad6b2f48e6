"""open_clip: the vision tower of CLIP and CoCa models; the text tower is left alone."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from open_clip.timm_model import TimmModel
from open_clip.transformer import ResidualAttentionBlock, VisionTransformer
from torch import nn

from adamerge.core.errors import UnsupportedModel
from adamerge.hosts.base import Host, find_host
from adamerge.hosts.multihead import MultiheadBlock, check_attention


def host(model: nn.Module) -> Host:
    """The host view of a model's vision tower, or of a tower alone; others are refused with the reason."""
    visual: Any = dict(model.named_children()).get("visual", model)
    if isinstance(visual, TimmModel):
        found = find_host(visual.trunk)
        return replace(found, model=model, entry=visual, head=(*found.head, (visual.head, "forward")))
    if not isinstance(visual, VisionTransformer):
        raise UnsupportedModel(
            f"the vision tower of this open_clip model is a {type(visual).__name__}; supported are VisionTransformer "
            "and timm's vision transformers. The nearest is ViT-B-32."
        )
    found = Host(
        model, visual.transformer, "resblocks", (), 1, True, (3, *visual.image_size), entry=visual, loop="forward"
    )
    return replace(found, views=tuple(_views(found.container)))


def _views(container: nn.Module) -> Iterator[MultiheadBlock]:
    for layer, block in enumerate(container.children()):
        if type(block) is not ResidualAttentionBlock:
            raise UnsupportedModel(
                f"block {layer} of this model is a {type(block).__name__}; supported is open_clip's "
                "ResidualAttentionBlock, which all models have but those with scaled cosine attention or norms inside"
            )
        check_attention(layer, block.attn)
        yield MultiheadBlock(block, "ln_1", "attn", "ls_1", "ln_2", "ls_2")
