"""What the page shows, computed: one image through a model, unmerged and with a method."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from adamerge.core.errors import BadOption
from adamerge.data.folders import denormalise, preprocessing
from adamerge.data.image_tensors import drawn_images
from adamerge.embedded.scene_generator import CALIBRATION_SEED
from adamerge.explore.ladders import IMAGES, Ladder, Rung, at_count, at_cut, build_ladder
from adamerge.flops import Meter, meter
from adamerge.hosts.base import find_host
from adamerge.patching.apply import applied, trace
from adamerge.plots.one_image import grid_of, slots_entering
from adamerge.runtime.trace import Trace
from adamerge.timing import time_call

# Each time is the least of this many calls.
CALLS = 3
TOP = 3
CUT, COUNT = "compute saved", "r or r_max"


@dataclass(frozen=True)
class ModelAnswer:
    """What a model says about an image: the likeliest classes with their probabilities, its cost and its time."""

    classes: Sequence[tuple[str, float]]
    gmacs: float
    milliseconds: float


@dataclass(frozen=True)
class LayerView:
    """The tokens after one layer's merge, as a number for each patch; and the salience of the patches before it."""

    tokens: int
    slots: np.ndarray
    salience: np.ndarray


@dataclass(frozen=True)
class MethodView:
    """An image with a method."""

    label: str
    knob: float | None
    answer: ModelAnswer
    layers: Sequence[LayerView]
    patches: int


@dataclass(frozen=True)
class ExploredImage:
    """An image as the model sees it, (height, width, 3) in [0, 1], the unmerged answer, and each method."""

    pixels: np.ndarray
    unmerged: ModelAnswer
    methods: Sequence[MethodView]


@dataclass
class ExploredModel:
    """A model of the page, the names of its classes, and the recipes of each method that somebody looked at."""

    model: nn.Module
    class_names: Sequence[str]
    ladders: dict[str, Ladder] = field(default_factory=dict)
    lock: Lock = field(default_factory=Lock)

    def look(self, image: Image.Image, labels: Sequence[str], mode: str, strength: float) -> ExploredImage:
        """Run the image unmerged and with each method; one visitor at a time, because methods change the model."""
        if mode not in (CUT, COUNT):
            raise BadOption(f"mode must be {CUT!r} or {COUNT!r}; got {mode!r}")
        with self.lock, torch.inference_mode():
            batch = self._preprocessed(image)
            prices = meter(self.model)
            unmerged = self._answer(batch, prices.unmerged().true.item())
            pixels = denormalise(self.model, batch)[0].permute(1, 2, 0).clamp(0, 1).float().cpu().numpy()
            return ExploredImage(pixels, unmerged, [self._merged(batch, prices, one, mode, strength) for one in labels])

    def _merged(self, batch: Tensor, prices: Meter, label: str, mode: str, strength: float) -> MethodView:
        rung = self._rung(label, mode, strength)
        with applied(self.model, rung.recipe):
            self.model(batch)
            seen = trace(self.model)
            cost = prices.cost(seen.counts, rung.recipe).true.mean().item()
            return MethodView(label, rung.knob, self._answer(batch, cost), _layers(seen), seen.patches)

    def _rung(self, label: str, mode: str, strength: float) -> Rung:
        if label not in self.ladders:
            images = drawn_images(self.model, IMAGES, seed=CALIBRATION_SEED)
            self.ladders[label] = build_ladder(self.model, images, label)
        ladder = self.ladders[label]
        return at_cut(ladder, strength) if mode == CUT else at_count(ladder, label, strength)

    def _preprocessed(self, image: Image.Image) -> Tensor:
        """The image as a batch for the model."""
        from timm.data import create_transform  # pyright: ignore[reportPrivateImportUsage]

        parameter = next(self.model.parameters())
        transform: Any = create_transform(**preprocessing(self.model), is_training=False)
        return transform(image)[None].to(parameter.device, parameter.dtype)

    def _answer(self, batch: Tensor, macs: float) -> ModelAnswer:
        """The classes of the model as it is now, merged or not."""
        calls = [time_call(lambda: self.model(batch), batch.device) for _ in range(CALLS)]
        output = calls[0][0]
        shares = getattr(output, "logits", output)[0].float().softmax(0)
        best = shares.topk(min(TOP, len(shares)))
        named = [
            (self._name(index), share) for index, share in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]
        return ModelAnswer(named, macs / 1e9, 1e3 * min(seconds for _, seconds in calls))

    def _name(self, index: int) -> str:
        return self.class_names[index] if index < len(self.class_names) else f"class {index}"


def check_explorable(model: nn.Module) -> None:
    """Refuse a model that the page cannot show: it needs one square grid of patches."""
    channels, *size = find_host(model).image
    if channels != 3 or len(size) != 2 or size[0] != size[1]:
        raise BadOption(f"explore needs a model of square RGB images; this one takes {find_host(model).image}")


def _layers(seen: Trace) -> list[LayerView]:
    """The tokens and the salience of the first image at each layer, on the grid of patches."""
    grid = grid_of(seen.patches, None)
    found = []
    for layer, step in enumerate(seen.layers):
        slots = seen.slots(layer)[0].cpu().numpy().reshape(grid)
        entering = slots_entering(seen, layer)[0].cpu().numpy()
        salience = step.salience[0].float().cpu().numpy()[entering].reshape(grid)
        found.append(LayerView(int(seen.counts[0, layer]), slots, salience))
    return found
