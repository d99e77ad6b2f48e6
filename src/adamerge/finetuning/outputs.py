"""What a fine-tuning writes: weights, the recipe, a table of losses and scalars for TensorBoard."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from adamerge.core.errors import UnsupportedModel
from adamerge.core.files import write_atomically
from adamerge.core.recipe import NAME, Recipe
from adamerge.data.batches import labelled_batches


class RunFolder:
    """The folder of a fine-tuning.  Figures of a run that continues are added to those that are there."""

    def __init__(self, path: Path):
        self.path = path
        log = path / "log.csv"
        self.lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else ["step,name,value"]
        self.scalars: Any = None

    def __enter__(self) -> "RunFolder":
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return self
        self.scalars = SummaryWriter(str(self.path / "tensorboard"))
        return self

    def __exit__(self, *error: object) -> None:
        if self.scalars is not None:
            self.scalars.close()

    def record(self, step: int, figures: Mapping[str, float]) -> None:
        """Write figures of a step."""
        for name, value in figures.items():
            self.lines.append(f"{step},{name},{value!r}")
            if self.scalars is not None:
                self.scalars.add_scalar(name, value, step)
        write_atomically(self.path / "log.csv", "\n".join(self.lines) + "\n")

    def figures(self, name: str) -> list[float]:
        """All values of a figure so far."""
        rows = (line.split(",") for line in self.lines[1:])
        return [float(value) for _, each, value in rows if each == name]

    def forget_after(self, step: int) -> None:
        """Drop figures of steps that will be done again."""
        head, *rows = self.lines
        self.lines = [head, *(row for row in rows if int(row.partition(",")[0]) <= step)]

    def finish(self, model: nn.Module, recipe: Recipe) -> None:
        """Write the weights and the recipe."""
        from safetensors.torch import save

        weights = {name: value.detach().cpu().contiguous().clone() for name, value in model.state_dict().items()}
        write_atomically(self.path / "model.safetensors", save(weights))
        recipe.save(self.path / NAME)


def logits_of(output: Any) -> Tensor:
    """The logits (images, classes) in what a model returns."""
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor) or logits.dim() != 2 or logits.shape[1] < 2:
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise UnsupportedModel(f"fine-tuning needs a classifier that gives (images, classes) logits; got {shape}")
    return logits


def top1(model: nn.Module, judge: Iterable[Any]) -> float:
    """The share of images whose first choice is their label."""
    right, total = 0, 0
    parameter = next(model.parameters())
    with torch.inference_mode():
        for images, labels in labelled_batches(judge):
            choice = logits_of(model(images.to(parameter.device, parameter.dtype))).argmax(1).cpu()
            right, total = right + int((choice == labels).sum()), total + len(labels)
    return right / max(1, total)
