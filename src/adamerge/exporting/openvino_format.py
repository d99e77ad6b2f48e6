"""OpenVINO files, run by OpenVINO on a CPU."""

import json
from pathlib import Path
from typing import Any

import torch

from adamerge.core.packages import import_package
from adamerge.exporting.formats import Metadata, Run
from adamerge.exporting.metadata import KEY
from adamerge.exporting.onnx_format import to_onnx
from adamerge.exporting.program import INPUT, Program

WHAT = "exporting to OpenVINO"


class OpenVino:
    """An OpenVINO file `name.xml` with its weights in `name.bin`, converted from ONNX."""

    suffix = ".xml"

    def check_installed(self) -> None:
        for package in ("onnx", "onnxscript", "openvino"):
            import_package(package, WHAT, "export")

    def write(self, program: Program, path: Path, metadata: Metadata) -> None:
        openvino = import_package("openvino", WHAT, "export")
        between = path.with_suffix(".onnx")
        to_onnx(program).save(between, external_data=True)
        model = openvino.convert_model(str(between))
        model.set_rt_info(json.dumps(metadata), [KEY])
        # Weights in float32: the engine chooses a smaller type when it loads them, if it is told to.
        openvino.save_model(model, str(path), compress_to_fp16=False)
        del model
        for part in (between, between.with_name(f"{between.name}.data")):
            part.unlink(missing_ok=True)

    def read_metadata(self, path: Path) -> Metadata:
        openvino = import_package("openvino", WHAT, "export")
        return json.loads(openvino.Core().read_model(str(path)).get_rt_info([KEY]).astype(str))

    def load(self, path: Path, outputs: tuple[str, ...], device: str) -> Run:
        compiled = compile_file(path)

        def run(images):
            found = compiled({INPUT: images.numpy()})
            return {name: torch.from_numpy(found[name].copy()) for name in outputs}

        return run


def compile_file(path: Path, precision: str = "f32", threads: int | None = None, batch: int | None = None) -> Any:
    """An OpenVINO file compiled for the CPU; `threads` is by default the number that torch uses.

    `precision` is "f32" or "bf16".  With `batch`, the number of images is fixed, which lets OpenVINO plan ahead.
    """
    openvino = import_package("openvino", "running OpenVINO files", "export")
    model = openvino.Core().read_model(str(path))
    if batch is not None:
        shape = model.inputs[0].partial_shape
        shape[0] = batch
        model.reshape(shape)
    threads = torch.get_num_threads() if threads is None else threads
    options = {
        "INFERENCE_PRECISION_HINT": precision,
        "INFERENCE_NUM_THREADS": threads,
        "PERFORMANCE_HINT": "LATENCY",
    }
    return openvino.Core().compile_model(model, "CPU", options)
