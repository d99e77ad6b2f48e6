"""Runs the unmerged and the merged model on a batch and compares what they give; gradients flow to the merged one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, kl_div, layer_norm

from adamerge.core.recipe import Recipe
from adamerge.hosts.base import find_host
from adamerge.methods import none
from adamerge.patching.probes import GivenTokens, embed
from adamerge.patching.stack import install
from adamerge.repairing.trainable import ParameterSwap
from adamerge.runtime import reference
from adamerge.search.evaluator import Loss


@dataclass(frozen=True)
class Answer:
    """What a model gives for a batch: logits or a pooled output, the tokens after the last block, and inner tokens."""

    output: Tensor
    tokens: Tensor
    inner: list[Tensor]


class TwoModels:
    """A model with a recipe, and the same model unmerged with its own parameters.

    `inner` is the weight of the tokens between blocks in the loss.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, swap: ParameterSwap, loss: Loss, inner: float):
        self.model, self.recipe, self.swap, self.loss, self.inner = model, recipe, swap, loss, inner
        self.host = find_host(model)
        self.entry: Any = self.host.entry or model
        self.compared = inner_layers(self.host.depth) if inner else frozenset[int]()

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
        inner: list[Tensor] = []
        for layer, (view, table) in enumerate(zip(self.host.views, tables, strict=True)):
            state = reference.step(replace(state, tables=table), view, recipe, self.host.depth)
            if layer in self.compared:
                inner.append(reference.finish(state))
        tokens = reference.finish(state)
        install(self.host, GivenTokens(self.host, tokens))
        output: Any = self.entry(images)
        if not isinstance(output, Tensor):
            logits = getattr(output, "logits", None)
            output = output.pooler_output if logits is None else logits
        return Answer(output, tokens, inner)

    def _difference(self, wanted: Answer, given: Answer) -> Tensor:
        """The difference of the outputs, and the weighted mean difference of the tokens between blocks."""
        loss = self._output_difference(wanted, given)
        if not self.compared:
            return loss
        pairs = zip(wanted.inner, given.inner, strict=True)
        return loss + self.inner * torch.stack([self._inner_difference(full, merged) for full, merged in pairs]).mean()

    def _inner_difference(self, full: Tensor, merged: Tensor) -> Tensor:
        """One minus the cosines of the prefix tokens, if there are any, plus the same of the patches."""
        apart = 1 - cosine_similarity(_normalised(full), _normalised(merged), dim=-1)
        prefix, patches = apart[:, : self.host.prefix], apart[:, self.host.prefix :]
        return patches.mean() + (prefix.mean() if self.host.prefix else 0)

    def _output_difference(self, wanted: Answer, given: Answer) -> Tensor:
        """The divergence of the class probabilities, or one minus the cosines of the pooled outputs and the patches."""
        if self.loss == "kl":
            merged, full = (answer.output.float().log_softmax(-1) for answer in (given, wanted))
            return kl_div(merged, full, reduction="batchmean", log_target=True)
        pooled = 1 - cosine_similarity(wanted.output.float(), given.output.float(), dim=-1).mean()
        full, merged = (self._patches(answer.tokens) for answer in (wanted, given))
        return (pooled + 1 - cosine_similarity(full, merged, dim=-1).mean()) / 2

    def _patches(self, tokens: Tensor) -> Tensor:
        return _normalised(tokens)[:, self.host.prefix :]


def inner_layers(depth: int) -> frozenset[int]:
    """The layers after which tokens are compared: at a third and two thirds of the depth, and the last but one.

    Not the last, because recipes may merge all patches there, where the output of a classifier reads none.
    """
    return frozenset(layer for layer in (depth // 3 - 1, 2 * depth // 3 - 1, depth - 2) if layer >= 0)


def _normalised(tokens: Tensor) -> Tensor:
    """Normalised as after the blocks: a few large channels dominate the raw tokens."""
    return layer_norm(tokens.float(), tokens.shape[-1:])
