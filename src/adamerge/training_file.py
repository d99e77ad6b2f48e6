"""Keeps the state of a training in a safetensors file, so that a stopped training continues where it was."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adamerge.core.errors import BadOption
from adamerge.core.files import write_atomically

OTHER_FILE = "give another file to resume from, or delete it"


class Checkpoint:
    """The file of a training, or none.  `task` identifies the training; a file of another task is refused.

    `advice` says what to do then.
    """

    def __init__(self, path: str | os.PathLike[str] | None, task: Mapping[str, Any], advice: str = OTHER_FILE):
        self.path, self.task, self.advice = None if path is None else Path(path), dict(task), advice

    def read(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The tensors and the figures that were written last; None if there is no file."""
        if self.path is None or not self.path.exists():
            return None
        from safetensors import SafetensorError, safe_open

        try:
            with torch.inference_mode(False), safe_open(self.path, "pt") as file:  # pyright: ignore
                about = json.loads((file.metadata() or {})["training"])
                task, figures = about["task"], about["figures"]
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
            raise BadOption(f"{self.path} is not the file of a training ({error}); {self.advice}") from error
        mine = json.loads(json.dumps(self.task))
        if task != mine:
            differing = [name for name in mine if not isinstance(task, dict) or task.get(name) != mine[name]]
            raise BadOption(
                f"{self.path} is the file of another training: it differs in {', '.join(differing) or 'its fields'}; "
                f"{self.advice}"
            )
        return tensors, figures

    def write(self, tensors: Mapping[str, Tensor], figures: Mapping[str, Any]) -> None:
        """Keep tensors and figures (JSON data), if there is a file to keep them in."""
        if self.path is None:
            return
        from safetensors.torch import save

        # One key: safetensors writes several in any order.
        metadata = {"training": json.dumps({"task": self.task, "figures": dict(figures)})}
        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        write_atomically(self.path, save(plain, metadata=metadata))
