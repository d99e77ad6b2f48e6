"""Other engines as contenders of a benchmark: OpenVINO, ONNX Runtime and AOTInductor run exported files."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from adamerge.core.errors import BadOption, MissingPackage
from adamerge.core.packages import import_package
from adamerge.core.recipe import Recipe
from adamerge.experiments.benchmark.contenders import Contender, Run, pricing, twin
from adamerge.experiments.benchmark.entries import Entry
from adamerge.exporting.api import export
from adamerge.exporting.formats import find_format
from adamerge.exporting.onnx_format import open_session
from adamerge.exporting.openvino_format import compile_file
from adamerge.exporting.program import INPUT
from adamerge.flops import meter
from adamerge.methods import none
from adamerge.patching.apply import apply, remove

TORCH = "torch"
# Engine -> its ways in a benchmark.  Those of torch are the ways that `adamerge bench` has without engines.
ENGINES: dict[str, tuple[str, ...]] = {
    TORCH: (),
    "openvino": ("openvino", "openvino bf16"),
    "onnxruntime": ("onnxruntime", "onnxruntime int8"),
    "aoti": ("aoti",),
}
# An export in a benchmark is compared with the model on this many images.
CHECKED = 8


@dataclass
class EngineFiles:
    """Exported files of a benchmark, each written once, in a temporary folder."""

    folder: TemporaryDirectory[str] = field(default_factory=lambda: TemporaryDirectory(prefix="adamerge-bench-"))
    made: dict[tuple[str, str], Path] = field(default_factory=dict)

    def file(self, model: nn.Module, recipe: Recipe, format: str, images: Tensor) -> Path:
        """The file of a model with a recipe."""
        key = recipe.to_json(), format
        if key not in self.made:
            path = Path(self.folder.name) / f"{len(self.made)}{find_format(format).suffix}"
            net = twin(model)
            if format == "onnx":
                net, images = net.float().cpu(), images.float().cpu()
            export(net, images[:CHECKED], format, path, recipe=recipe)
            self.made[key] = path
        return self.made[key]

    def quantized(self, model: nn.Module, recipe: Recipe, images: Tensor) -> Path:
        """The ONNX file with weights in int8; activations are quantized as they come."""
        key = recipe.to_json(), "int8"
        if key not in self.made:
            tools = import_package("onnxruntime.quantization", "int8 in ONNX Runtime", "export")
            plain = self.file(model, recipe, "onnx", images)
            path = plain.with_suffix(".int8.onnx")
            # Without the recorded shapes of values between operators, which the tool would compare with its own.
            graph = import_package("onnx", "int8 in ONNX Runtime", "export").load(plain)
            graph.graph.ClearField("value_info")
            level = logging.root.level
            logging.root.setLevel(logging.ERROR)
            try:
                tools.quantize_dynamic(graph, str(path), op_types_to_quantize=["MatMul", "Gemm"])
            finally:
                logging.root.setLevel(level)
            self.made[key] = path
        return self.made[key]


def read_engines(names: Sequence[str]) -> list[str]:
    """The ways of these engines, besides those of torch; unknown and missing engines are refused."""
    for name in names:
        if name not in ENGINES:
            raise BadOption(f"there is no engine {name!r}; choose from {', '.join(ENGINES)}")
        if name != TORCH:
            find_format({"onnxruntime": "onnx"}.get(name, name)).check_installed()
    return [way for name in names for way in ENGINES[name]]


def engine_contenders(
    model: nn.Module, entries: Sequence[Entry], ways: Sequence[str], files: EngineFiles
) -> Iterator[Contender]:
    """The unmerged model and every entry with fixed counts, on every engine."""
    prices = meter(model)
    unmerged = Entry("none", none())
    for entry in (unmerged, *entries):
        recipe = entry.recipe
        if recipe is None:
            continue
        net = remove(twin(model)) if entry is unmerged else apply(twin(model), recipe, "reference")
        price = (lambda images: prices.unmerged()) if entry is unmerged else pricing(net, recipe, prices)
        for way in ways:
            yield Contender(entry.method, way, _preparing(way, net, recipe, files), price, facts=entry.facts)


def _preparing(way: str, model: nn.Module, recipe: Recipe, files: EngineFiles) -> Callable[[Tensor], Run]:
    def prepare(images: Tensor) -> Run:
        if way == "aoti":
            return _aoti(files.file(model, recipe, "aoti", images))
        if way.startswith("openvino"):
            return _openvino(files.file(model, recipe, "onnx", images), len(images), way)
        path = files.quantized(model, recipe, images) if way.endswith("int8") else None
        return _onnxruntime(path or files.file(model, recipe, "onnx", images), images.device)

    return prepare


def _aoti(path: Path) -> Run:
    compiled: Run = torch._inductor.aoti_load_package(str(path))
    return compiled


def _openvino(path: Path, batch: int, way: str) -> Run:
    """OpenVINO on a fixed number of images, as it is deployed."""
    request = compile_file(path, "bf16" if way.endswith("bf16") else "f32", batch=batch).create_infer_request()
    return lambda images: request.infer({0: images.numpy()}, share_inputs=True)


def _onnxruntime(path: Path, device: torch.device) -> Run:
    if device.type != "cuda":
        session = open_session(path)
        return lambda images: session.run(None, {INPUT: images.numpy()})
    return _onnxruntime_on_cuda(path, device)


def _onnxruntime_on_cuda(path: Path, device: torch.device) -> Run:
    """ONNX Runtime on images that are on the device already, in float32."""
    runtime = import_package("onnxruntime", "running ONNX files", "export")
    provider = "CUDAExecutionProvider"
    if provider not in runtime.get_available_providers():
        raise MissingPackage("this onnxruntime has no CUDA provider. Install it: pip install onnxruntime-gpu")
    session: Any = runtime.InferenceSession(str(path), providers=[provider])
    names = [output.name for output in session.get_outputs()]

    def run(images: Tensor) -> Any:
        images = images.float().contiguous()
        binding = session.io_binding()
        where = ("cuda", device.index or 0)
        binding.bind_input(INPUT, *where, "float32", tuple(images.shape), images.data_ptr())
        for name in names:
            binding.bind_output(name, *where)
        torch.cuda.current_stream(device).synchronize()
        session.run_with_iobinding(binding)
        return binding

    return run
