"""What a result was measured with."""

import platform
from importlib.metadata import PackageNotFoundError, version

import torch

import adamerge


def versions(device: str = "cpu") -> dict[str, str]:
    """Versions of everything that shapes a number, and the name of the machine's processor kind."""
    found = {"python": platform.python_version(), "machine": platform.machine(), "adamerge": adamerge.__version__}
    for name in ("torch", "timm", "torchvision"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    found["device"] = torch.cuda.get_device_name(device) if device.startswith("cuda") else "cpu"
    return found
