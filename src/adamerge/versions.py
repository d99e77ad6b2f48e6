"""What a result was measured with."""

import platform
from importlib.metadata import PackageNotFoundError, version

import torch


def versions(device: str = "cpu") -> dict[str, str]:
    """Versions of everything that shapes a number, and the name of the machine's processor kind."""
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for name in ("adamerge", "torch", "timm", "torchvision"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    found["device"] = torch.cuda.get_device_name(device) if device.startswith("cuda") else "cpu"
    return found
