"""The versions and the device that a result was measured with."""

import platform
from importlib.metadata import PackageNotFoundError, version

import torch

import adamerge


def versions(device: str = "cpu") -> dict[str, str]:
    """Versions of Python and of the libraries that affect results, the machine type and the device name."""
    found = {"python": platform.python_version(), "machine": platform.machine(), "adamerge": adamerge.__version__}
    for name in ("torch", "timm", "torchvision"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    found["device"] = torch.cuda.get_device_name(device) if device.startswith("cuda") else "cpu"
    return found
