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

# The least spread of a channel: one that hardly varies does not count more than others.
LEAST_SPREAD = 1e-2


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
        """The divergence of the class probabilities, or one minus cosines: of the pooled outputs and of the patches."""
        if self.loss == "kl":
            softened = (answer.output.float() / self.temperature for answer in (given, wanted))
            merged, full = (logits.log_softmax(-1) for logits in softened)
            # Times the square: gradients are about as large as without the division.
            return self.temperature**2 * kl_div(merged, full, reduction="batchmean", log_target=True)
        pooled = 1 - cosine_similarity(wanted.output.float(), given.output.float(), dim=-1).mean()
        full, merged = (self._patches(answer.tokens) for answer in (wanted, given))
        return (pooled + 1 - standardised_cosine(full, merged).mean()) / 2

    def _patches(self, tokens: Tensor) -> Tensor:
        return layer_norm(tokens.float(), tokens.shape[-1:])[:, self.host.prefix :]


def standardised_cosine(full: AllTokens, merged: AllTokens) -> Float[Tensor, "b t"]:
    """The cosine of each pair of tokens, with every channel centred and scaled by its mean and spread over `full`.

    Without that a few large channels and the mean of all tokens decide: in DINOv2 they are three quarters of the norm,
    and say nothing of what distinguishes one patch from another.
    """
    mean = full.mean((0, 1))
    spread = full.std((0, 1)).clamp_min(LEAST_SPREAD)
    return cosine_similarity((full - mean) / spread, (merged - mean) / spread, dim=-1)
