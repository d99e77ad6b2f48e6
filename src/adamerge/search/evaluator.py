"""Evaluates recipes on unlabelled images: one sweep gives the thresholds, the cost and the loss of the output."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, layer_norm

from adamerge.core.errors import BadImages, BadOption, UnsupportedModel
from adamerge.core.parts import to_json
from adamerge.core.recipe import Recipe
from adamerge.data.batches import Images, batches
from adamerge.digest import digest_tensors
from adamerge.distributed import in_order, my_share
from adamerge.evaluation import kl_divergence
from adamerge.flops import CostCount, check_cost, meter
from adamerge.hosts.base import find_host
from adamerge.methods import none
from adamerge.patching.apply import temporarily_patched
from adamerge.patching.patched_weights import weights_patched
from adamerge.patching.probes import GivenTokens, embed
from adamerge.patching.stack import install
from adamerge.runtime import reference
from adamerge.runtime.layerwise import HostBlock, calibrate_layers, run_layers

Loss = Literal["kl", "features"]
# The batch size: small on a CPU, where padding costs time, and large elsewhere.
AT_ONCE = {"cpu": 32}
AT_ONCE_ELSEWHERE = 256


def check_loss(loss: object) -> None:
    """Refuse what is not the name of a loss; None stands for the loss that fits the model."""
    if loss is not None and loss not in get_args(Loss):
        raise BadOption(f"loss must be one of {', '.join(get_args(Loss))}; got {loss!r}")


@dataclass(frozen=True)
class SweepResult:
    """The result of a sweep: the recipe with its statistics; loss, cost and token counts (per layer) of each image.

    `choice` is the predicted class, for a loss of "kl"; `cosines` are the cosine similarities of the pooled output and
    of the patches, for a loss of "features".
    """

    recipe: Recipe
    loss: Float[Tensor, " n"]
    macs: Float[Tensor, " n"]
    counts: Int[Tensor, "n l"]
    choice: Int[Tensor, " n"] | None = None
    cosines: Float[Tensor, "n 2"] | None = None


class Evaluator:
    """A model with unlabelled images, their embeddings and the outputs of the unmerged model, computed once."""

    def __init__(
        self, model: nn.Module, images: Sequence[Tensor], *, cost: CostCount = "true", loss: Loss | None = None
    ):
        check_cost(cost)
        check_loss(loss)
        if not images:
            raise BadImages("there are no images to tune on; pass at least one batch")
        self.model, self.host = model, find_host(model)
        self.number = sum(len(batch) for batch in images)
        self._everything = images
        self.entry = self.host.entry or model
        self.cost: CostCount = cost
        self.sweeps = 0
        self.prices = meter(model)
        self.full = float(getattr(self.prices.unmerged(), cost))
        with _evaluating(model):
            install(self.host, self.host.container)
            # A process without images takes part in the layers of the others with none.
            mine = list(my_share(images)) or [images[0][:0]]
            self.images = [self._on_device(batch) for batch in mine]
            embedded = [embed(self.host, model, batch) for batch in self.images]
            self.starts = [state for state, _ in embedded]
            self.blocks = [HostBlock(view, table) for view, table in zip(self.host.views, embedded[0][1], strict=True)]
            answers = [self._answer(batch) for batch in self.images]
            outputs = [output for output, _ in answers]
            self.loss: Loss = _kind(loss, outputs[0], answers[0][1])
            self.reads_patches = self.loss == "features" or self._patches_matter()
            tokens = [self._unmerged(start) for start in self.starts] if self.loss == "features" else None
            self.wanted = [self._judged(out, None if tokens is None else tokens[i]) for i, out in enumerate(outputs)]

    def _on_device(self, batch: Tensor) -> Tensor:
        parameter = next(self.model.parameters())
        return batch.to(parameter.device, parameter.dtype)

    @property
    def digest(self) -> str:
        """A digest of the images of all processes."""
        return digest_tensors(map(self._on_device, self._everything))

    def sweep(self, recipe: Recipe, *, calibrate: bool = True) -> SweepResult:
        """Run `recipe` layer by layer over all images, finding the statistics of an adaptive one on the way.

        `calibrate=False` uses the statistics it has.
        """
        self.sweeps += 1
        with _evaluating(self.model), weights_patched(self.model, recipe.patch):
            if not calibrate or recipe.adaptive is None:
                return self._outcome(recipe, run_layers(self.starts, self.blocks, recipe))
            states, stats = calibrate_layers(self.starts, self.blocks, recipe)
            outcome = self._outcome(recipe, states)
        stats = replace(stats, how="sequential", passes=1, model=self.host.fingerprint(), recipe=to_json(recipe.plain))
        return replace(outcome, recipe=recipe.with_stats(stats))

    def _outcome(self, recipe: Recipe, states: Sequence[reference.State]) -> SweepResult:
        compared, choices = [], []
        for batch, state, wanted in zip(self.images, states, self.wanted, strict=True):
            tokens = reference.finish(state)
            install(self.host, GivenTokens(self.host, tokens))
            judged = self._judged(self._answer(batch)[0], tokens if self.loss == "features" else None)
            compared.append(_compare(wanted, judged).cpu())
            choices.append(judged[0].argmax(1).cpu())
        counts = [torch.stack([step.plan.count for step in state.steps], 1).cpu() for state in states]
        rows = in_order(list(zip(compared, choices, counts, strict=True)))
        found, choice, left = (torch.cat(column) for column in zip(*rows, strict=True))
        macs = getattr(self.prices.cost(left, recipe), self.cost)
        if self.loss == "kl":
            return SweepResult(recipe, found[:, 0], macs, left, choice=choice)
        return SweepResult(recipe, 1 - found.mean(1), macs, left, cosines=found)

    def _answer(self, batch: Tensor) -> tuple[Any, bool]:
        """The output of the model, one row for each image, and whether it is logits."""
        output: Any = self.entry(batch)
        if isinstance(output, Tensor):
            # An image tower gives features, and so does a timm model without classes.
            return output, self.host.entry is None and getattr(self.model, "num_classes", output.shape[-1]) > 1
        # Outputs of transformers are named.
        logits = getattr(output, "logits", None)
        return (getattr(output, "pooler_output", output), False) if logits is None else (logits, True)

    def _unmerged(self, state: reference.State) -> Tensor:
        return run_layers([state], self.blocks, none())[0].x

    def _patches_matter(self) -> bool:
        """Whether the output depends on patch tokens after the last block; if not, that block may merge all of them."""
        image = self._on_device(self._everything[0][:1])
        tokens = self._unmerged(embed(self.host, self.model, image)[0])
        blank = torch.cat([tokens[:, : self.host.prefix], torch.zeros_like(tokens[:, self.host.prefix :])], 1)
        outputs = []
        for given in (tokens, blank):
            install(self.host, GivenTokens(self.host, given))
            outputs.append(self._answer(image)[0])
        install(self.host, self.host.container)
        return not torch.equal(*outputs)

    def _judged(self, output: Any, tokens: Tensor | None) -> tuple[Tensor, ...]:
        if tokens is None:
            return (output.double().log_softmax(1),)
        # Normalised as after the blocks: a few large channels dominate the raw tokens.
        return output, layer_norm(tokens, tokens.shape[-1:])[:, self.host.prefix :]


def gather_images(model: nn.Module, images: Images) -> list[Tensor]:
    """All images, in batches of the size for the model's device."""
    everyone = list(batches(images))
    if not everyone:
        raise BadImages("there are no images to tune on; pass at least one batch")
    if len({batch.shape[1:] for batch in everyone}) > 1:
        raise BadImages("tuning needs images of one size; resize them alike")
    kind = next(model.parameters()).device.type
    return list(torch.cat(everyone).split(AT_ONCE.get(kind, AT_ONCE_ELSEWHERE)))


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; the state of the model is restored afterwards."""
    with temporarily_patched(model), torch.inference_mode():
        yield


def _kind(loss: Loss | None, output: Any, logits: bool) -> Loss:
    if not isinstance(output, Tensor) or output.dim() != 2:
        shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise UnsupportedModel(
            f"tuning needs a model that gives one row for each image, logits or features; got {shape}"
        )
    if loss is not None:
        return loss
    return "kl" if logits else "features"


def _compare(full: tuple[Tensor, ...], merged: tuple[Tensor, ...]) -> Float[Tensor, "b k"]:
    """KL(full || merged) of the class probabilities, or two cosines: of the pooled outputs, and the mean of patches."""
    if len(full) == 1:
        return kl_divergence(full[0], merged[0])[:, None]
    pooled = cosine_similarity(full[0].double(), merged[0].double(), dim=1)
    return torch.stack([pooled, cosine_similarity(full[1].double(), merged[1].double(), dim=2).mean(1)], 1)
