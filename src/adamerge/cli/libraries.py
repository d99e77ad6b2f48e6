"""Models of libraries other than timm, by the names of the command line: `transformers:FOLDER`, `torchvision:NAME`."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from adamerge.cli.weights import load_weights
from adamerge.core.errors import BadOption, BadWeights

# The attribute where timm keeps a model's preprocessing; other models get it too, so that one reader serves all.
PREPROCESSING = "pretrained_cfg"
# Pillow's number of a resampling filter, which transformers writes -> timm's name for it.
FILTERS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}


@dataclass(frozen=True)
class Shape:
    """The image size and the number of classes of a model; None means the model's own."""

    image_size: int | None = None
    num_classes: int | None = None


def named(name: str) -> "Callable[[Path | None, bool, bool, Shape], nn.Module] | None":
    """The function that makes the model `library:name`; None if the name has no known library before a colon.

    It takes weights, pretrained, random and the shape.
    """
    library, colon, rest = name.partition(":")
    if not colon or library not in MAKERS:
        return None
    if not rest:
        raise BadOption(f"{name} names no model; {library}: is followed by {MAKERS[library][1]}")
    make = MAKERS[library][0]
    return lambda weights, pretrained, random, shape: make(rest, weights, pretrained, random, shape)


def _transformers(name: str, weights: Path | None, pretrained: bool, random: bool, shape: Shape) -> nn.Module:
    """A folder that `save_pretrained` wrote, or a model of the hub; both come with weights."""
    import transformers

    local = Path(name).is_dir()
    if weights is not None:
        raise BadOption("a model of transformers is loaded with its own weights; leave --weights out")
    for flag, value in (("--image-size", shape.image_size), ("--num-classes", shape.num_classes)):
        if value is not None:
            raise BadOption(f"a model of transformers is made by its configuration; leave {flag} out")
    if not local and not pretrained and not random:
        raise BadOption(
            f"{name!r} is no folder here; give the folder that save_pretrained wrote, or --pretrained to download the "
            "model of that name from the hub"
        )
    try:
        config = transformers.AutoConfig.from_pretrained(name)
        (architecture, *_) = config.architectures or ["AutoModel"]
        kind: Any = getattr(transformers, architecture, None)
        if kind is None:
            raise BadOption(f"transformers {transformers.__version__} has no {architecture}, which {name} is made of")
        # Only safetensors: pickle files in the folder are not read.
        model = kind.from_pretrained(name, use_safetensors=True) if local or pretrained else kind(config)
    except (OSError, ValueError, KeyError) as error:  # no such repository, no network, damaged or missing files
        raise BadWeights(f"transformers could not load {name!r}: {error}") from error
    setattr(model, PREPROCESSING, _processor(name))
    model.num_classes = getattr(config, "num_labels", 0) if "Classification" in architecture else 0
    return model


def _processor(name: str) -> dict[str, Any]:
    """The preprocessing of a model's image processor, under timm's names."""
    from transformers import AutoImageProcessor

    try:
        made: dict[str, Any] = AutoImageProcessor.from_pretrained(name).to_dict()
    except (OSError, ValueError):
        warnings.warn(
            f"{name} has no image processor; images are cropped and normalised as is usual for ImageNet. "
            "processor.save_pretrained(folder) writes one.",
            stacklevel=2,
        )
        return {}
    size, crop = dict(made.get("size") or {}), dict(made.get("crop_size") or {})
    edge = size.get("shortest_edge")
    cropped = made.get("do_center_crop") and edge and crop.get("height")
    plain = not made.get("do_normalize", True)
    return {
        "mean": (0.0,) * 3 if plain else tuple(made["image_mean"]),
        "std": (1.0,) * 3 if plain else tuple(made["image_std"]),
        "interpolation": FILTERS.get(int(made.get("resample", 3)), "bicubic"),
        "crop_pct": crop["height"] / edge if cropped else 1.0,
        # Without a crop, an image is resized to a square and its aspect ratio is lost.
        "crop_mode": "center" if cropped else "squash",
    }


def _torchvision(name: str, weights: Path | None, pretrained: bool, random: bool, shape: Shape) -> nn.Module:
    """A model of torchvision; `vit_b_16.IMAGENET1K_SWAG_E2E_V1` names the model and one of its weights."""
    from torchvision import models

    kind, _, tag = name.partition(".")
    if kind not in models.list_models():
        near = ", ".join(models.list_models(include="vit*"))
        raise BadOption(f"torchvision has no model {kind!r}; supported are {near}")
    if weights is not None and pretrained:
        raise BadOption("give either --weights FILE or --pretrained, not both")
    if weights is None and not pretrained and not random:
        raise BadOption(
            f"{name} needs weights: --weights FILE.safetensors for a local file, or --pretrained to download "
            "torchvision's"
        )
    known: Any = models.get_model_weights(kind)
    if tag and tag not in known.__members__:
        raise BadOption(f"{kind} has no weights {tag!r}; choose from {', '.join(known.__members__)}")
    entry = known[tag] if tag else known.DEFAULT
    transform = entry.transforms()
    (crop,), (edge,) = transform.crop_size, transform.resize_size
    options = {} if shape.num_classes is None else {"num_classes": shape.num_classes}
    chosen = entry if pretrained else None
    try:
        model: Any = models.get_model(kind, weights=chosen, image_size=shape.image_size or crop, **options)
    except (OSError, TypeError, ValueError) as error:  # downloads fail, and other models take no image size
        raise BadWeights(f"torchvision could not make {name!r}: {error}") from error
    if weights is not None:
        load_weights(model, weights)
    setattr(
        model,
        PREPROCESSING,
        {
            "mean": tuple(transform.mean),
            "std": tuple(transform.std),
            "interpolation": transform.interpolation.value,
            "crop_pct": crop / edge,
        },
    )
    return model


# Library -> the function that makes its models, and what follows the colon.
MAKERS = {
    "transformers": (_transformers, "a folder that save_pretrained wrote, or a name on the hub"),
    "torchvision": (_torchvision, "one of its names, such as vit_b_16"),
}
