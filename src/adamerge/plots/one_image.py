"""Pictures of one image: its patches coloured by merged token (mosaic), or by the salience of their token (heat)."""

from typing import Literal

import numpy as np
from jaxtyping import Bool, Float, Int
from PIL import Image
from torch import Tensor

from adamerge.core.errors import BadImages, BadOption
from adamerge.core.plan import keep_all
from adamerge.runtime.trace import Trace

Pixels = Float[np.ndarray, "h w 3"]
Grid = Int[np.ndarray, "rows cols"]

# Fractions of a patch: half the width of the line, and the width of its dark rim.
LINE = 0.026
RIM = 0.03
# Pixels: a thinner line would look grey.
THINNEST_LINE = 0.75
# A light line with a dark rim is visible on light and on dark patches.
INK = np.array([1.0, 1.0, 1.0])
SHADE = np.array([0.0, 0.0, 0.0])
RIM_OPACITY = 0.5
# Kept patches have a frame of the first colour, merged ones a tint of the second.  They can be told apart with any
# colour vision, and in grey: merged patches have no frame.
KEPT = np.array([0.0, 0.62, 0.45])
MERGED = np.array([0.84, 0.37, 0.0])
KEPT_FRAME = 0.09
MERGED_OPACITY = 0.62
# Below this many pixels the line would cover the patch.
SMALLEST_PATCH = 4
# Tolerance for values outside [0, 1]; normalised images exceed it.
SLACK = 1e-3


def mosaic(image: Tensor, slots: Tensor, *, grid: tuple[int, int] | None = None, scale: int | float = 3) -> Image.Image:
    """Fill the patches of every merged token with their mean colour, and draw a line around each token.

    A line runs exactly where neighbouring patches belong to different tokens.  Patches of one token need not touch:
    the shared colour shows that they belong together.  A patch that is a token by itself shows its own pixels.

    Args:
        image: (3, height, width) in [0, 1].
        slots: for every patch, row by row, the token it is part of; `trace.slots(layer)[i]`.
        grid: rows and columns of patches; square unless given.
        scale: size of the picture relative to the image.
    """
    pixels, tokens = _lay(image, slots, grid)
    rows, cols = tokens.shape
    enlarged = _enlarge(pixels, tokens, scale)
    colours, alone = _mean_colours(pixels, tokens)
    canvas = np.where(_stretch(alone, enlarged)[..., None], enlarged, _stretch(colours, enlarged))

    patch = min(enlarged.shape[0] / rows, enlarged.shape[1] / cols)
    distance = _distance_to_border(tokens, *enlarged.shape[:2])
    # The coverage of a pixel is how far the line extends past its centre: anti-aliasing.
    reach = max(LINE * patch, THINNEST_LINE) + 0.5
    line = np.clip(reach - distance, 0, 1)[..., None]
    rim = RIM_OPACITY * np.clip(reach + RIM * patch - distance, 0, 1)[..., None]
    canvas = canvas + rim * (SHADE - canvas)
    return _picture(canvas + line * (INK - canvas))


def heat(
    image: Tensor,
    salience: Tensor,
    slots: Tensor,
    *,
    grid: tuple[int, int] | None = None,
    scale: int | float = 3,
    by: Literal["rank", "value"] = "rank",
) -> Image.Image:
    """Colour the patches of each token by its salience, dark to bright, over the image in grey.

    Args:
        image: (3, height, width) in [0, 1].
        salience: one number per token; `trace.layers[layer].salience[i]`.
        slots: for every patch, row by row, the token it is part of when its salience is measured; see `slots_entering`.
        grid: rows and columns of patches; square unless given.
        scale: size of the picture relative to the image.
        by: colour by rank among the image's tokens, or by value between the minimum and the maximum.  Softmax makes
            values very uneven, so ranks show more.
    """
    from matplotlib import colormaps

    if by not in ("rank", "value"):
        raise BadOption(f"by must be 'rank' or 'value'; got {by!r}")
    pixels, tokens = _lay(image, slots, grid)
    values = salience.detach().cpu().double().numpy()
    if values.ndim != 1 or tokens.max() >= len(values):
        raise BadOption(
            f"salience must be one number per token, for tokens 0 to {tokens.max()}; got shape {values.shape}. "
            "Are salience and slots of the same layer? The salience of layer l goes with slots_entering(trace, l)."
        )
    present, index = np.unique(tokens, return_inverse=True)
    if not np.isfinite(values[present]).all():
        raise BadOption("salience must be finite; it has NaN or infinity. Did the model give NaN on this image?")
    strength = (_ranks if by == "rank" else _portions)(values[present])[index].reshape(tokens.shape)
    enlarged = _enlarge(pixels, tokens, scale)
    colour = _stretch(colormaps["magma"](0.1 + 0.87 * strength)[..., :3], enlarged)
    grey = (enlarged @ np.array([0.299, 0.587, 0.114]))[..., None]
    return _picture(colour * (0.6 + 0.4 * grey) + 0.16 * grey)


def survivors(
    image: Tensor, kept: Tensor, *, grid: tuple[int, int] | None = None, scale: int | float = 3
) -> Image.Image:
    """Show which patches are still tokens of their own (a green frame) and which are merged (tinted in orange).

    Args:
        image: (3, height, width) in [0, 1].
        kept: for every patch, row by row, whether it is a token of its own.
        grid: rows and columns of patches; square unless given.
        scale: size of the picture relative to the image.
    """
    pixels, flags = _lay(image, kept.long(), grid)
    enlarged = _enlarge(pixels, flags, scale)
    high, wide = (side // count for side, count in zip(enlarged.shape, flags.shape, strict=False))
    y, x = np.arange(enlarged.shape[0]) % high + 0.5, np.arange(enlarged.shape[1]) % wide + 0.5
    inside = np.minimum.outer(np.minimum(y, high - y), np.minimum(x, wide - x))
    line = max(KEPT_FRAME * min(high, wide), 2 * THINNEST_LINE)
    frame = np.clip(line + 0.5 - inside, 0, 1)[..., None]
    grey = (enlarged @ np.array([0.299, 0.587, 0.114]))[..., None]
    tinted = (1 - MERGED_OPACITY) * grey + MERGED_OPACITY * MERGED * (0.55 + 0.45 * grey)
    return _picture(np.where(_stretch(flags > 0, enlarged)[..., None], enlarged + frame * (KEPT - enlarged), tinted))


def slots_entering(trace: Trace, layer: int) -> Int[Tensor, "b n"]:
    """For every patch (images, patches), the token it is part of when it enters `layer`, which measures salience."""
    depth = len(trace.layers)
    if not -depth <= layer < depth:
        raise BadOption(f"layer must be from 0 to {depth - 1} (or -{depth} to -1); got {layer}")
    layer %= depth
    return trace.slots(layer - 1) if layer else keep_all(len(trace.counts), trace.patches, trace.counts.device).slot


def _lay(image: Tensor, slots: Tensor, grid: tuple[int, int] | None) -> tuple[Pixels, Grid]:
    """The image as (height, width, 3) and its slots as (rows, columns)."""
    if image.dim() != 3 or image.shape[0] != 3 or image.numel() == 0 or not image.is_floating_point():
        raise BadImages(
            f"expected one image as floats (3, height, width) in [0, 1]; got {image.dtype} {tuple(image.shape)}"
        )
    pixels = image.detach().cpu().double().permute(1, 2, 0).numpy()
    low, high = pixels.min(), pixels.max()
    if not (low >= -SLACK and high <= 1 + SLACK):
        raise BadImages(
            f"expected an image in [0, 1]; got values from {low:.3g} to {high:.3g}. "
            "Undo the model's normalisation first: image * std + mean."
        )
    tokens = slots.detach().cpu().numpy()
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or tokens.size == 0 or tokens.min() < 0:
        raise BadOption(
            "slots must be whole numbers >= 0, one per patch, of one image; "
            f"got {slots.dtype} of shape {tuple(slots.shape)}. Use trace.slots(layer)[i] for image i."
        )
    rows, cols = grid_of(tokens.size, grid)
    if pixels.shape[0] % rows or pixels.shape[1] % cols:
        raise BadImages(
            f"an image of {pixels.shape[0]} x {pixels.shape[1]} pixels cannot be cut into {rows} x {cols} patches; "
            "pass the image at the size the model saw, or another grid"
        )
    return pixels.clip(0, 1), tokens.astype(np.int64).reshape(rows, cols)


def grid_of(patches: int, grid: tuple[int, int] | None) -> tuple[int, int]:
    """Rows and columns of `patches` patches: those given, or a square."""
    if grid is None:
        side = round(patches**0.5)
        if side * side != patches:
            raise BadOption(f"{patches} slots do not fill a square grid; pass grid=(rows, columns)")
        return side, side
    rows, cols = grid
    if rows < 1 or cols < 1 or rows * cols != patches:
        raise BadOption(f"grid={grid} has {rows * cols} patches but there are {patches} slots; the two must be equal")
    return rows, cols


def _enlarge(pixels: Pixels, tokens: Grid, scale: int | float) -> Float[np.ndarray, "height width 3"]:
    """The image at `scale`, rounded so that every patch has the same whole number of pixels."""
    rows, cols = tokens.shape
    if not 0 < scale < float("inf"):
        raise BadOption(f"scale must be a number above 0; got {scale}")
    patch = round(pixels.shape[0] // rows * scale), round(pixels.shape[1] // cols * scale)
    if min(patch) < SMALLEST_PATCH:
        raise BadOption(
            f"scale={scale} leaves patches of {patch[0]} x {patch[1]} pixels; "
            f"pass a scale that makes them at least {SMALLEST_PATCH} pixels wide"
        )
    height, width = rows * patch[0], cols * patch[1]
    if (height, width) == pixels.shape[:2]:
        return pixels
    image = _picture(pixels).resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(image, dtype=np.float64) / 255


def _stretch(values: np.ndarray, over: Pixels) -> np.ndarray:
    """Repeat values per patch for each pixel of the patch."""
    rows, cols = values.shape[:2]
    return values.repeat(over.shape[0] // rows, 0).repeat(over.shape[1] // cols, 1)


def _mean_colours(
    pixels: Pixels, tokens: Grid
) -> tuple[Float[np.ndarray, "rows cols 3"], Bool[np.ndarray, "rows cols"]]:
    """For each patch, the mean colour of its token's patches, and whether the token is this patch alone."""
    rows, cols = tokens.shape
    patches = pixels.reshape(rows, pixels.shape[0] // rows, cols, -1, 3).mean((1, 3)).reshape(-1, 3)
    _, index, members = np.unique(tokens, return_inverse=True, return_counts=True)
    index = index.reshape(-1)
    total = np.zeros((len(members), 3))
    np.add.at(total, index, patches)
    return (total / members[:, None])[index].reshape(rows, cols, 3), (members == 1)[index].reshape(rows, cols)


def _distance_to_border(tokens: Grid, height: int, width: int) -> Float[np.ndarray, "h w"]:
    """For each pixel, the distance of its centre from the nearest border between tokens, at most one patch.

    The nearest border is one of the four sides of the pixel's patch, or a corner where other borders end.
    """
    rows, cols = tokens.shape
    # above[i, j], left[i, j]: is there a border above, or left of, patch (i, j)?  One more row or column for the end.
    above = np.zeros((rows + 1, cols), bool)
    above[1:-1] = tokens[1:] != tokens[:-1]
    left = np.zeros((rows, cols + 1), bool)
    left[:, 1:-1] = tokens[:, 1:] != tokens[:, :-1]
    corner = np.zeros((rows + 1, cols + 1), bool)
    corner[:, :-1] |= above
    corner[:, 1:] |= above
    corner[:-1] |= left
    corner[1:] |= left

    patch_height, patch_width = height // rows, width // cols
    i, y = np.divmod(np.arange(height), patch_height)
    j, x = np.divmod(np.arange(width), patch_width)
    i, y, j, x = i[:, None], y[:, None] + 0.5, j[None], x[None] + 0.5
    far = float(max(patch_height, patch_width))
    distance = np.full((height, width), far)
    for down, dy in ((0, y), (1, patch_height - y)):
        distance = np.minimum(distance, np.where(above[i + down, j], dy, far))
        for right, dx in ((0, x), (1, patch_width - x)):
            distance = np.minimum(distance, np.where(left[i, j + right], dx, far))
            distance = np.minimum(distance, np.where(corner[i + down, j + right], np.hypot(dx, dy), far))
    return distance


def _ranks(values: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """The share of the other tokens that each one exceeds; equal values get equal ranks, 0.5 if all are equal."""
    if values.min() == values.max():
        return np.full(len(values), 0.5)
    return np.searchsorted(np.sort(values), values) / (len(values) - 1)


def _portions(values: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """Each value scaled from 0 (minimum) to 1 (maximum); 0.5 if all are equal."""
    low, high = values.min(), values.max()
    return (values - low) / (high - low) if high > low else np.full(len(values), 0.5)


def _picture(pixels: Pixels) -> Image.Image:
    return Image.fromarray((pixels.clip(0, 1) * 255).round().astype(np.uint8))
