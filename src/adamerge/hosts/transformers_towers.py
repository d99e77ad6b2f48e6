"""transformers' vision towers: what their blocks are called, where those keep their parts, what follows them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn


@dataclass(frozen=True)
class BlockPaths:
    """Where a block keeps its parts, as paths from the block: what is called in turn, and three names of numbers."""

    norm: str
    attention: str
    projections: tuple[str, str, str]
    project: tuple[str, ...]
    mlp: tuple[str, ...]
    heads: str = "num_attention_heads"
    scale: str = "scaling"
    dropout: str = "attention_dropout"
    biases: tuple[str, ...] = ()

    @property
    def children(self) -> dict[str, set[str]]:
        """The children that every module on the way to a part must have, no fewer and no more."""
        found: dict[str, set[str]] = {}
        inner = (f"{self.attention}.{name}" for name in self.projections)
        for path in (self.norm, *inner, *self.project, *self.mlp):
            steps = path.split(".")
            for depth in range(len(steps)):
                found.setdefault(".".join(steps[:depth]), set()).add(steps[depth])
        return found

    def fits(self, block: nn.Module) -> bool:
        """Whether a block is built exactly so.  One that has anything else is not known to do the same."""
        modules = dict(block.named_modules())
        names = {path: {name for name, _ in module.named_children()} for path, module in modules.items()}
        if any(names.get(path) != expected for path, expected in self.children.items()):
            return False
        return {name for name, _ in modules[self.attention].named_parameters(recurse=False)} == set(self.biases)


FLAT, NESTED = ("q_proj", "k_proj", "v_proj"), ("query", "key", "value")
PLAIN = BlockPaths(
    "layernorm_before", "attention", FLAT, ("attention.o_proj", "dropout"), ("layernorm_after", "mlp", "dropout")
)
OLD = BlockPaths(
    norm="layernorm_before",
    attention="attention.attention",
    projections=NESTED,
    project=("attention.output.dense", "attention.output.dropout"),
    mlp=("layernorm_after", "intermediate", "output.dense", "output.dropout"),
    dropout="dropout_prob",
)
BIASED = replace(OLD, biases=("q_bias", "v_bias"))
SCALED = BlockPaths(
    norm="norm1",
    attention="attention",
    projections=FLAT,
    project=("attention.o_proj", "layer_scale1", "drop_path"),
    mlp=("norm2", "mlp", "layer_scale2", "drop_path"),
)
OLD_SCALED = replace(
    SCALED,
    attention="attention.attention",
    projections=NESTED,
    project=("attention.output.dense", "attention.output.dropout", "layer_scale1", "drop_path"),
    dropout="dropout_prob",
)
TURNED = replace(SCALED, heads="num_heads", dropout="dropout")
PAIRED = BlockPaths(
    norm="layer_norm1",
    attention="self_attn",
    projections=FLAT,
    project=("self_attn.out_proj",),
    mlp=("layer_norm2", "mlp"),
    heads="num_heads",
    scale="scale",
    dropout="dropout",
)


def _image(config: Any) -> tuple[int, ...]:
    size = config.image_size
    return config.num_channels, *((size, size) if isinstance(size, int) else size)


@dataclass(frozen=True)
class Kind:
    """A family: the class and the possible layouts of its blocks, and its prefix tokens by configuration."""

    layer: str
    layouts: tuple[BlockPaths, ...]
    prefix: Callable[[Any], int] = lambda config: 1
    class_token: bool = True
    image: Callable[[Any], tuple[int, ...]] = _image
    tables: str | None = None


def _registers(config: Any) -> int:
    return 1 + config.num_register_tokens


DINOV2 = Kind("Dinov2Layer", (SCALED, OLD_SCALED))
REGISTERS = Kind("Dinov2WithRegistersLayer", (SCALED, OLD_SCALED), _registers)
DINOV3 = Kind("DINOv3ViTLayer", (TURNED,), _registers, tables="position_embeddings")
CLIP = Kind("CLIPEncoderLayer", (PAIRED,))
SIGLIP = Kind("SiglipEncoderLayer", (PAIRED,), lambda config: 0, class_token=False)

# The class of a vision tower -> its kind.  A tower inside another is part of it.
TOWERS = {
    "ViTModel": Kind("ViTLayer", (PLAIN, OLD)),
    "DeiTModel": Kind("DeiTLayer", (PLAIN, OLD), lambda config: 2),
    "ViTMSNModel": Kind("ViTMSNLayer", (PLAIN, OLD)),
    "IJepaModel": Kind("IJepaLayer", (PLAIN, OLD), lambda config: 0, class_token=False),
    "Dinov2Model": DINOV2,
    "Dinov2Backbone": DINOV2,
    "Dinov2WithRegistersModel": REGISTERS,
    "Dinov2WithRegistersBackbone": REGISTERS,
    "DINOv3ViTModel": DINOV3,
    "DINOv3ViTBackbone": DINOV3,
    "CLIPVisionModel": CLIP,
    "CLIPVisionTransformer": CLIP,
    "SiglipVisionModel": SIGLIP,
    "SiglipVisionTransformer": SIGLIP,
    "VideoMAEModel": Kind(
        "VideoMAELayer",
        (OLD, BIASED),
        lambda config: 0,
        class_token=False,
        image=lambda config: (config.num_frames, *_image(config)),
    ),
}
# What multiplies matrices behind the blocks: children of the modules that contain them.
HEADS = ("pooler", "head", "classifier", "cls_classifier", "distillation_classifier", "visual_projection")
SUPPORTED = "ViT, DeiT, ViT-MSN, I-JEPA, DINOv2 (with or without registers), DINOv3, CLIP, SigLIP and VideoMAE"
REASONS = {
    "Beit": "it adds a learned bias for every pair of positions, and a merged token has no single position",
    "Data2VecVision": "it adds a learned bias for every pair of positions, and a merged token has no single position",
    "ViTMAE": "it drops patches at random; for its features load the checkpoint as a ViTModel",
    "Swin": "it attends in windows, which need every patch in its place",
    "Sam": "it attends in windows, which need every patch in its place",
}
