"""ONNX files, run by ONNX Runtime."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from adamerge.core.errors import CannotExport
from adamerge.core.packages import import_package
from adamerge.exporting.formats import Metadata, Run
from adamerge.exporting.metadata import KEY
from adamerge.exporting.program import BATCH, INPUT, Program, quiet_torch

WHAT = "exporting to ONNX"
# A protobuf file ends at 2 GiB; larger weights go to a file beside it.
LARGEST_FILE = 1_900_000_000


class Onnx:
    """An ONNX file with a free batch dimension; weights beyond 2 GiB are in a second file."""

    suffix = ".onnx"

    def check_installed(self) -> None:
        for package in ("onnx", "onnxscript", "onnxruntime"):
            import_package(package, WHAT, "export")

    def write(self, program: Program, path: Path, metadata: Metadata) -> None:
        made = to_onnx(program)
        made.model.metadata_props[KEY] = json.dumps(metadata)
        large = sum(tensor.nbytes for tensor in program.exported.state_dict.values()) > LARGEST_FILE
        made.save(path, external_data=large)

    def read_metadata(self, path: Path) -> Metadata:
        onnx = import_package("onnx", WHAT, "export")
        model = onnx.load(path, load_external_data=False)
        return json.loads(next(each.value for each in model.metadata_props if each.key == KEY))

    def load(self, path: Path, outputs: tuple[str, ...], device: str) -> Run:
        session = open_session(path)

        def run(images):
            found = session.run(list(outputs), {INPUT: images.numpy()})
            return {name: torch.from_numpy(value) for name, value in zip(outputs, found, strict=True)}

        return run


def open_session(path: Path, threads: int | None = None) -> Any:
    """An ONNX Runtime session on the CPU; `threads` is by default the number that torch uses."""
    runtime = import_package("onnxruntime", "running ONNX files", "export")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads() if threads is None else threads
    options.log_severity_level = 3
    # Threads that wait for the next run at full speed would slow down whatever else runs: another engine, for example.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def to_onnx(program: Program) -> Any:
    """The program as an ONNX program of torch.onnx, with the names of inputs and outputs set."""
    import_package("onnxscript", WHAT, "export")
    try:
        with quiet_torch(), _quiet_onnx():
            made = torch.onnx.export(
                program.exported,
                (),
                dynamo=True,
                verbose=False,
                optimize=False,
                input_names=[INPUT],
                output_names=list(program.outputs),
                custom_translation_table={torch.ops.aten.sort.stable: _stable_sort},
            )
            assert made is not None
            _simplify(made.model)
    except Exception as error:  # torch raises many types for what it cannot convert
        last = [line for line in str(error).splitlines() if "No ONNX function" in line]
        raise CannotExport(
            f"torch.onnx cannot convert this model: {last[0] if last else type(error).__name__}. A part of the model "
            "or of the recipe uses an operator that ONNX does not have; the format torch keeps all operators."
        ) from error
    _name_batch(made.model.graph)
    return made


def _stable_sort(self: Any, stable: bool = True, dim: int = -1, descending: bool = False) -> Any:
    """torch's stable sort, which torch.onnx does not know: by ONNX's definition, TopK puts equal values in order."""
    op = import_package("onnxscript", WHAT, "export").opset18
    size = op.Gather(op.Shape(self), op.Constant(value_ints=[dim]), axis=0)
    return op.TopK(self, size, axis=dim, largest=int(descending), sorted=1)


def _simplify(model: Any) -> None:
    """Fold constants and remove what is not used.

    torch.onnx would also search for patterns to rewrite, which takes minutes for such graphs and gains nothing:
    engines optimise a graph when they load it.
    """
    optimizer = import_package("onnxscript.optimizer", WHAT, "export")
    passes = import_package("onnx_ir.passes.common", WHAT, "export")
    optimizer.inline(model)
    optimizer.fold_constants_ir(model)
    optimizer.remove_unused_nodes(model)
    for each in (
        passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        passes.DeduplicateInitializersPass(),
        passes.CommonSubexpressionEliminationPass(),
        passes.OutputFixPass(),
        passes.NameFixPass(),
    ):
        each(model)


def _name_batch(graph: Any) -> None:
    """Call the free dimension `batch`; torch.onnx calls it `s34` or so."""
    for value in (*graph.inputs, *graph.outputs):
        if value.shape is not None and not isinstance(value.shape[0], int):
            value.shape[0] = BATCH


@contextmanager
def _quiet_onnx() -> Iterator[None]:
    """Without what torch.onnx logs about its steps."""
    names = ("torch.onnx", "onnxscript", "onnx_ir")
    levels = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
