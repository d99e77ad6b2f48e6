"""The vision towers of transformers: the class of their blocks, the paths of a block's layers, and the heads."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn


@dataclass(frozen=True)
class BlockPaths:
    """The paths of a block's layers, and the attributes of its attention with the heads, the scale and the dropout."""

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
        """Path of each module that contains layers -> the names of exactly the children that it must have."""
        found: dict[str, set[str]] = {}
        inner = (f"{self.attention}.{name}" for name in self.projections)
        for path in (self.norm, *inner, *self.project, *self.mlp):
            steps = path.split(".")
            for depth in range(len(steps)):
                found.setdefault(".".join(steps[:depth]), set()).add(steps[depth])
        return found

    @property
    def inner_projections(self) -> tuple[str, ...]:
        """Those of `project` that lie inside the attention module."""
        return tuple(path for path in self.project if path.startswith(f"{self.attention}."))

    def fits(self, block: nn.Module) -> bool:
        """Whether a block has exactly these layers.  A block with others may compute something else."""
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
    """A model family: the class of its blocks, their possible layouts, and the prefix tokens of a configuration."""

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
# Children of the modules around the blocks that multiply matrices after the last block.
HEADS = ("pooler", "head", "classifier", "cls_classifier", "distillation_classifier", "visual_projection")
SUPPORTED = "ViT, DeiT, ViT-MSN, I-JEPA, DINOv2 (with or without registers), DINOv3, CLIP, SigLIP and VideoMAE"
REASONS = {
    "Beit": "it adds a learned bias for every pair of positions, and a merged token has no single position",
    "Data2VecVision": "it adds a learned bias for every pair of positions, and a merged token has no single position",
    "ViTMAE": "it drops patches at random; for its features load the checkpoint as a ViTModel",
    "Swin": "it attends in windows, which need every patch in its place",
    "Sam": "it attends in windows, which need every patch in its place",
}
