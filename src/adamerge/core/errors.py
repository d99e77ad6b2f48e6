"""The errors that the library raises on purpose; a message says what was expected, what was given and what to do."""

from typing import Any


class AdamergeError(Exception):
    """Base of all errors that adamerge raises on purpose."""


class UnsupportedModel(AdamergeError, TypeError):
    """The library cannot merge tokens in a model of this kind."""


class NotApplied(AdamergeError, RuntimeError):
    """The call needs a model that `adamerge.apply` was called on, or one that has run since then."""


class BadOption(AdamergeError, ValueError):
    """A method, recipe or command was given a value it cannot take."""


class BadStats(AdamergeError, ValueError):
    """Calibration statistics are missing, damaged, or were made for another model."""


class BadImages(AdamergeError, ValueError):
    """Images are missing, unreadable or of the wrong shape."""


class PatchConflict(AdamergeError, RuntimeError):
    """Another library changed a module after `adamerge.apply` patched it, so that the patch cannot be undone."""


class HookNotCalled(AdamergeError, RuntimeError):
    """A module has a hook, or a `forward` of its own, that a merged model would not call."""


class BadWeights(AdamergeError, ValueError):
    """A weights file does not fit the model."""


class BadOutput(AdamergeError, OSError):
    """A result cannot be written to the path that was given for it.

    If that is found only after the work, `result` is what was computed.
    """

    result: Any = None


class ProcessLost(AdamergeError, RuntimeError):
    """Another process of the same run ended before its work was done."""


class MissingPackage(AdamergeError, ImportError):
    """A feature needs a package that is not installed."""


class CannotExport(AdamergeError, RuntimeError):
    """A merged model cannot be written in the format that was asked for."""
