"""`adamerge.export`: a merged model as a file of another engine, compared with the model before it is put in place."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from adamerge.core.errors import BadImages, BadOption, BadOutput, CannotExport, NotApplied
from adamerge.core.files import check_can_write
from adamerge.core.recipe import Recipe
from adamerge.core.requirements import check_can_run
from adamerge.data.batches import BATCH, Images, batches
from adamerge.exporting.check import Check, compare
from adamerge.exporting.formats import FOREIGN, Format, find_format, target_path
from adamerge.exporting.metadata import describe
from adamerge.exporting.program import Program, export_program, tensors_of
from adamerge.hosts.base import Host, find_host
from adamerge.patching.apply import apply, temporarily_patched
from adamerge.patching.stack import installed

# At most this many images are read and compared.
MOST_CHECKED = 256


@dataclass(frozen=True)
class Exported:
    """An exported file: where it is, its format, its metadata, and how it compared with the model."""

    path: Path
    format: str
    metadata: dict[str, Any]
    check: Check

    def __str__(self) -> str:
        return f"{self.path} ({self.format}): {self.check}"


def export(
    model: nn.Module,
    images: Images,
    format: str = "onnx",
    path: str | os.PathLike[str] | None = None,
    *,
    recipe: Recipe | str | os.PathLike[str] | None = None,
) -> Exported:
    """Write a merged model as a file that another engine runs.  The model itself stays as it is.

    The file is run by its own engine on `images` and compared with the model in torch.  It is put in place only if they
    agree; before that nothing is at `path`, and a file that was there stays.  Recipe, fingerprint of the weights and
    preprocessing are in its metadata.  It takes any number of images at once.

    Args:
        model: a supported model, with a recipe applied.
        images: real images, preprocessed for the model: a tensor, or an iterable of batches or of (images, labels).
            At most 256 are used.
        format: "onnx", "openvino", "torch" (`torch.export`) or "aoti" (AOTInductor, compiled for the model's device).
        path: the file to write; by default `model` with the suffix of the format, in the current folder.
        recipe: what to merge, in the place of the applied recipe.  `adamerge.methods.none()` exports the plain model.
    """
    writer = find_format(format)
    target = target_path(format, path)
    host = find_host(model)
    chosen = _recipe(host, recipe)
    _check_model(model, format)
    check_can_write(target)
    writer.check_installed()
    seen = gather(images, host, next(model.parameters()))
    with temporarily_patched(model):
        apply(model, chosen, "reference")
        expected = reference_outputs(host, seen)
        program = export_program(host, chosen, seen, tuple(expected))
        metadata = describe(host, chosen, program)
    check = write_checked(writer, program, target, metadata, seen, expected)
    return Exported(target, format, metadata, check)


def _recipe(host: Host, recipe: Recipe | str | os.PathLike[str] | None) -> Recipe:
    """The recipe to export, which must have fixed counts."""
    if recipe is None:
        stack = installed(host)
        if stack is None:
            raise NotApplied(
                "this model does not merge; call adamerge.apply(model, recipe) first, or give export(…, recipe=…). "
                "recipe=adamerge.methods.none() exports the model without merging."
            )
        recipe = stack.recipe
    if isinstance(recipe, (str, os.PathLike)):
        recipe = Recipe.load(recipe)
    check_can_run(recipe, host.depth, host.class_token)
    if recipe.ragged:
        raise CannotExport(
            f"the counts of this recipe adapt to the image ({type(recipe.budget).__name__}), and a file has fixed "
            "shapes; padding every image to the widest would lose much of the saving (docs/export.md). Use a recipe "
            "with the same count for every image: adamerge.tune(…, static=True), adamerge.presets.best(…, "
            "static=True), or a method such as adamerge.methods.tome(8)."
        )
    return recipe


def _check_model(model: nn.Module, format: str) -> None:
    parameter = next(model.parameters())
    if format in FOREIGN and (parameter.dtype != torch.float32 or parameter.device.type != "cpu"):
        raise BadOption(
            f"the format {format} takes a float32 model on a CPU; this one is {parameter.dtype} on "
            f"{parameter.device}. Call model.float().cpu() first; the engine can compute in bfloat16 when it runs."
        )


def gather(images: Images, host: Host, like: Tensor) -> Tensor:
    """The first images as one tensor, with dtype and device of `like`."""
    found: list[Tensor] = []
    for batch in batches(images):
        found.append(batch)
        if sum(map(len, found)) >= MOST_CHECKED:
            break
    if not found:
        raise BadImages("there are no images; pass at least one, preprocessed for the model")
    shapes = {tuple(batch.shape[1:]) for batch in found}
    if shapes != {host.image}:
        raise BadImages(
            f"this model takes images of shape {host.image}; got {', '.join(map(str, sorted(shapes)))}. An exported "
            "model has one image size: that of the model."
        )
    return torch.cat(found)[:MOST_CHECKED].to(like.device, like.dtype)


def reference_outputs(host: Host, images: Tensor) -> dict[str, Tensor]:
    """What the model gives as it is now, by name."""
    entry = host.entry or host.model
    with torch.no_grad():
        parts = [tensors_of(entry(batch)) for batch in images.split(BATCH)]
    return {name: torch.cat([part[name] for part in parts]).cpu() for name in parts[0]}


def write_checked(
    writer: Format,
    program: Program,
    target: Path,
    metadata: dict[str, Any],
    images: Tensor,
    expected: dict[str, Tensor],
) -> Check:
    """Write beside `target`, compare, and put the files in place if they agree."""
    needed = 2 * sum(tensor.nbytes for tensor in program.exported.state_dict.values())
    with _folder_beside(target, needed) as folder:
        made = folder / target.name
        try:
            writer.write(program, made, metadata)
        except (OSError, RuntimeError) as reason:
            if isinstance(reason, (CannotExport, ImportError)):
                raise
            raise BadOutput(
                f"cannot write {target}: {str(reason).splitlines()[0]}. Is the disk full? Give another path, or make "
                "room there. Nothing was left behind."
            ) from reason
        run = writer.load(made, program.outputs, images.device.type)
        # Of two sizes, so that the number of images is seen to be free.
        parts = [run(images[:1]), *(run(batch) for batch in images[1:].split(BATCH) if len(batch))]
        given = {name: torch.cat([part[name].cpu() for part in parts]) for name in program.outputs}
        check = compare(expected, given)
        if not check.passed:
            raise CannotExport(
                f"the exported file does not give what the model gives: {check}. It was not written to {target}. Other "
                "formats may work; this should not happen with the models that the README lists."
            )
        del run
        _put_in_place(folder, target)
    return check


@contextmanager
def _folder_beside(target: Path, needed: int) -> Iterator[Path]:
    """An empty folder on the disk of `target`, removed afterwards."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(target.parent).free
        if free < needed:
            raise BadOutput(
                f"cannot write {target}: the disk has {free / 1e6:.1f} MB left and the export needs about "
                f"{needed / 1e6:.1f} MB. Give another path, or make room there."
            )
        folder = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    except OSError as reason:
        if isinstance(reason, BadOutput):
            raise
        raise BadOutput(f"cannot write {target}: {reason.strerror}. Give another path.") from reason
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _put_in_place(folder: Path, target: Path) -> None:
    """Move the files of an export to their place, the one that readers open last."""
    others = sorted(part for part in folder.iterdir() if part.name != target.name)
    if others:
        target.unlink(missing_ok=True)
    for part in (*others, folder / target.name):
        os.replace(part, target.parent / part.name)
