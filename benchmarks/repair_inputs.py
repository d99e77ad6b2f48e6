"""For benchmarks/repair.py: packs images as WebP, reads them, and rebuilds the tuned recipes of the frontier."""

import argparse
import io
import json
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from reading import read
from torch import Tensor, nn

from adamerge.core.parts import from_json
from adamerge.core.recipe import Recipe
from adamerge.data.folders import even_indices
from adamerge.search.evaluator import Evaluator
from adamerge.search.scaling import scale_to_target
from adamerge.search.target import Target


def pack(root: Path, out: Path, quality: int) -> None:
    """Write all images of a folder (root/class/image), cropped to 224 pixels, to one file."""
    from torchvision.transforms import CenterCrop, Compose, InterpolationMode, Resize

    crop = Compose([Resize(248, InterpolationMode.BICUBIC), CenterCrop(224)])
    classes = sorted(path.name for path in root.iterdir() if path.is_dir())
    files = [(file, label) for label, name in enumerate(classes) for file in sorted((root / name).iterdir())]
    encoded: list[bytes] = []
    for file, _ in files:
        held = io.BytesIO()
        crop(Image.open(file).convert("RGB")).save(held, "WEBP", quality=quality, method=4)
        encoded.append(held.getvalue())
    sizes = torch.tensor([len(one) for one in encoded])
    content = {"bytes": torch.frombuffer(bytearray(b"".join(encoded)), dtype=torch.uint8), "sizes": sizes}
    torch.save({**content, "labels": torch.tensor([label for _, label in files])}, out)


def unpack(packed: Path, out: Path) -> None:
    """Decode the images of a packed file into `images` (uint8) and `labels`, as benchmarks/frontier.py reads them."""
    import numpy as np

    content = torch.load(packed, weights_only=True)
    parts = content["bytes"].split(content["sizes"].tolist())
    pictures = [Image.open(io.BytesIO(part.numpy().tobytes())).convert("RGB") for part in parts]
    images = torch.stack([torch.from_numpy(np.array(picture)).permute(2, 0, 1) for picture in pictures])
    torch.save({"images": images, "labels": content["labels"]}, out)


def read_images(model: nn.Module, source: Path, limit: int) -> tuple[Tensor, Tensor]:
    """Evenly spaced images of an unpacked file, normalised for the model, and their labels."""
    content = torch.load(source, weights_only=True, mmap=True)
    chosen = torch.tensor(even_indices(len(content["labels"]), limit))
    config: Any = model.pretrained_cfg
    mean, std = (torch.tensor(config[name])[:, None, None] for name in ("mean", "std"))
    return (content["images"][chosen].float() / 255 - mean) / std, content["labels"][chosen]


def tuned_recipe(evaluator: Evaluator, model: str, cut: float) -> Recipe:
    """The tuned recipe of the frontier at a cut, scaled to the cost and calibrated on the evaluator's images."""
    (row,) = (one for one in read(f"frontier-{model}") if one["method"] == "tuned" and float(one["cut"]) == cut)
    options = json.loads(row["options"])
    scaled = scale_to_target(evaluator, from_json(options["family"]), tuple(options["rates"]), Target(cut=cut))
    return evaluator.sweep(scaled.recipe).recipe


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["pack", "unpack"])
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--quality", type=int, default=85)
    given = parser.parse_args()
    pack(given.source, given.out, given.quality) if given.what == "pack" else unpack(given.source, given.out)
