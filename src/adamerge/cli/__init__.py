"""The command line of the library."""

from adamerge.cli.app import main

__all__ = ["main"]
