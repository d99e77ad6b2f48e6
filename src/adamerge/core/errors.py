"""Every mistake a user can make, by name; each message says what was expected, what came and what to do."""


class AdamergeError(Exception):
    """Base of all errors that adamerge raises on purpose."""


class UnsupportedModel(AdamergeError, TypeError):
    """The model is of a kind that cannot be merged here."""


class NotApplied(AdamergeError, RuntimeError):
    """The call needs a model that `adamerge.apply` was called on (or one that has run since)."""


class BadOption(AdamergeError, ValueError):
    """A method, recipe or command was given a value it cannot take."""


class BadStats(AdamergeError, ValueError):
    """Calibration statistics are missing, damaged, or were made for another model."""


class BadImages(AdamergeError, ValueError):
    """Images are missing, unreadable or of the wrong shape."""


class PatchConflict(AdamergeError, RuntimeError):
    """Another library changed a module after `adamerge.apply` patched it, so that the patch cannot be undone."""


class BadWeights(AdamergeError, ValueError):
    """A weights file does not fit the model."""
