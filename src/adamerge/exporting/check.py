"""Compares what an exported file gives, run by its own engine, with the model that it was made from."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from adamerge.evaluation import kl_divergence

# An image counts as different from here on, times the largest output where that is more than 1.  Half precision
# rounds more, and rounding changes which of two nearly equal tokens merges.
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.05}
# The share of images that may be different, because rounding decided between two nearly equal links.
MAY_DIFFER = 0.02


@dataclass(frozen=True)
class Check:
    """The exported file compared with the merged model in torch, on the same images.

    Attributes:
        images: how many images were compared.
        largest_difference: of any number in any output.
        median_difference: the median over images of the largest difference of an image.
        differing: the share of images whose difference is more than rounding.  Where two links are equally good up to
            rounding, two engines can merge different tokens.
        agreement: the share of images with the same first choice; None if the model is no classifier.
        kl: the mean KL divergence of the predicted distributions; None if the model is no classifier.
    """

    images: int
    largest_difference: float
    median_difference: float
    differing: float
    agreement: float | None = None
    kl: float | None = None

    @property
    def passed(self) -> bool:
        """Whether the file gives what the model gives."""
        return self.differing <= MAY_DIFFER

    def __str__(self) -> str:
        shown = f"{self.images} images, largest difference {self.largest_difference:.2g}"
        if self.differing:
            shown += f", {self.differing:.1%} of the images merge other tokens"
        if self.agreement is not None and self.kl is not None:
            shown += f", top-1 agreement {self.agreement:.2%}, KL {self.kl:.2g}"
        return shown


def compare(expected: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> Check:
    """Compare outputs by name; each is `(images, …)`."""
    differences = []
    for name, want in expected.items():
        found = given[name]
        if found.shape != want.shape:
            raise ValueError(f"output {name} has shape {tuple(found.shape)}, not {tuple(want.shape)}")
        gap = (found.double() - want.double()).abs().flatten(1).amax(1)
        differences.append(gap / max(1.0, float(want.abs().max())))
    worst = torch.stack(differences).amax(0).nan_to_num(float("inf"))
    first = next(iter(expected.values()))
    tolerance = TOLERANCE[first.dtype]
    agreement = kl = None
    name = "logits" if "logits" in expected else next(iter(expected))
    if len(expected) <= 2 and expected[name].dim() == 2 and expected[name].shape[1] > 1:
        want, found = (side[name].double().log_softmax(1) for side in (expected, given))
        agreement = (want.argmax(1) == found.argmax(1)).double().mean().item()
        kl = kl_divergence(want, found).mean().item()
    largest = max((given[name].double() - want.double()).abs().max().item() for name, want in expected.items())
    differing = (worst > tolerance).double().mean().item()
    return Check(len(first), largest, worst.median().item(), differing, agreement, kl)
