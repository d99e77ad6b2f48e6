"""Figures measured in pixels, drawn without a display and written to disk whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from adamerge.core.errors import BadOption
from adamerge.core.files import write_atomically

# A power of two, so that pixels to inches and back is exact.
DPI = 128

TEXT = "#1a1a1f"
FAINT = "#6e6e78"
RULE = "#e4e4e9"
# Okabe and Ito's colours, told apart with any colour vision; the strongest first.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
MARKERS = ("o", "s", "D", "^", "v", "P", "X")


@contextmanager
def drawing(path: str | os.PathLike[str], width: int, height: int) -> Iterator[Figure]:
    """A white figure of so many pixels to draw on; it is written to `path` as PNG once it is complete."""
    if Path(path).suffix.lower() != ".png":
        raise BadOption(f"pictures are written as PNG; got the path {str(path)!r}. Let its name end in .png.")
    # What a user's matplotlibrc says must not change the pictures.
    with matplotlib.rc_context({"font.family": "DejaVu Sans", "text.usetex": False, "axes.facecolor": "white"}):
        # A figure with a canvas of its own: pyplot would keep it alive, and look for a display.
        figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI, facecolor="white")
        canvas = FigureCanvasAgg(figure)
        yield figure
        canvas.draw()
    content = BytesIO()
    Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB").save(content, "PNG", optimize=True)
    write_atomically(path, content.getvalue())
