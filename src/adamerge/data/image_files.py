"""Finds the image files of a folder with their labels, and reads them as RGB."""

import os
import warnings
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

from adamerge.core.errors import BadImages

# A warning names at most this many folders.
MOST_NAMED = 5


def find_images(root: str | Path, labelled: bool = True) -> tuple[list[str], list[tuple[str, int]]]:
    """The names of the class folders of an ImageFolder, and (path, label) of each image, in torchvision's order.

    Without `labelled`, a folder of images without class folders is one class.
    """
    if not Path(root).is_dir():
        raise BadImages(f"{root} is not a folder; expected one folder per class with images inside")
    root = root or "."
    classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))
    homes, above = [os.path.join(root, name) for name in classes], frozenset([os.path.realpath(root)])
    samples = [(path, label) for label, home in enumerate(homes) for path in _images_in(home, above)]
    if not samples and not labelled:
        classes, samples = [Path(root).name], [(path, 0) for path in images_below(root)]
    if not samples:
        raise _no_images(root, "no images in class folders (root/class/image.jpg)")
    empty = [classes[label] for label in sorted(set(range(len(classes))) - {label for _, label in samples})]
    if empty:
        named = ", ".join(empty[:MOST_NAMED]) + (", …" if len(empty) > MOST_NAMED else "")
        warnings.warn(
            f"{len(empty)} class folder(s) of {root} hold no images and are skipped, the other classes keep their "
            f"labels: {named}",
            stacklevel=4,
        )
    return classes, samples


def images_below(root: str | Path) -> list[str]:
    """The paths of all image files in a folder and below it, sorted by folder and then by name."""
    if not Path(root).is_dir():
        raise BadImages(f"{root} is not a folder; expected a folder of images")
    found = _images_in(str(root) or ".")
    if not found:
        raise _no_images(root, "no images")
    return found


def _no_images(root: str | Path, what: str) -> BadImages:
    return BadImages(f"{root} holds {what}; image files end in {', '.join(image_extensions())}")


def read_image(path: str | BytesIO) -> Any:
    """The image in a file, in RGB.  16 bits of grey become 8; Pillow would cut off all but the darkest."""
    from PIL import Image

    with warnings.catch_warnings():
        # About large images and about palettes with transparency; both are read as they should be.
        warnings.simplefilter("ignore")
        with Image.open(path) as image:
            if image.mode.startswith("I"):
                return image.convert("I").point(lambda grey: grey * (1 / 257)).convert("L").convert("RGB")
            return image.convert("RGB")


def _images_in(folder: str, above: frozenset[str] = frozenset()) -> list[str]:
    """The image files in a folder and below it, sorted by folder and then by name; links to `above` are left out."""
    extensions = image_extensions()
    return [
        os.path.join(home, name)
        for home, names in sorted(_walk(folder, above))
        for name in sorted(names)
        if name.lower().endswith(extensions)
    ]


def _walk(folder: str, above: frozenset[str] = frozenset()) -> Iterator[tuple[str, list[str]]]:
    """(folder, names of its files) of a folder and of all below it.

    Links are followed, except back to a folder on the way down.
    """
    real = os.path.realpath(folder)
    if real in above:
        return
    try:
        entries = list(os.scandir(folder))
    except OSError as error:
        raise BadImages(f"cannot read the folder {folder}: {error.strerror}") from error
    yield folder, [entry.name for entry in entries if not entry.is_dir()]
    for entry in entries:
        if entry.is_dir():
            yield from _walk(entry.path, above | {real})


def image_extensions() -> tuple[str, ...]:
    """How the names of image files end."""
    from torchvision.datasets.folder import IMG_EXTENSIONS

    return IMG_EXTENSIONS
