"""Single images and videos by path, as a model takes them and as a person sees them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from adamerge.core.errors import BadImages
from adamerge.data.folders import preprocessing
from adamerge.data.image_files import find_images, image_extensions, read_image
from adamerge.hosts.base import find_host

# The word that stands for generated images, and how many of them it gives; `embedded:8` gives 8.
EMBEDDED, EMBEDDED_NUMBER = "embedded", 4


@dataclass(frozen=True)
class Input:
    """An image or a video: its name, and its file or the files of its frames.  A drawn image has a number instead."""

    name: str
    files: tuple[str, ...] = ()
    drawn: int | None = None

    @property
    def source(self) -> str:
        """Where it comes from, in words."""
        return (
            self.name if not self.files else self.files[0] if len(self.files) == 1 else str(Path(self.files[0]).parent)
        )

    def stamp(self) -> list[Any]:
        """What changes when one of its files changes: paths, sizes and times."""
        return [[file, Path(file).stat().st_size, Path(file).stat().st_mtime_ns] for file in self.files] or [self.drawn]


def find_inputs(words: Sequence[str], *, video: bool = False) -> list[Input]:
    """The images that paths name: files, folders of images, or `embedded`; names are unique.

    For a model of videos a folder holds the frames of one video, in the order of their names.
    """
    found: list[Input] = []
    for word in words:
        path = Path(word)
        if path.is_dir():
            files = [file for file, _ in find_images(word, labelled=False)[1]]
            found += [Input(path.resolve().name, tuple(files))] if video else [Input(Path(f).stem, (f,)) for f in files]
        elif path.exists():
            found.append(Input(path.stem, (word,)))
        elif word.split(":")[0] == EMBEDDED and not video:
            found += [Input(f"embedded-{index}", drawn=index) for index in range(_number(word))]
        else:
            raise BadImages(
                f"there is no file or folder {word!r}; give image files ({', '.join(image_extensions())}), folders of "
                f"images, or {EMBEDDED!r} for generated images"
            )
    return list(_with_unique_names(found))


def _number(word: str) -> int:
    text = word.partition(":")[2] or str(EMBEDDED_NUMBER)
    if not text.isdecimal() or int(text) < 1:
        raise BadImages(f"{EMBEDDED}:NUMBER gives that many generated images, at least 1; got {word!r}")
    return int(text)


def _with_unique_names(inputs: Sequence[Input]) -> Iterator[Input]:
    taken: set[str] = set()
    for one in inputs:
        name, number = one.name, 2
        while name in taken:
            name, number = f"{one.name}-{number}", number + 1
        taken.add(name)
        yield Input(name, one.files, one.drawn)


class InputReader:
    """Reads inputs with the preprocessing of a model."""

    def __init__(self, model: nn.Module):
        from timm.data import create_transform  # pyright: ignore[reportPrivateImportUsage]

        self.model, self.shape = model, find_host(model).image
        self.settings: dict[str, Any] = {**preprocessing(model), "input_size": self.shape[-3:]}
        self.transform: Any = create_transform(**self.settings, is_training=False)

    @property
    def video(self) -> bool:
        """Whether the model takes videos."""
        return len(self.shape) == 4

    def read(self, one: Input) -> Tensor:
        """The input as the model takes it, without a batch; raises BadImages if a file cannot be read."""
        if one.drawn is not None:
            return self._drawn(one.drawn)
        try:
            pictures = [frame for file in one.files for frame in _frames(file, self.video)]
        except Exception as error:  # for damaged files Pillow raises many types, even SyntaxError
            raise BadImages(f"{one.source} cannot be read as an image: {error or type(error).__name__}") from error
        if not self.video:
            return self.transform(pictures[0])
        wanted = self.shape[0]
        chosen = [pictures[index * len(pictures) // wanted] for index in range(wanted)]
        return torch.stack([self.transform(picture) for picture in chosen])

    def pixels(self, seen: Tensor) -> Tensor:
        """What the model saw, with values in [0, 1]."""
        mean, std = (torch.tensor(self.settings[name])[:, None, None] for name in ("mean", "std"))
        return (seen.cpu().float() * std + mean).clamp(0, 1)

    def _drawn(self, index: int) -> Tensor:
        from adamerge.embedded import scenes
        from adamerge.embedded.scene_generator import TEST_SEED

        mean, std = (torch.tensor(self.settings[name])[:, None, None] for name in ("mean", "std"))
        _, height, width = self.shape
        if height != width:
            raise BadImages(f"generated images are square and this model takes {height}×{width}; give an image file")
        return (scenes(index, 1, seed=TEST_SEED, size=height).images[0] - mean) / std


def _frames(file: str, video: bool) -> list[Any]:
    """The picture in a file; all pictures of an animation, for a video."""
    if not video:
        return [read_image(file)]
    from PIL import Image, ImageSequence

    with Image.open(file) as image:
        return [frame.convert("RGB") for frame in ImageSequence.Iterator(image)]
