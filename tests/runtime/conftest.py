"""Kernels are tested where there is a Triton that they can be used with."""

from importlib.util import find_spec


def _usable() -> bool:
    if find_spec("triton") is None:
        return False
    from adamerge.runtime.kernels.launch import too_old

    return too_old() is None


collect_ignore_glob = [] if _usable() else ["kernels/*", "test_fused.py"]
