"""Imports packages that not every installation has, with an error that says how to install them."""

from importlib import import_module
from types import ModuleType

from adamerge.core.errors import MissingPackage


def import_package(name: str, what: str, extra: str) -> ModuleType:
    """The module `name`; without it, an error that says `what` needs it and which extra of adamerge installs it."""
    try:
        return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise MissingPackage(
            f"{what} needs the package {package}, which cannot be imported ({error}). "
            f"Install it: pip install 'adamerge[{extra}]'"
        ) from error
