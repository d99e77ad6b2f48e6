"""Evaluates a recipe on labelled images: accuracy, agreement with the unmerged model, cost and speed."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from tqdm import tqdm

from adamerge.core.errors import BadImages, UnsupportedModel
from adamerge.core.recipe import Recipe
from adamerge.data.batches import labelled_batches, number_of_batches
from adamerge.data.thumbnails import Extremes
from adamerge.distributed import in_order, my_share, place
from adamerge.flops import Cost, meter
from adamerge.hosts.base import find_host
from adamerge.patching.apply import apply, stack_of, temporarily_patched, trace
from adamerge.patching.stack import install
from adamerge.runtime.backend import Runtime
from adamerge.timing import time_call


@dataclass(frozen=True)
class Evaluation:
    """Results of a merged model and of the unmerged model on the same `n` images.

    Attributes:
        top1: whether the merged model's first choice is the label.
        top5: whether the label is among the merged model's first five choices.
        full_top1: whether the unmerged model's first choice is the label.
        agreement: whether both models have the same first choice.
        kl: KL(unmerged || merged) of the predicted distributions.
        cost: multiply-accumulates of each image.
        full_cost: multiply-accumulates of the unmerged model.
        r: tokens merged in each image at each of `l` layers.
        seconds: time of the merged model for the timed images.
        full_seconds: time of the unmerged model for the same images.
        timed: number of timed images.
        patches: the patch tokens that every image starts with.
        extremes: small copies of the images that keep the fewest and the most tokens, by the names of their parts.
    """

    top1: Bool[Tensor, " n"]
    top5: Bool[Tensor, " n"]
    full_top1: Bool[Tensor, " n"]
    agreement: Bool[Tensor, " n"]
    kl: Float[Tensor, " n"]
    cost: Cost
    full_cost: Cost
    r: Int[Tensor, "n l"]
    seconds: float
    full_seconds: float
    timed: int
    patches: int
    extremes: dict[str, Tensor] = field(default_factory=dict, repr=False)

    @property
    def kept(self) -> Int[Tensor, " n"]:
        """The patch tokens that each image has after the last layer."""
        return self.patches - self.r.sum(1)

    def summary(self) -> dict[str, Any]:
        """Means over the images, as JSON data: accuracies as fractions, costs in 10^9 multiply-accumulates."""
        merged = self.r.sum(1).double()
        return {
            "images": len(self.top1),
            "top1": self.top1.double().mean().item(),
            "top5": self.top5.double().mean().item(),
            "top1_unmerged": self.full_top1.double().mean().item(),
            "agreement": self.agreement.double().mean().item(),
            "kl": self.kl.mean().item(),
            "gmacs_paper": self.cost.paper.mean().item() / 1e9,
            "gmacs_true": self.cost.true.mean().item() / 1e9,
            "gmacs_paper_unmerged": self.full_cost.paper.item() / 1e9,
            "gmacs_true_unmerged": self.full_cost.true.item() / 1e9,
            "merged_mean": merged.mean().item(),
            "merged_std": merged.std(correction=0).item(),
            "r_per_layer": self.r.double().mean(0).tolist(),
            "images_per_second": self.timed / self.seconds,
            "images_per_second_unmerged": self.timed / self.full_seconds,
            "speedup": self.full_seconds / self.seconds,
        }


def evaluate(
    model: nn.Module,
    data: Iterable[Any],
    recipe: Recipe,
    *,
    runtime: Runtime = "auto",
    progress: bool = True,
) -> Evaluation:
    """Run `model` unmerged and with `recipe` over labelled images; the model is restored afterwards.

    `data` gives batches of (images, labels), or dicts with `pixel_values` and `labels` or `label`.  `runtime` is as in
    `apply`.  Both models are timed on the same batches, alternating.  The first batch is a warm-up and not timed,
    unless it is the only one.
    """
    rows: list[tuple[Tensor, ...]] = []
    seconds: list[tuple[int, float, float]] = []
    host, extremes = find_host(model), Extremes()
    with temporarily_patched(model), torch.inference_mode():
        apply(model, recipe, runtime)
        merging = stack_of(model)
        shown = tqdm(data, desc="evaluating", total=number_of_batches(data), disable=not progress)
        for images, labels in my_share(labelled_batches(shown), data):
            parameter = next(model.parameters())
            images, labels = images.to(parameter.device, parameter.dtype), labels.to(parameter.device)
            install(host, host.container)
            full, full_time = time_logits(model, images)
            install(host, merging)
            merged, merged_time = time_logits(model, images)
            seconds.append((len(images), merged_time, full_time))
            counts = trace(model).counts
            extremes.add(images, counts[:, -1])
            rows.append(tuple(t.cpu() for t in (*judge(full, merged, labels), counts)))
        rows = in_order(rows)
        if not sum(len(row[0]) for row in rows):
            raise BadImages("there are no images to evaluate on; pass at least one batch of (images, labels)")
        top1, top5, full_top1, agreement, kl, counts = (torch.cat(column) for column in zip(*rows, strict=True))
        prices = meter(model)
        start = torch.full_like(counts[:, :1], prices.patches)
    timed = in_order(seconds[1:] or seconds)
    return Evaluation(
        top1=top1,
        top5=top5,
        full_top1=full_top1,
        agreement=agreement,
        kl=kl,
        cost=prices.cost(counts, recipe),
        full_cost=prices.unmerged(),
        r=-torch.diff(counts, dim=1, prepend=start),
        seconds=sum(merged for _, merged, _ in timed) / place().world,
        full_seconds=sum(full for _, _, full in timed) / place().world,
        timed=sum(number for number, _, _ in timed),
        patches=prices.patches,
        extremes=extremes.tensors(model),
    )


def time_logits(model: nn.Module, images: Tensor) -> tuple[Tensor, float]:
    """The logits (images, classes) of a batch, and the seconds that the forward pass took."""
    output, seconds = time_call(lambda: model(images), images.device)
    logits = getattr(output, "logits", output)  # transformers returns an object with this field
    if not isinstance(logits, Tensor) or logits.dim() != 2 or logits.shape[1] < 2:
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise UnsupportedModel(f"evaluation needs a classifier that gives (images, classes) logits; got {shape}")
    return logits, seconds


def judge(full: Tensor, merged: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """For each image: top-1, top-5, top-1 of the unmerged model, agreement, and KL(full || merged).

    `full` and `merged` are the logits (images, classes) of the unmerged and of the merged model.
    """
    kl = kl_divergence(full.double().log_softmax(1), merged.double().log_softmax(1))
    best = merged.topk(min(5, merged.shape[1]), dim=1).indices
    choice, full_choice = merged.argmax(1), full.argmax(1)
    return choice == labels, (best == labels[:, None]).any(1), full_choice == labels, choice == full_choice, kl


def kl_divergence(full: Float[Tensor, "n c"], merged: Float[Tensor, "n c"]) -> Float[Tensor, " n"]:
    """KL(full || merged) of each image, from log-probabilities in float64."""
    return (full.exp() * (full - merged)).sum(1)
