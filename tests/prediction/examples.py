"""A tiny classifier and small images for the tests of this room."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import timm
import torch
from PIL import Image

SIZE = 32


def tiny_model(seed: int = 0) -> torch.nn.Module:
    """A ViT of two blocks for images of 32 pixels: 16 patch tokens, 7 classes."""
    torch.manual_seed(seed)
    kind: dict[str, Any] = {
        "img_size": SIZE,
        "patch_size": 8,
        "depth": 2,
        "embed_dim": 32,
        "num_heads": 2,
        "num_classes": 7,
    }
    return timm.create_model("vit_tiny_patch16_224", **kind).eval()


def pixels(count: int, seed: int = 0) -> np.ndarray:
    """Images (count, 32, 32, 3) in uint8."""
    return np.random.default_rng(seed).integers(0, 256, (count, SIZE, SIZE, 3), dtype=np.uint8)


def image_folder(root: Path, count: int, *, bad: tuple[int, ...] = ()) -> Path:
    """A folder of PNG files in two sub-folders; those in `bad` are damaged."""
    for index, image in enumerate(pixels(count)):
        home = root / f"class{index % 2}"
        home.mkdir(parents=True, exist_ok=True)
        path = home / f"{index:03d}.png"
        Image.fromarray(image).save(path)
        if index in bad:
            path.write_bytes(path.read_bytes()[:60])
    return root


def part_bytes(out: Path) -> dict[str, bytes]:
    """Name -> content of every data file, of unreadable images too."""
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in sorted(out.rglob("*.parquet"))}


def rows(out: Path) -> list[dict]:
    """All rows, as a user reads them."""
    return pq.read_table(out).to_pylist()
