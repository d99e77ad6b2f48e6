"""What merging did to one image or video, patch by patch and layer by layer: the data of all pictures of it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from adamerge.core.errors import BadImages
from adamerge.plots.one_image import slots_entering
from adamerge.runtime.trace import Trace

# Frames that one token in time covers, the likely ones first.
TUBELETS = (2, 1, 4, 8, 3)


@dataclass(frozen=True)
class ImageView:
    """One image, or one video, and how one method merged its patches.

    Attributes:
        name: what the image is called.
        method: what the method is called.
        pixels: what the model saw, in [0, 1]; the frames of a video stand one below the other.
        moments: how many frames there are; 1 for an image.
        grid: rows and columns of patches, of all frames together.
        entering: for each layer, the token that each patch is part of when it enters the layer.
        leaving: likewise, when it leaves the layer.
        salience: for each layer, the salience of the token of each patch when it enters the layer.
        counts: how many tokens leave each layer.
        before: what the unmerged model says, in words, the strongest first.
        after: what the merged model says.
        cut: the share of the multiply-accumulates that merging saved on this image.
    """

    name: str
    method: str
    pixels: Float[Tensor, "3 height width"]
    moments: int
    grid: tuple[int, int]
    entering: Int[Tensor, "layers patches"]
    leaving: Int[Tensor, "layers patches"]
    salience: Float[Tensor, "layers patches"]
    counts: tuple[int, ...]
    before: Sequence[str] = ()
    after: Sequence[str] = ()
    cut: float = 0.0

    @property
    def depth(self) -> int:
        """How many layers there are."""
        return len(self.counts)

    @property
    def patches(self) -> int:
        """How many patches there are."""
        return self.leaving.shape[1]

    def sizes(self, layer: int) -> Int[Tensor, " patches"]:
        """For each patch, how many patches its token stands for after `layer`."""
        slots = self.leaving[layer]
        return torch.bincount(slots, minlength=self.counts[layer])[slots]

    def kept(self, layer: int) -> Bool[Tensor, " patches"]:
        """For each patch, whether it is still a token of its own after `layer`; the others are merged."""
        return self.sizes(layer) == 1


def view_of(trace: Trace, image: int, *, name: str, method: str, frames: Tensor, shape: Sequence[int]) -> ImageView:
    """The view of one image of a trace.

    `frames` is what the model saw, (3, height, width) or (frames, 3, height, width) in [0, 1]; `shape` is the shape of
    one input of the model, without the batch.
    """
    moments, (rows, cols) = layout(trace.patches, shape)
    seen = frames if frames.dim() == 4 else frames[None]
    shown = seen[:: max(len(seen) // moments, 1)][:moments]
    depth = len(trace.layers)
    entering = torch.stack([slots_entering(trace, layer)[image] for layer in range(depth)]).cpu()
    salience = [trace.layers[layer].salience[image].float().cpu()[entering[layer]] for layer in range(depth)]
    return ImageView(
        name=name,
        method=method,
        pixels=torch.cat(list(shown), 1).float().cpu(),
        moments=moments,
        grid=(moments * rows, cols),
        entering=entering,
        leaving=torch.stack([trace.slots(layer)[image] for layer in range(depth)]).cpu(),
        salience=torch.stack(salience),
        counts=tuple(trace.counts[image].tolist()),
    )


def layout(patches: int, shape: Sequence[int]) -> tuple[int, tuple[int, int]]:
    """How many moments in time the patches of an input cover, and the rows and columns of patches in each.

    `shape` is (3, height, width), or (frames, 3, height, width) for a video.
    """
    *before, _, height, width = shape
    frames = before[0] if before else 1
    for tubelet in TUBELETS if before else (1,):
        moments = frames // tubelet
        if frames % tubelet or moments == 0 or patches % moments:
            continue
        rows = round((patches / moments * height / width) ** 0.5)
        cols = patches // moments // max(rows, 1)
        whole = rows * cols * moments == patches and height % rows == 0 and width % cols == 0
        if whole and height // rows == width // cols:
            return moments, (rows, cols)
    raise BadImages(f"{patches} patches do not fill a grid on an input of shape {tuple(shape)}; it cannot be drawn")
