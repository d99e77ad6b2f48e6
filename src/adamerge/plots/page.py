"""One page of HTML for an image: patches to point at, a slider over the layers; it needs no server and no network."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from adamerge.core.errors import BadOption
from adamerge.core.files import write_atomically
from adamerge.plots.image_view import ImageView
from adamerge.plots.svg_sheet import data_uri, ranks_of

TEMPLATE = Path(__file__).with_name("page.html")


def write_page(views: Sequence[ImageView], path: str | os.PathLike[str], *, model: str) -> Path:
    """Write the page of one image with one or more methods; `views` are those of the same image."""
    if not views or len({(view.name, view.grid, view.depth) for view in views}) != 1:
        raise BadOption(f"a page shows methods of one image; got {len(views)} views of {[view.name for view in views]}")
    first = views[0]
    rows, cols = first.grid
    pixels = first.pixels.permute(1, 2, 0).numpy()
    patches = pixels.reshape(rows, pixels.shape[0] // rows, cols, -1, 3).mean((1, 3)).reshape(-1, 3)
    data = {
        "name": first.name,
        "model": model,
        "grid": [rows, cols],
        "moments": first.moments,
        "image": data_uri(first.pixels),
        "colours": (255 * patches.clip(0, 1)).round().astype(int).tolist(),
        "methods": [method_data(view) for view in views],
    }
    # Inside a script element "</" would end it.
    text = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    write_atomically(path, TEMPLATE.read_text(encoding="utf-8").replace("DATA", text, 1))
    return Path(path)


def method_data(view: ImageView) -> dict[str, object]:
    """What the page has to know about a method: slots and salience (as a rank from 0 to 100) of every layer."""
    ranks = [np.round(100 * ranks_of(view, layer)).astype(int).tolist() for layer in range(view.depth)]
    return {
        "name": view.method,
        "cut": view.cut,
        "counts": list(view.counts),
        "before": list(view.before),
        "after": list(view.after),
        "slots": view.leaving.tolist(),
        "salience": ranks,
    }
