"""The command line, thin over the library."""

from adamerge.cli.app import main

__all__ = ["main"]
