"""Figures measured in pixels, drawn without a display and written to disk whole or not at all."""

import os
import tempfile
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
    write_whole(path, content.getvalue())


def write_whole(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file so that a reader sees the old content or the new, never a part."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
