"""Loads models and images by the names of the command line."""

from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import nn

from adamerge.cli.flags import EMBEDDED
from adamerge.cli.libraries import MAKERS, Shape, named
from adamerge.cli.weights import load_weights
from adamerge.core.errors import BadOption, BadWeights
from adamerge.data.folders import Readable, folder_loader
from adamerge.distributed import my_share, place

# timm loads models that are not in its list by these prefixes.
HUBS = ("hf-hub:", "hf_hub:", "local-dir:")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def load_model(
    name: str,
    weights: Path | None,
    pretrained: bool,
    device: str,
    dtype: str,
    *,
    random: bool = False,
    image_size: int | None = None,
    num_classes: int | None = None,
) -> nn.Module:
    """A model in evaluation mode by name: `embedded`, a name of timm, or `library:name`.

    `random` allows random weights where none are given; `image_size` and `num_classes` replace the model's own.
    """
    if num_classes is not None and (num_classes < 1 or pretrained):
        raise BadOption(
            "--num-classes is the number of classes in --weights FILE, at least 1; pretrained weights have their own. "
            f"Got {num_classes}{' and --pretrained' if pretrained else ''}"
        )
    shape = Shape(image_size, num_classes)
    kind = read_dtype(dtype)
    if name == EMBEDDED:
        model = _embedded(weights, pretrained, shape)
    elif (make := named(name)) is not None:
        model = make(weights, pretrained, random, shape)
    else:
        model = _timm(name, weights, pretrained, random, shape)
    if device == "cuda" and place().world > 1:
        device = f"cuda:{place().local}"
    try:
        return model.to(device, kind).eval()
    except (RuntimeError, AssertionError) as error:
        raise BadOption(f"the model cannot be put on device {device!r}: {str(error).splitlines()[0]}") from error


def read_dtype(name: str) -> torch.dtype:
    """The type of numbers in `--dtype`."""
    if name not in DTYPES:
        raise BadOption(f"--dtype must be one of {', '.join(DTYPES)}; got {name!r}")
    return DTYPES[name]


def _embedded(weights: Path | None, pretrained: bool, shape: Shape) -> nn.Module:
    from adamerge.embedded import load

    if shape.image_size not in (None, 224):
        raise BadOption(f"the embedded model takes images of 224 pixels; got --image-size {shape.image_size}")
    if shape.num_classes is not None:
        raise BadOption("the embedded model has its own classes; leave --num-classes out")
    if pretrained:
        raise BadOption("the embedded model brings its own weights; leave --pretrained out")
    model = load()
    if weights is not None:
        load_weights(model, weights)
    return model


def _timm(name: str, weights: Path | None, pretrained: bool, random: bool, shape: Shape) -> nn.Module:
    import timm

    # A folder comes with its weights.
    pretrained = pretrained or name.startswith("local-dir:")
    if weights is not None and pretrained:
        raise BadOption("give either --weights FILE or --pretrained, not both")
    if weights is None and not pretrained and not random:
        raise BadOption(
            f"{name} needs weights: --weights FILE.safetensors for a local file, or --pretrained to download timm's"
        )
    if not name.startswith(HUBS) and name.split(".")[0] not in timm.list_models():
        stem = name.split(".")[0]
        near = timm.list_models(f"{stem}*")[:5] or get_close_matches(stem, timm.list_models(), 5)
        raise BadOption(
            f"timm has no model {name!r}; near are {', '.join(near) or 'vit_base_patch16_224 and others'}. Models of "
            f"other libraries are named {' or '.join(f'{library}:…' for library in MAKERS)}."
        )
    given = {"img_size": shape.image_size, "num_classes": shape.num_classes}
    changed: dict[str, Any] = {option: value for option, value in given.items() if value is not None}
    try:
        model = timm.create_model(name, pretrained=pretrained, **changed)
    except Exception as error:  # downloads fail in many ways: no network, no such tag, no permission
        size = f" for images of {shape.image_size} pixels" if shape.image_size is not None else ""
        what = "with pretrained weights" if pretrained else f"with random weights{size}"
        raise BadWeights(f"timm could not make {name!r} {what}: {error}") from error
    if weights is not None:
        load_weights(model, weights, resample=shape.image_size is not None)
    return model


@dataclass(frozen=True)
class Drawn:
    """Batches of (images, labels) from the embedded generator, with the interface of a folder's loader."""

    count: int
    seed: int
    batch_size: int
    is_share: bool = False
    unreadable: tuple[str, ...] = ()

    @property
    def firsts(self) -> list[int]:
        """The first image of each batch."""
        all_of_them = range(0, self.count, self.batch_size)
        return list(my_share(all_of_them) if self.is_share else all_of_them)

    def __len__(self) -> int:
        return len(self.firsts)

    def __iter__(self):
        from adamerge.embedded import preprocess, scenes

        for first in self.firsts:
            drawn = scenes(first, min(self.batch_size, self.count - first), seed=self.seed)
            yield preprocess(drawn.images), drawn.labels

    def complaint(self) -> str | None:
        return None


def load_data(
    model: nn.Module,
    data: str,
    *,
    seed: int,
    batch_size: int,
    workers: int,
    limit: int | None,
    labelled: bool = True,
    shared: bool = False,
) -> "Readable | Drawn":
    """Batches of (images, labels) from a folder, or from the embedded generator.

    With `labelled=False`, the classes of the folder need not be those of the model.  With `shared`, each of several
    processes reads only its own batches.
    """
    if batch_size < 1:
        raise BadOption(f"--batch-size must be at least 1; got {batch_size}")
    if limit is not None and limit < 1:
        raise BadOption(f"--images must be at least 1; got {limit}")
    if data == EMBEDDED:
        return Drawn(limit if limit is not None else 1024, seed, batch_size, shared)
    reading: dict[str, Any] = {"batch_size": batch_size, "workers": workers, "limit": limit}
    return Readable(folder_loader(model, data, **reading, labelled=labelled, shared=shared), is_share=shared)
