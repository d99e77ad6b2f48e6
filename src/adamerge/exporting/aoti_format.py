"""Files of AOTInductor: compiled code for one kind of device, which runs without Python too."""

import json
from io import BytesIO
from pathlib import Path
from shutil import which

import torch

from adamerge.core.errors import CannotExport, MissingPackage
from adamerge.exporting.formats import Metadata, Run
from adamerge.exporting.metadata import KEY
from adamerge.exporting.program import Program, quiet_torch


class AotInductor:
    """A package of AOTInductor.  It is compiled for the device that the model is on."""

    suffix = ".aoti.pt2"

    def check_installed(self) -> None:
        if which("g++") is None and which("clang++") is None:
            raise MissingPackage(
                "exporting to AOTInductor needs a C++ compiler, g++ or clang++, and there is none on the PATH. Install "
                "it with the system's package manager, such as: apt install g++"
            )

    def write(self, program: Program, path: Path, metadata: Metadata) -> None:
        options = {"aot_inductor.metadata": {KEY: json.dumps(metadata)}}
        # torch's own writer ends the process when the disk is full.
        content = BytesIO()
        try:
            with torch.no_grad(), quiet_torch():
                torch._inductor.aoti_compile_and_package(
                    program.exported, package_path=content, inductor_configs=options
                )
        except OSError:
            raise
        except Exception as error:  # the compiler, Triton and inductor have errors of their own
            first = next((line for line in str(error).splitlines() if line.strip()), "")
            raise CannotExport(f"AOTInductor cannot compile this model: {type(error).__name__}: {first}") from error
        path.write_bytes(content.getbuffer())

    def read_metadata(self, path: Path) -> Metadata:
        with quiet_torch():
            return json.loads(torch._inductor.aoti_load_package(str(path)).get_metadata()[KEY])

    def load(self, path: Path, outputs: tuple[str, ...], device: str) -> Run:
        with quiet_torch():
            compiled = torch._inductor.aoti_load_package(str(path))

        def run(images):
            with torch.no_grad():
                found = compiled(images)
            return dict(zip(outputs, found if isinstance(found, (tuple, list)) else (found,), strict=True))

        return run
