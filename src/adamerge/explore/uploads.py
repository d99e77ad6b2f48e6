"""Reads an uploaded image.  Its size is checked before it is decoded, and its file is deleted afterwards."""

import os
import warnings
from pathlib import Path

from PIL import Image

from adamerge.core.errors import BadImages
from adamerge.data.image_files import read_image

MOST_BYTES = 20_000_000
MOST_PIXELS = 50_000_000
# What is kept in memory for as long as a visitor looks at it; no model of the page needs more.
LARGEST_SIDE = 1024
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")


def take_upload(path: str | os.PathLike[str]) -> Image.Image:
    """The image in an uploaded file, in RGB and not larger than needed; the file is deleted."""
    try:
        return _read(Path(path))
    finally:
        Path(path).unlink(missing_ok=True)


def _read(path: Path) -> Image.Image:
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise BadImages(f"the file has {size / 1e6:.1f} MB and may have {MOST_BYTES / 1e6:g}; give a smaller one")
    width, height = _header(path)
    if width * height > MOST_PIXELS:
        raise BadImages(
            f"the image has {width} × {height} = {width * height / 1e6:.1f} megapixels and may have "
            f"{MOST_PIXELS / 1e6:g}; give a smaller one"
        )
    try:
        image = read_image(str(path))
    except Exception as error:  # for damaged files Pillow raises many types, even SyntaxError
        raise BadImages(f"the image is damaged ({error}); give another file") from error
    image.thumbnail((LARGEST_SIDE, LARGEST_SIDE))
    return image


def _header(path: Path) -> tuple[int, int]:
    """Width and height, without decoding the pixels."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with Image.open(path, formats=FORMATS) as image:
                return image.size
        except Image.DecompressionBombError as error:
            raise BadImages(
                f"the image has far more than {MOST_PIXELS / 1e6:g} megapixels; give a smaller one"
            ) from error
        except Exception as error:  # see above
            raise BadImages(
                f"the file is not an image that can be read; {', '.join(FORMATS)} are known. Give another file."
            ) from error
