"""Draws an `ExploredImage` as HTML: numbers, and for each layer the tokens with their borders and the salience."""

from base64 import b64encode
from html import escape
from io import BytesIO

import numpy as np
from PIL import Image

from adamerge.explore.explorer import ExploredImage, LayerView, MethodView, ModelAnswer

# From dark blue over grey to yellow, like cividis: the order is the same in any colour vision and in grey.
SCALE = np.array([[0, 32, 77], [57, 72, 108], [124, 123, 120], [187, 173, 108], [255, 234, 70]], float)

WITH_SALIENCE = (
    '<h3>Tokens and salience at each block</h3><p class="faint">Left: tokens that live after the block, each with the '
    "mean colour of its patches. Right: salience of what entered it, dark blue low, yellow high.</p>"
)
WITHOUT = (
    '<h3>Tokens at each block</h3><p class="faint">Tokens that live after the block, each with the mean colour of its '
    "patches. This method uses no salience.</p>"
)


def render(view: ExploredImage) -> str:
    """The whole result."""
    methods = "".join(_method(one, view) for one in view.methods)
    picture = _picture(view.pixels, "the image as the model sees it")
    return (
        f'<div class="view"><section class="card" aria-label="unmerged"><h2>unmerged</h2>{picture}'
        f"{_answer(view.unmerged)}{_costs(view.unmerged)}</section>{methods}</div>"
    )


def _method(one: MethodView, view: ExploredImage) -> str:
    """One method: its numbers beside the unmerged ones, its last layer, and all layers."""
    knob = "" if one.knob is None else f' <span class="faint">at {one.knob:g}</span>'
    same = one.answer.classes[0][0] == view.unmerged.classes[0][0]
    verdict = "✓ same class as unmerged" if same else "✗ another class than unmerged"
    last = one.layers[-1]
    salient = any(_salient(layer) for layer in one.layers)
    tiles = "".join(_layer(number, layer, view, salient) for number, layer in enumerate(one.layers))
    big = _tokens(last, view, f"{last.tokens} tokens after the last block")
    return (
        f'<section class="card method" aria-label="{escape(one.label)}"><h2>{escape(one.label)}{knob}</h2>{big}'
        f'<p class="tokens"><strong>{last.tokens}</strong> of {one.patches} tokens left</p>{_answer(one.answer)}'
        f'<p class="{"same" if same else "differs"}">{verdict}</p>{_costs(one.answer, view.unmerged)}'
        f"{WITH_SALIENCE if salient else WITHOUT}"
        f'<div class="tiles{"" if salient else " small"}">{tiles}</div></section>'
    )


def _salient(layer: LayerView) -> bool:
    return bool(layer.salience.min() < layer.salience.max())


def _layer(number: int, layer: LayerView, view: ExploredImage, salient: bool) -> str:
    """The tokens after a block, beside its salience where the method has any."""
    drawn = _tokens(layer, view, f"block {number}: {layer.tokens} tokens")
    if salient:
        beside = '<span class="faint">no salience is used here</span>'
        if _salient(layer):
            beside = _image(_coloured(layer.salience), f"salience before block {number}")
        drawn = f'<div class="pair">{drawn}{beside}</div>'
    return f"<figure>{drawn}<figcaption>block {number}: {layer.tokens}</figcaption></figure>"


def _answer(answer: ModelAnswer) -> str:
    """The likeliest classes with bars."""
    lines = "".join(
        f'<li><span class="share" style="width:{100 * share:.1f}%"></span><span class="class">{escape(name)}</span> '
        f"<span>{share:.1%}</span></li>"
        for name, share in answer.classes
    )
    return f'<ol class="classes">{lines}</ol>'


def _costs(answer: ModelAnswer, full: ModelAnswer | None = None) -> str:
    saved = "" if full is None else f" ({answer.gmacs / full.gmacs - 1:+.0%})"
    faster = "" if full is None else f" ({full.milliseconds / answer.milliseconds:.2f}×)"
    return (
        f'<p class="costs"><span>{answer.gmacs:.4f} GMACs{saved}</span> '
        f"<span>{answer.milliseconds:.1f} ms{faster}</span></p>"
    )


def _tokens(layer: LayerView, view: ExploredImage, label: str) -> str:
    """The mean colour of each token, and lines between tokens."""
    rows, cols = layer.slots.shape
    height, width = view.pixels.shape[:2]
    patches = view.pixels.reshape(rows, height // rows, cols, width // cols, 3).mean((1, 3)).reshape(-1, 3)
    _, index, members = np.unique(layer.slots, return_inverse=True, return_counts=True)
    index = index.reshape(-1)
    total = np.zeros((len(members), 3))
    np.add.at(total, index, patches)
    colours = (total / members[:, None])[index].reshape(rows, cols, 3)
    return _image((255 * colours).round().astype(np.uint8), label, _borders(layer.slots))


def _borders(slots: np.ndarray) -> str:
    """A path along all borders between tokens, in units of patches."""
    above, left = np.argwhere(slots[1:] != slots[:-1]), np.argwhere(slots[:, 1:] != slots[:, :-1])
    return "".join([f"M{x} {y + 1}h1" for y, x in above.tolist()] + [f"M{x + 1} {y}v1" for y, x in left.tolist()])


def _coloured(values: np.ndarray) -> np.ndarray:
    """Values by rank on the colour scale."""
    order = np.unique(values, return_inverse=True)[1].reshape(values.shape).astype(float)
    share = order / order.max() if order.max() > 0 else np.full(values.shape, 0.5)
    at = share * (len(SCALE) - 1)
    low = np.minimum(at.astype(int), len(SCALE) - 2)
    part = (at - low)[..., None]
    return (SCALE[low] * (1 - part) + SCALE[low + 1] * part).round().astype(np.uint8)


def _image(pixels: np.ndarray, label: str, borders: str = "") -> str:
    """One pixel for each patch, enlarged without smoothing, with borders over it."""
    rows, cols = pixels.shape[:2]
    lines = f'<path d="{borders}" fill="none" stroke="#000" stroke-width=".1"/>' if borders else ""
    lines += f'<path d="{borders}" fill="none" stroke="#fff" stroke-width=".04"/>' if borders else ""
    source = f'href="{_png(pixels)}" width="{cols}" height="{rows}" style="image-rendering:pixelated"'
    return (
        f'<svg class="grid" viewBox="0 0 {cols} {rows}" role="img" aria-label="{escape(label)}">'
        f"<image {source}/>{lines}</svg>"
    )


def _picture(pixels: np.ndarray, label: str) -> str:
    return f'<img class="grid" alt="{escape(label)}" src="{_png((255 * pixels).round().astype(np.uint8))}">'


def _png(pixels: np.ndarray) -> str:
    content = BytesIO()
    Image.fromarray(pixels).save(content, "PNG")
    return f"data:image/png;base64,{b64encode(content.getvalue()).decode()}"
