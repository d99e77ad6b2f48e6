"""Small copies of the images that keep the fewest and the most tokens, for reports."""

from io import BytesIO

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.nn.functional import interpolate

from adamerge.data.folders import denormalise
from adamerge.distributed import in_order, place

EACH, SIDE = 4, 96


class Extremes:
    """Collects, batch by batch, the `EACH` images with the fewest tokens and the `EACH` with the most.

    Images with equal counts stay in their order.  Nothing is collected for models of video.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.lowest: list[tuple[int, int, Tensor]] = []
        self.highest: list[tuple[int, int, Tensor]] = []

    def add(self, images: Tensor, kept: Int[Tensor, " n"]) -> None:
        """Look at a batch of preprocessed images and at the tokens that each one keeps at the end."""
        counts = kept.tolist()
        first = sum(self.sizes)
        self.sizes.append(len(counts))
        if images.dim() != 4 or images.shape[1] != 3:
            return
        order = sorted(range(len(counts)), key=lambda index: counts[index])
        self.lowest = self._best(self.lowest, images, counts, order[:EACH], first)
        most = sorted(range(len(counts)), key=lambda index: -counts[index])
        self.highest = self._best(self.highest, images, counts, most[:EACH], first, -1)

    @staticmethod
    def _best(
        known: list[tuple[int, int, Tensor]], images: Tensor, counts: list[int], chosen: list[int], first: int, sign=1
    ) -> list[tuple[int, int, Tensor]]:
        limit = sign * known[-1][0] if len(known) == EACH else None
        new = [
            (counts[index], first + index, _small(images[index]))
            for index in chosen
            if limit is None or sign * counts[index] < limit
        ]
        return sorted([*known, *new], key=lambda entry: (sign * entry[0], entry[1]))[:EACH]

    @property
    def differ(self) -> bool:
        """Whether images kept different numbers of tokens."""
        return bool(self.lowest) and self.lowest[0][0] != self.highest[0][0]

    def _share(self) -> None:
        """Take in the images of the other processes that share the images; numbers are then those among all images."""
        mine = (self.sizes, self.lowest, self.highest)
        shares = in_order([mine])
        starts, total = [[] for _ in shares], 0
        for batch in range(max(len(sizes) for sizes, _, _ in shares)):
            for (sizes, _, _), firsts in zip(shares, starts, strict=True):
                if batch < len(sizes):
                    firsts.append(total)
                    total += sizes[batch]
        low = [_renumber(entry, s[0], firsts) for s, firsts in zip(shares, starts, strict=True) for entry in s[1]]
        high = [_renumber(entry, s[0], firsts) for s, firsts in zip(shares, starts, strict=True) for entry in s[2]]
        self.sizes = [total]
        self.lowest = sorted(low, key=lambda entry: (entry[0], entry[1]))[:EACH]
        self.highest = sorted(high, key=lambda entry: (-entry[0], entry[1]))[:EACH]

    def tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """The images as bytes (n, 3, side, side), their numbers and their tokens; nothing if all keep the same."""
        if place().world > 1:
            self._share()
        if not self.differ:
            return {}
        found: dict[str, Tensor] = {}
        for name, entries in (("simplest", self.lowest), ("complex", self.highest)):
            pixels = denormalise(model, torch.stack([image for _, _, image in entries]))
            found[f"{name}_images"] = (pixels.clamp(0, 1) * 255).round().byte()
            found[f"{name}_numbers"] = torch.tensor([number for _, number, _ in entries])
            found[f"{name}_tokens"] = torch.tensor([count for count, _, _ in entries])
        return found


def _renumber(entry: tuple[int, int, Tensor], sizes: list[int], firsts: list[int]) -> tuple[int, int, Tensor]:
    """An entry with its number among all images, where batches of `sizes` begin at the numbers `firsts`."""
    tokens, number, image = entry
    for size, first in zip(sizes, firsts, strict=True):
        if number < size:
            return tokens, first + number, image
        number -= size
    raise AssertionError("an entry has a number of one of the batches")


def _small(image: Tensor) -> Tensor:
    """A square copy (3, side, side) in float32 on the CPU."""
    return interpolate(image[None].float(), (SIDE, SIDE), mode="bilinear", antialias=True)[0].cpu()


def to_jpeg(pixels: Tensor) -> bytes:
    """An image (3, height, width) of bytes as a JPEG file."""
    from PIL import Image

    content = BytesIO()
    Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy()).save(content, "JPEG", quality=80)
    return content.getvalue()
