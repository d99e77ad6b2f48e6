"""Repair: small changes of a merged model's norms and biases that bring its output nearer to the unmerged one."""

import logging
import os
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from adamerge.core.errors import BadOption
from adamerge.core.parts import to_json
from adamerge.core.recipe import Recipe
from adamerge.core.weight_patch import WeightPatch
from adamerge.data.batches import Images
from adamerge.digest import digest_json, digest_tensors
from adamerge.patching.apply import temporarily_patched
from adamerge.repairing.distillation import Distillation
from adamerge.repairing.options import RepairOptions
from adamerge.repairing.trainable import trainable
from adamerge.repairing.two_models import TwoModels
from adamerge.search.evaluator import Evaluator, Loss, SweepResult, gather_images
from adamerge.search.tuner import hold_out
from adamerge.training_file import Checkpoint

# The shares of the changes that are tried on the held-out images; the best is taken.
SHARES = (1.0, 0.5)
LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class RepairReport:
    """The recipe with its patch, and the loss before and after on the images that were used and on the held-out ones.

    `repaired` says whether the held-out images lose less with the patch; if not, the recipe is the one that was given.
    """

    recipe: Recipe
    repaired: bool
    loss_before: float
    loss_after: float
    check_before: float
    check_after: float
    cut_before: float
    cut_after: float
    images: int
    check_images: int
    numbers: int
    seconds: float

    def __str__(self) -> str:
        losses = (
            f"loss {self.loss_before:.4g} -> {self.loss_after:.4g} on {self.images} images, {self.check_before:.4g} -> "
            f"{self.check_after:.4g} on {self.check_images} others"
        )
        if not self.repaired:
            return f"not repaired: {losses}; the recipe stays as it was"
        return (
            f"repaired: {losses}; cut {self.cut_before:.1%} -> {self.cut_after:.1%}, {self.numbers} numbers changed, "
            f"{self.seconds:.0f} s"
        )


def repair(
    model: nn.Module,
    images: Images,
    recipe: Recipe | str | os.PathLike[str],
    *,
    loss: Loss | None = None,
    epochs: int = RepairOptions.epochs,
    learning_rate: float = RepairOptions.learning_rate,
    batch_size: int | None = None,
    seed: int = 0,
    progress: bool = True,
    resume: str | os.PathLike[str] | None = None,
) -> Recipe:
    """Win back what merging with `recipe` lost, on unlabelled images; returns the recipe with a patch.

    The norms and biases of the merged model are trained to give what the unmerged model gives.  Their changes are the
    patch: `adamerge.apply` puts it into the model with the recipe, `adamerge.remove` takes both out bit for bit, and
    `save_recipe` writes both.  A quarter of the images is held out and decides: if they lose more with the patch, the
    recipe is returned as it was, and a warning of the logger "adamerge" says so.

    Args:
        model: a supported model; it is not changed.
        images: several hundred preprocessed images, like those the model will be used on, as for `adamerge.tune`.
        recipe: what to merge, from `adamerge.tune` or `adamerge.methods`, or a file of one.
        loss: "kl" or "features", as for `adamerge.tune`.
        epochs: passes over the images.  Each image comes as a random crop, mirrored half of the time and blended with
            another one, so that it is new in every pass.
        learning_rate: the largest learning rate; it rises at first and falls along a cosine.
        batch_size: images in a step; 32 on a CPU, else 64.
        seed: of crops and of the order of the images; on a CPU the same seed gives the same patch.
        progress: show a progress bar.
        resume: a file that keeps the state of the training; one that was stopped continues from it.
    """
    options = RepairOptions(
        loss=loss,
        epochs=epochs,
        learning_rate=learning_rate,
        batch_size=batch_size,
        seed=seed,
        progress=progress,
        resume=resume,
    )
    return repair_with_report(model, images, recipe, options).recipe


def repair_with_report(
    model: nn.Module, images: Images, recipe: Recipe | str | os.PathLike[str], options: RepairOptions
) -> RepairReport:
    """`repair`, which also gives the losses and costs before and after."""
    begin = time.monotonic()
    recipe = _checked(recipe)
    used, held_out = hold_out(gather_images(model, images))
    bench = Evaluator(model, used, loss=options.loss)
    checker = Evaluator(model, held_out, loss=bench.loss)
    adapts = recipe.adaptive is not None
    before = bench.sweep(recipe, calibrate=adapts)
    check_before = checker.sweep(before.recipe, calibrate=False)
    patched = _train(model, bench, before.recipe, options)
    tried: list[tuple[SweepResult, SweepResult]] = []
    for share in SHARES:
        one = replace(before.recipe, patch=_scaled(patched, share))
        after = bench.sweep(one, calibrate=adapts)
        tried.append((after, checker.sweep(after.recipe, calibrate=False)))
    after, check_after = min(tried, key=lambda pair: pair[1].loss.mean().item())
    repaired = check_after.loss.mean().item() < check_before.loss.mean().item()
    found = after.recipe if repaired else recipe
    report = RepairReport(
        recipe=found,
        repaired=repaired,
        loss_before=before.loss.mean().item(),
        loss_after=after.loss.mean().item(),
        check_before=check_before.loss.mean().item(),
        check_after=check_after.loss.mean().item(),
        cut_before=1 - before.macs.mean().item() / bench.full,
        cut_after=1 - after.macs.mean().item() / bench.full,
        images=bench.number,
        check_images=checker.number,
        numbers=0 if found.patch is None else found.patch.numbers,
        seconds=time.monotonic() - begin,
    )
    LOGGER.log(logging.INFO if repaired else logging.WARNING, "%s", report)
    return report


def _checked(recipe: Any) -> Recipe:
    if isinstance(recipe, (str, os.PathLike)):
        recipe = Recipe.load(recipe)
    if not isinstance(recipe, Recipe):
        raise BadOption(f"expected a Recipe such as adamerge.tune gives, or its file, got {type(recipe).__name__}")
    if recipe.patch is not None:
        raise BadOption(
            "this recipe is repaired already; pass it without its patch: dataclasses.replace(recipe, patch=None)"
        )
    return recipe


def _train(model: nn.Module, bench: Evaluator, recipe: Recipe, options: RepairOptions) -> WeightPatch:
    """The patch that training on the images of `bench` gives."""
    with temporarily_patched(model), trainable(model) as swap:
        models = TwoModels(model, recipe, swap, bench.loss, options.temperature)
        images = torch.cat([_usable(batch) for batch in bench.images]).float()
        training = Distillation(models, images, options)
        training.run(Checkpoint(options.resume, _task(bench, recipe, options)))
        changes = swap.changes()
    return WeightPatch.make(changes, bench.host.fingerprint())


def _usable(batch: Tensor) -> Tensor:
    """Images that gradients may be computed with; those made in inference mode are copied."""
    return batch.clone() if batch.is_inference() else batch


def _scaled(patch: WeightPatch, share: float) -> WeightPatch:
    if share == 1:
        return patch
    return WeightPatch.make({name: share * change for name, change in patch.changes.items()}, patch.model)


def _task(bench: Evaluator, recipe: Recipe, options: RepairOptions) -> dict[str, Any]:
    """What identifies a training: a stopped one continues only with the same."""
    given = {name: value for name, value in asdict(options).items() if name not in ("progress", "resume", "loss")}
    return {
        "model": digest_json(bench.host.fingerprint()),
        "images": digest_tensors(bench.images),
        "recipe": digest_json(to_json(recipe)),
        "loss": bench.loss,
        **given,
    }
