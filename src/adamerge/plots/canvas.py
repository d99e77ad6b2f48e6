"""A figure with a size in pixels, drawn without a display and written atomically."""

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
from adamerge.core.files import check_can_write, write_atomically

# A power of two, so that conversion between pixels and inches is exact.
DPI = 128

TEXT = "#1a1a1f"
FAINT = "#6e6e78"
RULE = "#e4e4e9"
# The palette of Okabe and Ito, distinct with any colour vision; the strongest colours first.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
MARKERS = ("o", "s", "D", "^", "v", "P", "X")


@contextmanager
def drawing(path: str | os.PathLike[str], width: int, height: int) -> Iterator[Figure]:
    """A context manager that gives a white figure to draw on, and writes it to `path` as PNG at the end."""
    if Path(path).suffix.lower() != ".png":
        raise BadOption(f"pictures are written as PNG; got the path {str(path)!r}. Let its name end in .png.")
    check_can_write(path)
    # A user's matplotlibrc must not change the figures.
    with matplotlib.rc_context({"font.family": "DejaVu Sans", "text.usetex": False, "axes.facecolor": "white"}):
        # Not by pyplot, which would keep the figure alive and look for a display.
        figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI, facecolor="white")
        canvas = FigureCanvasAgg(figure)
        yield figure
        canvas.draw()
    content = BytesIO()
    Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB").save(content, "PNG", optimize=True)
    _release(figure)
    write_atomically(path, content.getvalue())


def _release(figure: Figure) -> None:
    """Empty a figure that was drawn.

    Its parts refer to each other and to about 10 MB of pixels, which would stay in memory until the garbage collector
    comes by: in a process with many objects after a dozen figures.
    """
    for part in figure.findobj():
        vars(part).clear()
