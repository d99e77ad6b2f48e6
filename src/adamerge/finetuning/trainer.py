"""Fine-tuning: trains all weights of a model on labelled images while it merges."""

import math
import os
from collections.abc import Iterable
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div
from tqdm import tqdm

from adamerge.calibration import calibrate
from adamerge.core.errors import BadOption
from adamerge.core.files import check_can_write
from adamerge.core.parts import to_json
from adamerge.core.recipe import Recipe
from adamerge.core.weight_patch import WeightPatch
from adamerge.digest import digest_json, digest_tensors
from adamerge.finetuning.options import FinetuneOptions
from adamerge.finetuning.outputs import RunFolder, logits_of, top1
from adamerge.finetuning.samples import (
    check_labels,
    epoch_batches,
    evenly_spaced,
    fixed_randomness,
    number_of_steps,
    read,
)
from adamerge.hosts.base import find_host
from adamerge.patching.apply import apply, remove
from adamerge.training_file import Checkpoint

# A run continues only with the same images; this many are compared, as they are after augmentation.
COMPARED = 4
OTHER_FOLDER = "choose another folder for the results, or delete this one to begin again"


def finetune(
    model: nn.Module,
    data: Any,
    recipe: Recipe | str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    judge: Iterable[Any] | None = None,
    options: FinetuneOptions | None = None,
) -> Recipe:
    """Train `model` on labelled images while it merges with `recipe`; returns the recipe with its last statistics.

    The model is trained in place and has its own blocks back afterwards.  `out` gets `model.safetensors` (weights),
    `adamerge.json` (the recipe), `log.csv`, the checkpoint, and scalars for TensorBoard if it is installed.  A run
    that was stopped continues from its checkpoint when it is called again, and ends with the same weights on a CPU.

    Args:
        model: a supported classifier.
        data: a dataset of `(image, label)` with a length, such as torchvision's ImageFolder with timm's transform for
            training; images are float tensors.
        recipe: what to merge, or a file of it.  An adaptive recipe without statistics is calibrated first.  The patch
            of a repaired recipe becomes a part of the weights.
        out: the folder for the results.
        judge: batches of `(images, labels)` to measure top-1 on, before the training and after each epoch.
        options: how to train; by default the settings of the AdaMerge paper: 30 epochs, 5e-6, cosine.
    """
    options = options if options is not None else FinetuneOptions()
    recipe = Recipe.load(recipe) if isinstance(recipe, (str, os.PathLike)) else recipe
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise BadOption(
            f"fine-tuning needs a dataset with a length and items (image, label), got {type(data).__name__}; pass "
            "loader.dataset instead of a loader"
        )
    check_can_write(out, folder=True)
    training = Finetuning(model, data, recipe, options, Path(out))
    with RunFolder(Path(out)) as folder:
        training.run(judge, folder)
    return training.recipe


class Finetuning:
    """A fine-tuning: the model, the teacher, the moving average, the optimiser and the number of steps done."""

    def __init__(self, model: nn.Module, data: Any, recipe: Recipe, options: FinetuneOptions, out: Path):
        self.model, self.data, self.options = model, data, options
        self.steps_per_epoch = number_of_steps(len(data), options.batch_size * options.accumulate)
        self.steps = self.steps_per_epoch * options.epochs
        self.done = 0
        self.checkpoint = Checkpoint(out / "checkpoint.safetensors", _task(model, data, recipe, options), OTHER_FOLDER)
        remove(model)
        add_patch(model, recipe.patch)
        self.teacher = deepcopy(model).eval().requires_grad_(False) if options.distillation else None
        self.recipe = replace(recipe, patch=None)
        self.average = {name: value.clone() for name, value in model.state_dict().items()} if options.ema else {}
        self.device = next(model.parameters()).device
        with torch.no_grad():
            self.classes = logits_of(model(evenly_spaced(data, 1)[0].to(self.device))).shape[1]
        self.mixup = _mixup(self.classes, options)
        # The sum of the losses of the epoch so far.
        self.losses = torch.zeros((), dtype=torch.float64, device=self.device)
        self.optimiser = torch.optim.AdamW(_groups(model, options.weight_decay), options.learning_rate)

    def run(self, judge: Iterable[Any] | None, folder: RunFolder) -> None:
        """Train to the last step, from the checkpoint if there is one, and write the results."""
        kept = self.checkpoint.read()
        if kept is not None:
            self._resume(*kept)
        elif self.recipe.adaptive is not None and self.recipe.stats is None:
            self._calibrate()
        # Steps that will be done again, and all of a run that was stopped before its first checkpoint.
        folder.forget_after(-1 if kept is None else self.done)
        if kept is None and judge is not None:
            folder.record(0, {"top1": self._judged(judge)})
        bar = tqdm(total=self.steps, initial=self.done, desc="fine-tuning", disable=not self.options.progress)
        with bar:
            while self.done < self.steps:
                epoch, first = divmod(self.done, self.steps_per_epoch)
                every = self.options.recalibrate
                if epoch and not first and every and epoch % every == 0 and self.recipe.adaptive is not None:
                    self._calibrate()
                figures = self._epoch(epoch, first, bar)
                if judge is not None:
                    figures["top1"] = self._judged(judge)
                folder.record(self.done, figures)
                bar.set_postfix({name: f"{figures[name]:.4g}" for name in ("loss", "top1") if name in figures})
                self._write()
        remove(self.model)
        if self.average:
            self.model.load_state_dict(self.average)
        self.recipe = with_fingerprint(self.recipe, find_host(self.model).fingerprint())
        folder.finish(self.model, self.recipe)

    def _epoch(self, epoch: int, first: int, bar: tqdm) -> dict[str, float]:
        """The remaining steps of an epoch; gives its mean loss and its last learning rate."""
        options, model = self.options, self._merged()
        model.train()
        loader = epoch_batches(
            self.data,
            options.batch_size,
            options.seed,
            epoch,
            first=first * options.accumulate,
            workers=options.workers,
        )
        if first == 0:
            self.losses = torch.zeros((), dtype=torch.float64, device=self.device)
        batches = read(loader)
        for _ in range(first, self.steps_per_epoch):
            for group in self.optimiser.param_groups:
                group["lr"] = options.learning_rate * self._rate(self.done)
            with fixed_randomness(options.seed, self.done):
                for _ in range(options.accumulate):
                    images, labels = next(batches)
                    check_labels(labels, self.classes)
                    part = self._loss(images.to(self.device), labels.to(self.device)) / options.accumulate
                    part.backward()
                    self.losses += part.detach()
            self.optimiser.step()
            self.optimiser.zero_grad(set_to_none=True)
            self._update_average()
            self.done += 1
            bar.update()
            if self.done % options.save_every == 0 and self.done % self.steps_per_epoch:
                self._write()
        model.eval()
        mean = self.losses.item() / self.steps_per_epoch
        return {"loss": mean, "learning_rate": self.optimiser.param_groups[0]["lr"]}

    def _merged(self) -> nn.Module:
        """The model, merging."""
        return apply(self.model, with_fingerprint(self.recipe, {}))

    def _loss(self, images: Tensor, labels: Tensor) -> Tensor:
        options = self.options
        targets: Tensor = labels
        if self.mixup is not None:
            images, targets = self.mixup(images, labels)
        half = torch.autocast(self.device.type, torch.bfloat16) if options.mixed_precision else nullcontext()
        with half:
            logits = logits_of(self.model(images)).float()
            with torch.no_grad():
                wanted = None if self.teacher is None else logits_of(self.teacher(images)).float()
        loss = cross_entropy(logits, targets, label_smoothing=0.0 if options.mixup else options.label_smoothing)
        if wanted is None:
            return loss
        apart = kl_div(logits.log_softmax(1), wanted.log_softmax(1), reduction="batchmean", log_target=True)
        return (1 - options.distillation) * loss + options.distillation * apart

    def _rate(self, step: int) -> float:
        """The share of the learning rate: it rises in the first epochs, and falls to 0 along a cosine."""
        rising = self.options.warm_up * self.steps_per_epoch
        if step < rising:
            return (step + 1) / rising
        return (1 + math.cos(math.pi * (step - rising) / max(1, self.steps - rising))) / 2

    def _update_average(self) -> None:
        if not self.average:
            return
        for name, value in self.model.state_dict().items():
            if value.is_floating_point():
                self.average[name].lerp_(value, 1 - self.options.ema)
            else:
                self.average[name].copy_(value)

    def _calibrate(self) -> None:
        images, _ = evenly_spaced(self.data, self.options.calibration_images)
        remove(self.model)
        self.recipe = self.recipe.with_stats(calibrate(self.model, images, self.recipe, progress=False))

    def _judged(self, judge: Iterable[Any]) -> float:
        """Top-1 of the merged model with the weights that would be written now."""
        own = {name: value.clone() for name, value in self.model.state_dict().items()} if self.average else None
        if own is not None:
            self.model.load_state_dict(self.average)
        apply(self.model, with_fingerprint(self.recipe, {}))
        found = top1(self.model, judge)
        if own is not None:
            self.model.load_state_dict(own)
        return found

    def _write(self) -> None:
        tensors = {f"model/{name}": value for name, value in self.model.state_dict().items()}
        tensors |= {f"average/{name}": value for name, value in self.average.items()}
        for name, parameter in self.model.named_parameters():
            moments = self.optimiser.state.get(parameter, {})
            tensors |= {f"{moment}/{name}": value for moment, value in moments.items()}
        self.checkpoint.write({**tensors, "losses": self.losses}, {"done": self.done, "recipe": self.recipe.to_json()})

    def _resume(self, tensors: dict[str, Tensor], figures: dict[str, Any]) -> None:
        self.done, self.recipe = figures["done"], Recipe.from_json(figures["recipe"])
        self.losses = tensors.pop("losses").to(self.device)
        kept: dict[str, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            kind, _, path = name.partition("/")
            kept.setdefault(kind, {})[path] = value
        self.model.load_state_dict(kept["model"])
        self.average = {name: value.to(self.device) for name, value in kept.get("average", {}).items()}
        for name, parameter in self.model.named_parameters():
            if name in kept.get("exp_avg", {}):
                moments = {moment: kept[moment][name].to(self.device) for moment in ("exp_avg", "exp_avg_sq")}
                self.optimiser.state[parameter] = {**moments, "step": kept["step"][name]}


def with_fingerprint(recipe: Recipe, fingerprint: dict[str, Any]) -> Recipe:
    """The recipe with statistics for a model of this fingerprint.  Weights that are trained have another each time."""
    return recipe if recipe.stats is None else recipe.with_stats(replace(recipe.stats, model=fingerprint))


def add_patch(model: nn.Module, patch: WeightPatch | None) -> None:
    """Make the changes of a patch a part of the weights."""
    with torch.no_grad():
        for name, change in patch.changes.items() if patch is not None else ():
            parameter = model.get_parameter(name)
            parameter += change.to(parameter)


def _groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Weights with decay, norms and biases without."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for parameter in trained if parameter.dim() > 1], "weight_decay": weight_decay},
        {"params": [parameter for parameter in trained if parameter.dim() <= 1], "weight_decay": 0.0},
    ]


def _mixup(classes: int, options: FinetuneOptions) -> Any:
    """timm's mixup for this number of classes; None without it."""
    if not options.mixup:
        return None
    from timm.data import Mixup  # pyright: ignore[reportPrivateImportUsage]

    if options.batch_size % 2:
        raise BadOption(f"mixup needs an even batch_size; got {options.batch_size}")
    return Mixup(mixup_alpha=options.mixup, label_smoothing=options.label_smoothing, num_classes=classes)


def _task(model: nn.Module, data: Any, recipe: Recipe, options: FinetuneOptions) -> dict[str, Any]:
    """What identifies a training: a stopped one continues only with the same."""
    given = {
        name: value for name, value in asdict(options).items() if name not in ("progress", "workers", "save_every")
    }
    return {
        **given,
        "model": digest_json(find_host(model).fingerprint()),
        "images": len(data),
        "some_images": digest_tensors(evenly_spaced(data, COMPARED)),
        "recipe": digest_json(to_json(recipe)),
    }
