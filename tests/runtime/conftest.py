"""Kernels are tested where there is a Triton that they can be used with."""

from importlib.util import find_spec


def _usable() -> bool:
    if find_spec("triton") is None:
        return False
    from adamerge.runtime.triton.kernels.launch import why_triton_too_old

    return why_triton_too_old() is None


collect_ignore_glob = [] if _usable() else ["triton/*"]
