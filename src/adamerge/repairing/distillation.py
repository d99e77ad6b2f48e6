"""Trains the norms and biases of a merged model to give what the unmerged model gives, on unlabelled images."""

import math

import torch
from torch import Tensor
from tqdm import tqdm

from adamerge.repairing.augmentation import augment, blend
from adamerge.repairing.options import RepairOptions
from adamerge.repairing.trainable import ParameterSwap
from adamerge.repairing.two_models import TwoModels
from adamerge.training_file import Checkpoint

# Images in a step, where the options do not say: small on a CPU, so that few images give enough steps.
BATCH = {"cpu": 32}
BATCH_ELSEWHERE = 64
# The share of the steps in which the learning rate rises.
WARM_UP = 0.05
LARGEST_GRADIENT = 1.0
# The second is smaller than usual, because there are few steps.
BETAS = (0.9, 0.99)
# The checkpoint is written this many times.
WRITES = 20


class Distillation:
    """A training of the parameters of a swap: its images, its optimiser and the number of steps done."""

    def __init__(self, models: TwoModels, images: Tensor, options: RepairOptions):
        self.models, self.images, self.options = models, images, options
        size = options.batch_size or BATCH.get(images.device.type, BATCH_ELSEWHERE)
        self.size = min(size, len(images))
        pays = images.device.type == "cpu" and _multiplies_bfloat16()
        self.autocast = pays if options.autocast is None else options.autocast
        self.steps_per_epoch = -(-len(images) // self.size)
        self.steps = options.epochs * self.steps_per_epoch
        self.done = 0
        self.mean_loss = 0.0

    @property
    def swap(self) -> ParameterSwap:
        return self.models.swap

    def run(self, checkpoint: Checkpoint) -> None:
        """Train to the last step, from the checkpoint if there is one."""
        self._find_parameters()
        optimiser = torch.optim.Adam(self.swap.parameters.values(), self.options.learning_rate, betas=BETAS)
        kept = checkpoint.read()
        if kept is not None:
            self._resume(optimiser, *kept)
        every = max(1, self.steps // WRITES)
        shown = tqdm(total=self.steps, initial=self.done, desc="repairing", disable=not self.options.progress)
        with shown as bar:
            while self.done < self.steps:
                self._step(optimiser)
                bar.update()
                bar.set_postfix_str(f"loss {self.mean_loss:.3g}", refresh=False)
                if self.done % every == 0 or self.done == self.steps:
                    self._write(optimiser, checkpoint)

    def batch(self, step: int) -> Tensor:
        """The augmented images of a step; every image comes once in an epoch."""
        epoch, number = divmod(step, self.steps_per_epoch)
        order = torch.randperm(len(self.images), generator=self._dice(0, epoch))
        chosen = order[number * self.size : (number + 1) * self.size].to(self.images.device)
        dice = self._dice(1, step)
        cropped = augment(self.images[chosen], dice, self.options.smallest_crop)
        return blend(cropped, dice) if self.options.blend else cropped

    def _dice(self, stream: int, number: int) -> torch.Generator:
        """Random numbers that depend only on the seed, the stream and the number of the step or epoch."""
        return torch.Generator().manual_seed((self.options.seed * 2 + stream) * 1_000_003 + number)

    def _find_parameters(self) -> None:
        """Keep the parameters that the output depends on: those of the blocks and of what comes after them."""
        loss = self._loss(self.batch(0))
        paths, parameters = list(self.swap.parameters), list(self.swap.parameters.values())
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        self.swap.keep([path for path, grad in zip(paths, found, strict=True) if grad is not None])

    def _step(self, optimiser: torch.optim.Optimizer) -> None:
        for group in optimiser.param_groups:
            group["lr"] = self.options.learning_rate * self._rate(self.done)
        loss = self._loss(self.batch(self.done))
        optimiser.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(list(self.swap.parameters.values()), LARGEST_GRADIENT)
        if not norm.isfinite():
            # One such batch would spoil all that was trained.
            optimiser.zero_grad(set_to_none=False)
        optimiser.step()
        self.done += 1
        if self.options.progress and self.done % 10 == 0:
            self.mean_loss = loss.item()

    def _loss(self, images: Tensor) -> Tensor:
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self.autocast):
            return self.models.compare(images)

    def _rate(self, step: int) -> float:
        """The share of the learning rate: it rises at first, and falls to 0 along a cosine."""
        rising = max(1, round(WARM_UP * self.steps))
        if step < rising:
            return (step + 1) / rising
        return (1 + math.cos(math.pi * (step - rising) / max(1, self.steps - rising))) / 2

    def _write(self, optimiser: torch.optim.Optimizer, checkpoint: Checkpoint) -> None:
        tensors: dict[str, Tensor] = {}
        for path, parameter in self.swap.parameters.items():
            tensors[f"value/{path}"] = parameter
            tensors |= {f"{name}/{path}": value for name, value in optimiser.state[parameter].items()}
        checkpoint.write(tensors, {"done": self.done})

    def _resume(self, optimiser: torch.optim.Optimizer, tensors: dict[str, Tensor], figures: dict[str, int]) -> None:
        self.done = figures["done"]
        for path, parameter in self.swap.parameters.items():
            with torch.no_grad():
                parameter.copy_(tensors[f"value/{path}"])
            moments = {name: tensors[f"{name}/{path}"] for name in ("exp_avg", "exp_avg_sq")}
            optimiser.state[parameter] = {name: value.to(parameter.device) for name, value in moments.items()}
            optimiser.state[parameter]["step"] = tensors[f"step/{path}"]


def _multiplies_bfloat16() -> bool:
    """Whether this processor has instructions for products in bfloat16."""
    # Versions of torch that do not know are taken to be on a processor without them.
    knows = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return any(ask() for ask in knows if ask is not None)
