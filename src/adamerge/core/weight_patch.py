"""Patches: small changes of a model's parameters that belong to a recipe, and their safetensors files."""

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adamerge.core.errors import BadOption
from adamerge.core.parts import part

ADVICE = "Make it again with adamerge.repair, and keep the .json and the .safetensors file together."
# The file format; a file of another version is refused.
VERSION = 1


@part
@dataclass(frozen=True)
class WeightPatch:
    """Changes of parameters, by name, that are applied and removed together with a recipe.

    `content` is a safetensors file as base64 text.  It holds one tensor for each changed parameter, which is added to
    it, and the fingerprint of the model.
    """

    content: str = field(repr=False)

    def __post_init__(self) -> None:
        for name, change in self.changes.items():
            if not change.is_floating_point() or not bool(change.isfinite().all()):
                raise BadOption(f"the patch changes {name} by numbers that are not finite floats. {ADVICE}")

    @staticmethod
    def make(changes: Mapping[str, Tensor], model: Mapping[str, Any]) -> "WeightPatch":
        """A patch from the change of each parameter and the fingerprint of the model."""
        from safetensors.torch import save

        tensors = {name: change.detach().float().cpu().contiguous() for name, change in sorted(changes.items())}
        # One key: safetensors writes several in any order, and equal patches must be equal files.
        metadata = {"adamerge_patch": json.dumps({"version": VERSION, "model": dict(model)})}
        return WeightPatch.from_bytes(save(tensors, metadata=metadata))

    @staticmethod
    def from_bytes(content: bytes) -> "WeightPatch":
        """The patch in a safetensors file."""
        return WeightPatch(base64.b64encode(content).decode())

    @cached_property
    def data(self) -> bytes:
        """The content of the safetensors file."""
        try:
            return base64.b64decode(self.content, validate=True)
        except (binascii.Error, ValueError) as error:
            raise BadOption(f"the patch of this recipe is not base64 text: {error}. {ADVICE}") from error

    @cached_property
    def changes(self) -> dict[str, Tensor]:
        """What is added to each parameter, by the name of the parameter in the model."""
        from safetensors import SafetensorError
        from safetensors.torch import load

        try:
            if self._about["version"] != VERSION:
                raise ValueError(f"expected the version {VERSION}, found {self._about['version']!r}")
            with torch.inference_mode(False):
                return load(self.data)
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            raise BadOption(
                f"the patch of this recipe is not a safetensors file of a patch: {error}. {ADVICE}"
            ) from error

    @property
    def model(self) -> dict[str, Any]:
        """The fingerprint of the model that the patch was made for."""
        found = self._about.get("model")
        if not isinstance(found, dict):
            raise BadOption(f"the patch does not say which model it is for; found {found!r}. {ADVICE}")
        return found

    @property
    def numbers(self) -> int:
        """How many numbers it changes."""
        return sum(change.numel() for change in self.changes.values())

    @property
    def _about(self) -> dict[str, Any]:
        """What the file says of itself."""
        size = int.from_bytes(self.data[:8], "little")
        return json.loads(json.loads(self.data[8 : 8 + size])["__metadata__"]["adamerge_patch"])

    def __str__(self) -> str:
        return f"patch of {self.numbers} numbers in {len(self.changes)} parameters"


def refer_to_file(recipe: dict[str, Any], patch: WeightPatch, name: str) -> dict[str, Any]:
    """The JSON data of a recipe with the name of a file in the place of its patch."""
    digest = hashlib.sha256(patch.data).hexdigest()
    return {**recipe, "patch": {"part": WeightPatch.__name__, "file": name, "sha256": digest}}


def file_name(content: Any) -> str | None:
    """The name of the file that the JSON data of a recipe, bare or under its schema, refers to; None without any."""
    recipe = content.get("recipe", content) if isinstance(content, dict) else None
    patch = recipe.get("patch") if isinstance(recipe, dict) else None
    if not isinstance(patch, dict) or "file" not in patch:
        return None
    name = patch["file"]
    if not isinstance(name, str) or not name or Path(name).name != name:
        raise BadOption(f"the patch of a recipe is a file beside it, named without a folder; got {name!r}. {ADVICE}")
    return name


def read_patch_file(content: Any, path: Path) -> Any:
    """The JSON data of a recipe with the content of the file `path` in the place of the reference to it."""
    recipe = content.get("recipe", content)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadOption(f"cannot read the patch of the recipe, {path}: {error}. {ADVICE}") from error
    if hashlib.sha256(data).hexdigest() != recipe["patch"].get("sha256"):
        raise BadOption(f"{path} is not the patch that the recipe was written with: its SHA-256 differs. {ADVICE}")
    text = base64.b64encode(data).decode()
    embedded = {**recipe, "patch": {"part": WeightPatch.__name__, "content": text}}
    return {**content, "recipe": embedded} if "recipe" in content else embedded
