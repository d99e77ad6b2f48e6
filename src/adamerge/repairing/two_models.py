"""Runs the unmerged and the merged model on a batch and compares what they give; gradients flow to the merged one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, kl_div, layer_norm

from adamerge.core.recipe import Recipe
from adamerge.core.types import AllTokens
from adamerge.hosts.base import find_host
from adamerge.methods import none
from adamerge.patching.probes import GivenTokens, embed
from adamerge.patching.stack import install
from adamerge.repairing.trainable import ParameterSwap
from adamerge.runtime import reference
from adamerge.search.evaluator import Loss

# Added to the variance of every direction, as a share of the mean variance: noise counts less than what patches show.
RIDGE = 0.1
# Bounds of divisors, for images of one colour.
LEAST_VARIANCE, LEAST_SQUARE = 1e-6, 1e-2


@dataclass(frozen=True)
class Answer:
    """What a model gives for a batch: logits or a pooled output, and the tokens after the last block."""

    output: Tensor
    tokens: Tensor


class TwoModels:
    """A model with a recipe, and the same model unmerged with its own parameters.

    Logits are divided by `temperature` before they are compared.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, swap: ParameterSwap, loss: Loss, temperature: float = 1.0):
        self.model, self.recipe, self.swap, self.loss, self.temperature = model, recipe, swap, loss, temperature
        self.host = find_host(model)
        self.entry: Any = self.host.entry or model

    def compare(self, images: Tensor) -> Tensor:
        """The loss of the merged model on a batch."""
        self.swap.use_own()
        with torch.no_grad():
            install(self.host, self.host.container)
            start, tables = embed(self.host, self.model, images)
            start = reference.start_training(start)
            wanted = self._answer(images, start, tables, none())
        self.swap.use_trained()
        return self._difference(wanted, self._answer(images, start, tables, self.recipe))

    def _answer(
        self, images: Tensor, state: reference.State, tables: Sequence[reference.Tables], recipe: Recipe
    ) -> Answer:
        """Run all blocks and the head."""
        for view, table in zip(self.host.views, tables, strict=True):
            state = reference.step(replace(state, tables=table), view, recipe, self.host.depth)
        tokens = reference.finish(state)
        install(self.host, GivenTokens(self.host, tokens))
        output: Any = self.entry(images)
        if not isinstance(output, Tensor):
            logits = getattr(output, "logits", None)
            output = output.pooler_output if logits is None else logits
        return Answer(output, tokens)

    def _difference(self, wanted: Answer, given: Answer) -> Tensor:
        """The divergence of the class probabilities, or the distances of the pooled outputs and of the patches."""
        if self.loss == "kl":
            softened = (answer.output.float() / self.temperature for answer in (given, wanted))
            merged, full = (logits.log_softmax(-1) for logits in softened)
            # Times the square: gradients are about as large as without the division.
            return self.temperature**2 * kl_div(merged, full, reduction="batchmean", log_target=True)
        pooled = 1 - cosine_similarity(wanted.output.float(), given.output.float(), dim=-1).mean()
        full, merged = (self._patches(answer.tokens) for answer in (wanted, given))
        return (pooled + patch_loss(full, merged)) / 2

    def _patches(self, tokens: Tensor) -> Tensor:
        return layer_norm(tokens.float(), tokens.shape[-1:])[:, self.host.prefix :]


def patch_loss(full: AllTokens, merged: AllTokens) -> Float[Tensor, ""]:
    """How far the patches of the merged model are from those of the unmerged one.

    It is the sum of three terms, because one minus the cosine alone can fall while a linear head that reads the patches
    gets worse.  In DINOv2 the mean of all tokens and a few large channels are three quarters of the norm.  So patches
    are compared again with their mean subtracted and every direction scaled to the same variance over `full`.  And
    patches that merging made uncertain come nearest if they shrink toward the mean, where a head answers with its most
    frequent class.  So the share of the unmerged patch that is left has to be 1.
    """
    wanted, given = whitened(full, merged)
    left = (wanted * given).sum(-1) / wanted.square().sum(-1).clamp_min(LEAST_SQUARE)
    cosines = cosine_similarity(full, merged, dim=-1) + cosine_similarity(wanted, given, dim=-1)
    return (2 - cosines + (1 - left).square()).mean()


def whitened(full: AllTokens, merged: AllTokens) -> tuple[AllTokens, AllTokens]:
    """Both without the mean of `full`, in coordinates where all directions of `full` have about the same variance."""
    mean = full.mean((0, 1))
    rows = (full - mean).flatten(0, 1)
    with torch.autocast(full.device.type, enabled=False):
        covariance = rows.mT @ rows / len(rows)
        added = RIDGE * covariance.diagonal().mean() + LEAST_VARIANCE
        # Divided by this factor, inner products are those with the inverse of the covariance.
        factor = torch.linalg.cholesky(covariance + added * torch.eye(len(covariance)).to(covariance)).mT
        wanted, given = (
            torch.linalg.solve_triangular(factor, tokens - mean, upper=True, left=False) for tokens in (full, merged)
        )
    return wanted, given
