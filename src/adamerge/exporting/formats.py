"""The formats of exported models by name: how each is written, and how its engine runs it."""

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from adamerge.core.errors import BadOption
from adamerge.exporting.program import Program

Run = Callable[[Tensor], Mapping[str, Tensor]]
Metadata = Mapping[str, Any]


@runtime_checkable
class Format(Protocol):
    """A kind of file.  Its packages are imported when the first of these functions is called."""

    suffix: str

    def check_installed(self) -> None:
        """Raise an error that says what to install, if something is missing."""
        ...

    def write(self, program: Program, path: Path, metadata: Metadata) -> None:
        """Write the file, and any others beside it that belong to it."""
        ...

    def read_metadata(self, path: Path) -> Metadata:
        """The metadata of a written file."""
        ...

    def load(self, path: Path, outputs: tuple[str, ...], device: str) -> Run:
        """The file as a function from images to outputs by name, run by its own engine."""
        ...


# Name -> the module and the class of it.
FORMATS = {
    "onnx": ("onnx_format", "Onnx"),
    "openvino": ("openvino_format", "OpenVino"),
    "torch": ("torch_format", "TorchExport"),
    "aoti": ("aoti_format", "AotInductor"),
}
# Formats that other engines read; these take float32 models on a CPU.
FOREIGN = ("onnx", "openvino")


def find_format(name: str) -> Format:
    """The format of that name."""
    if name not in FORMATS:
        raise BadOption(f"format must be one of {', '.join(FORMATS)}; got {name!r}")
    module, kind = FORMATS[name]
    return getattr(import_module(f"adamerge.exporting.{module}"), kind)()


def target_path(name: str, path: str | os.PathLike[str] | None) -> Path:
    """Where a file of format `name` is written: `path`, or `model` with the suffix of the format."""
    suffix = find_format(name).suffix
    target, ending = Path(f"model{suffix}" if path is None else path), f".{suffix.rpartition('.')[2]}"
    if target.suffix != ending:
        raise BadOption(f"the name of a file of the format {name} ends in {ending}; got {str(path)!r}")
    return target
