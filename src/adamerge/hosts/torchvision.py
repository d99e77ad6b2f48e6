"""torchvision: VisionTransformer (vit_b_16, vit_b_32, vit_l_16, vit_l_32, vit_h_14)."""

from collections.abc import Iterator
from dataclasses import replace

from torch import nn
from torchvision.models.vision_transformer import EncoderBlock, VisionTransformer

from adamerge.core.errors import UnsupportedModel
from adamerge.hosts.base import Host
from adamerge.hosts.multihead import MultiheadBlock, check_attention


def host(model: nn.Module) -> Host:
    """The host view of a torchvision model; refused with the reason where it is no vision transformer."""
    if not isinstance(model, VisionTransformer):
        raise UnsupportedModel(
            f"torchvision's {type(model).__name__} is not supported; supported are its VisionTransformer models. "
            "The nearest is vit_b_16."
        )
    image, head = (3, model.image_size, model.image_size), ((model.heads, "forward"),)
    found = Host(model, model.encoder, "layers", (), 1, True, image, head=head)
    return replace(found, views=tuple(_views(found.container)))


def _views(container: nn.Module) -> Iterator[MultiheadBlock]:
    for layer, block in enumerate(container.children()):
        if type(block) is not EncoderBlock:
            raise UnsupportedModel(
                f"block {layer} of this model is a {type(block).__name__}; supported is torchvision's EncoderBlock"
            )
        check_attention(layer, block.self_attention)
        yield MultiheadBlock(block, "ln_1", "self_attention", "dropout", "ln_2", "")
