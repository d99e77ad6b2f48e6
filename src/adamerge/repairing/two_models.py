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
    """What a model gives for a batch: logits or a pooled output, and the tokens after each block, for every patch."""

    output: Tensor
    tokens: tuple[Tensor, ...]


class TwoModels:
    """A model with a recipe, and the same model unmerged with its own parameters.

    `reads_patches` says whether the output depends on patch tokens after the last block.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, swap: ParameterSwap, loss: Loss, reads_patches: bool):
        self.model, self.recipe, self.swap, self.loss = model, recipe, swap, loss
        self.host, self.reads_patches = find_host(model), reads_patches
        self.entry: Any = self.host.entry or model

    def compare(self, images: Tensor, hidden: float) -> Tensor:
        """The loss of the merged model on a batch, with the weight `hidden` for the tokens inside."""
        self.swap.use_own()
        every = hidden > 0
        with torch.no_grad():
            install(self.host, self.host.container)
            start, tables = embed(self.host, self.model, images)
            wanted = self._answer(images, start, tables, none(), every)
        self.swap.use_trained()
        given = self._answer(images, start, tables, self.recipe, every)
        loss = self._difference(wanted, given)
        return loss + hidden * self._inside(wanted, given) if every else loss

    def _answer(
        self, images: Tensor, state: reference.State, tables: Sequence[reference.Tables], recipe: Recipe, every: bool
    ) -> Answer:
        """Run all blocks and the head; with `every`, keep the tokens after each block, else after the last."""
        kept: list[Tensor] = []
        depth = self.host.depth
        for layer, (view, table) in enumerate(zip(self.host.views, tables, strict=True)):
            state = reference.step(replace(state, tables=table), view, recipe, depth)
            if every or layer == depth - 1:
                kept.append(reference.finish(state))
        install(self.host, GivenTokens(self.host, kept[-1]))
        output: Any = self.entry(images)
        if not isinstance(output, Tensor):
            logits = getattr(output, "logits", None)
            output = output.pooler_output if logits is None else logits
        return Answer(output, tuple(kept))

    def _difference(self, wanted: Answer, given: Answer) -> Tensor:
        """The divergence of the class probabilities, or one minus the cosines of the pooled outputs and the patches."""
        if self.loss == "kl":
            merged, full = (answer.output.float().log_softmax(-1) for answer in (given, wanted))
            return kl_div(merged, full, reduction="batchmean", log_target=True)
        pooled = 1 - cosine_similarity(wanted.output.float(), given.output.float(), dim=-1).mean()
        full, merged = (self._patches(answer.tokens[-1]) for answer in (wanted, given))
        return (pooled + 1 - cosine_similarity(full, merged, dim=-1).mean()) / 2

    def _patches(self, tokens: Tensor) -> Tensor:
        return layer_norm(tokens.float(), tokens.shape[-1:])[:, self.host.prefix :]

    def _inside(self, wanted: Answer, given: Answer) -> Tensor:
        """The mean square difference of the tokens after each block, relative to their variance."""
        parts, prefix = [], self.host.prefix
        for layer, (full, merged) in enumerate(zip(wanted.tokens, given.tokens, strict=True)):
            last = layer == len(wanted.tokens) - 1
            sides = [slice(None, prefix)] if prefix else []
            if self.reads_patches or not last:
                sides.append(slice(prefix, None))
            for side in sides:
                a, b = full[:, side].float(), merged[:, side].float()
                parts.append((a - b).square().mean() / a.var().clamp_min(1e-12))
        return torch.stack(parts).mean()
