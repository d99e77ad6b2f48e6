"""Files of torch.export: `torch.export.load` reads them, without adamerge."""

import json
from io import BytesIO
from pathlib import Path

import torch

from adamerge.exporting.formats import Metadata, Run
from adamerge.exporting.metadata import KEY
from adamerge.exporting.program import Program, quiet_torch

# torch.export keeps text files inside its own.
TEXT = f"{KEY}.json"


class TorchExport:
    """An `ExportedProgram` as a file."""

    suffix = ".pt2"

    def check_installed(self) -> None:
        """torch is always there."""

    def write(self, program: Program, path: Path, metadata: Metadata) -> None:
        # torch's own writer ends the process when the disk is full.
        content = BytesIO()
        with quiet_torch():
            torch.export.save(program.exported, content, extra_files={TEXT: json.dumps(metadata)})
        path.write_bytes(content.getbuffer())

    def read_metadata(self, path: Path) -> Metadata:
        texts = {TEXT: ""}
        with quiet_torch():
            torch.export.load(path, extra_files=texts)
        return json.loads(texts[TEXT])

    def load(self, path: Path, outputs: tuple[str, ...], device: str) -> Run:
        with quiet_torch():
            module = torch.export.load(path).module()

        def run(images):
            with torch.no_grad():
                return dict(zip(outputs, module(images), strict=True))

        return run
