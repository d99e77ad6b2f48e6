"""Kernels are tested where Triton is recent enough for them to be used, as `runtime/kernels/launch.py` has it."""

from importlib.metadata import version

recent = tuple(int(part) for part in version("triton").split(".")[:2]) >= (3, 6)
collect_ignore_glob = [] if recent else ["kernels/*", "test_fused.py"]
