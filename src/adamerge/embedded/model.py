"""The embedded ViT: its architecture, its shipped weights and its input normalisation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from adamerge.core.errors import BadWeights
from adamerge.embedded.shapes import CLASSES

if TYPE_CHECKING:
    from timm.models.vision_transformer import VisionTransformer

WEIGHTS = Path(__file__).with_name("weights.safetensors")

_MEAN = _STD = 0.5


def build() -> VisionTransformer:
    """The model with random weights: 224 x 224 images, patches of 16, twelve blocks of width 128."""
    from timm.models.vision_transformer import VisionTransformer

    model: Any = VisionTransformer(
        img_size=224,
        patch_size=16,
        embed_dim=128,
        depth=12,
        num_heads=4,
        mlp_ratio=4.0,
        num_classes=len(CLASSES),
    )
    # timm reads the preprocessing of a model from these attributes.
    model.pretrained_cfg = model.default_cfg = {
        "architecture": "adamerge_embedded",
        "input_size": (3, 224, 224),
        "num_classes": len(CLASSES),
        "interpolation": "bicubic",
        "crop_pct": 1.0,
        "mean": (_MEAN,) * 3,
        "std": (_STD,) * 3,
        "label_names": CLASSES,
    }
    return model


def load(weights: Path | str = WEIGHTS) -> VisionTransformer:
    """The model with its trained weights, in float32 and evaluation mode."""
    from safetensors.torch import load_file

    path = Path(weights)
    if not path.is_file():
        raise BadWeights(
            f"expected the embedded model's weights at {path}, found no file; "
            "reinstall adamerge, or train them with benchmarks/train_embedded.py"
        )
    model = build()
    model.load_state_dict({name: tensor.float() for name, tensor in load_file(path).items()})
    return model.eval()


def preprocess(images: Tensor) -> Tensor:
    """Normalise images with values in [0, 1] as the model expects them; the shape stays."""
    return (images - _MEAN) / _STD
