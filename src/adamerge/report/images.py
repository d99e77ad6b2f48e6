"""The images that keep the fewest and the most tokens, as HTML."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from torch import Tensor

from adamerge.data.thumbnails import to_jpeg
from adamerge.report.charts import histogram

GROUPS = {"simplest": "Fewest tokens kept", "complex": "Most tokens kept"}


@dataclass(frozen=True)
class KeptImage:
    """An image with its number in the data, the tokens it keeps, and a JPEG file in base64."""

    number: int
    tokens: int
    jpeg: str


def from_tensors(tensors: Mapping[str, Tensor], kind: str) -> list[KeptImage]:
    """The images of one group in a stored result; none if the run did not record them."""
    if f"{kind}_images" not in tensors:
        return []
    files = [b64encode(to_jpeg(image)).decode() for image in tensors[f"{kind}_images"]]
    facts = (tensors[f"{kind}_{part}"].tolist() for part in ("numbers", "tokens"))
    return [KeptImage(number, tokens, file) for file, number, tokens in zip(files, *facts, strict=True)]


def kept_tokens(title: str, kept: Sequence[int], patches: int, groups: Mapping[str, Sequence[KeptImage]]) -> str:
    """The histogram of the tokens that images keep, and the images at both ends."""
    drawn = histogram(f"{title}: tokens kept of {patches}", "patch tokens after the last layer", kept)
    shown = "".join(
        f'<h3>{GROUPS[kind]}</h3><div class="images">{"".join(map(_image, images))}</div>'
        for kind, images in groups.items()
        if images
    )
    return f'<div class="charts">{drawn}<div>{shown or _NONE}</div></div>'


_NONE = '<p class="note">The run recorded no images.</p>'


def _image(image: KeptImage) -> str:
    alt = f"image {image.number}, {image.tokens} tokens"
    return (
        f'<figure><img src="data:image/jpeg;base64,{escape(image.jpeg)}" width="96" height="96" alt="{alt}">'
        f"<figcaption>{image.tokens} tokens<br>image {image.number}</figcaption></figure>"
    )
