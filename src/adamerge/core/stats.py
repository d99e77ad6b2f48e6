"""Calibrated statistics: `calibrate` measures them, `stats.json` stores them, adaptive budgets read them."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxtyping import Float
from torch import Tensor

from adamerge.core.checks import is_finite_number
from adamerge.core.errors import BadImages, BadStats
from adamerge.core.files import is_schema, read_json, write_atomically
from adamerge.core.parts import part

SCHEMA = 1


@part
@dataclass(frozen=True)
class LayerStats:
    """Mean and standard deviation of the redundancy over the calibration images, for each layer.

    `threshold` has one threshold for each layer, for budgets that need them.  Idle layers have mean 0, std 0 and the
    lowest threshold, which are not used.  `model` is the fingerprint of the model and `recipe` the recipe (as JSON
    data) that were measured.  Both may be empty: such statistics are only checked for their depth.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    threshold: tuple[float, ...] = ()
    images: int = 0
    how: str = "by hand"
    passes: int = 0
    model: Mapping[str, Any] = field(default_factory=dict)
    recipe: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.mean) == 0 or len(self.mean) != len(self.std):
            raise BadStats(
                f"statistics need one mean and one std for each layer; got {len(self.mean)} means and "
                f"{len(self.std)} stds. Run `adamerge calibrate` again."
            )
        if self.threshold and len(self.threshold) != len(self.mean):
            raise BadStats(
                f"statistics need one threshold for each of {len(self.mean)} layers, or none at all; "
                f"got {len(self.threshold)}. Run `adamerge calibrate` again."
            )
        for name, values in (("mean", self.mean), ("std", self.std), ("threshold", self.threshold)):
            for layer, value in enumerate(values):
                if not is_finite_number(value) or (name == "std" and value < 0):
                    wanted = "a finite number >= 0" if name == "std" else "a finite number"
                    raise BadStats(
                        f"{name} of layer {layer} must be {wanted}; got {value!r}. Run `adamerge calibrate` again."
                    )

        self._check_origin()

    def _check_origin(self) -> None:
        """Refuse what cannot say where the statistics come from."""
        for name, number in (("images", self.images), ("passes", self.passes)):
            if not isinstance(number, int) or not is_finite_number(number) or number < 0:
                raise BadStats(f"{name} must be a whole number >= 0; got {number!r}. Run `adamerge calibrate` again.")
        for name, mapping in (("model", self.model), ("recipe", self.recipe)):
            if not isinstance(mapping, Mapping):
                raise BadStats(f"{name} must be a mapping; got {mapping!r}. Run `adamerge calibrate` again.")
        sketch = self.model.get("sketch", [])
        if not isinstance(sketch, (list, tuple)) or not all(map(is_finite_number, sketch)):
            raise BadStats(
                f"the sketch of the model must be a list of finite numbers; got {str(sketch)[:200]}. "
                "Run `adamerge calibrate` again."
            )

    @property
    def depth(self) -> int:
        """The number of layers."""
        return len(self.mean)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a JSON file.  The write is atomic: a killed process leaves the old file or none."""
        write_atomically(path, self.file_text())

    def file_text(self) -> str:
        """What `save` writes."""
        content = {
            "schema": SCHEMA,
            "how": self.how,
            "images": self.images,
            "passes": self.passes,
            "mean": list(self.mean),
            "std": list(self.std),
            "threshold": list(self.threshold),
            "model": dict(self.model),
            "recipe": dict(self.recipe),
        }
        return json.dumps(content, indent=1) + "\n"

    @staticmethod
    def load(path: str | os.PathLike[str]) -> "LayerStats":
        """Read a file that `save` wrote; any other file is an error that gives the reason."""
        content = read_json(path, "statistics", "Make them with `adamerge calibrate`.", BadStats)
        if not isinstance(content, dict) or "schema" not in content:
            raise BadStats(f"{path} has no 'schema': it is not a file that `adamerge calibrate` wrote.")
        if not is_schema(content["schema"], SCHEMA):
            raise BadStats(
                f"{path} has schema {content['schema']!r}; this version reads schema {SCHEMA}. "
                "Run `adamerge calibrate` again with this version."
            )
        try:
            return LayerStats(**_typed(content))
        except BadStats as error:
            raise BadStats(f"{path}: {error}") from error


_FIELDS: dict[str, type] = {
    "how": str,
    "images": int,
    "passes": int,
    "mean": list,
    "std": list,
    "threshold": list,
    "model": dict,
    "recipe": dict,
}


def _typed(content: dict[str, Any]) -> dict[str, Any]:
    """The fields of a statistics file, each checked for its type."""
    unknown = sorted(set(content) - set(_FIELDS) - {"schema"})
    missing = sorted(set(_FIELDS) - set(content))
    if unknown or missing:
        raise BadStats(
            f"a statistics file has the fields {', '.join(_FIELDS)}; missing: {missing}, unknown: {unknown}. "
            "Run `adamerge calibrate` again."
        )
    for name, kind in _FIELDS.items():
        if not isinstance(content[name], kind) or isinstance(content[name], bool):
            raise BadStats(
                f"the field {name!r} must be a {kind.__name__}; got {content[name]!r}. Run `adamerge calibrate` again."
            )
    return {name: tuple(content[name]) if kind is list else content[name] for name, kind in _FIELDS.items()}


def summarise(redundancy: Float[Tensor, "b l"], thresholds: Sequence[float] = ()) -> LayerStats:
    """Mean and population standard deviation over the images (D13).

    Images whose redundancy is not finite at some layer are left out.
    """
    finite = redundancy[redundancy.isfinite().all(1)]
    if len(finite) == 0:
        raise BadImages("every calibration image gives non-finite features; check the preprocessing and the dtype")
    mean, std = finite.mean(0).tolist(), finite.std(0, correction=0).tolist()
    return LayerStats(tuple(mean), tuple(std), tuple(thresholds), images=len(finite))
