"""Every error Outrider raises on purpose. Each message names the offending value and the remedy."""

from __future__ import annotations

__all__ = [
    "CapacityError",
    "ConfigError",
    "InvalidRequestError",
    "ModelLoadError",
    "OutriderError",
    "UnsupportedModelError",
    "VocabularyMismatchError",
]


class OutriderError(Exception):
    """Root of the tree: catch this to catch everything Outrider raises on purpose."""


class ConfigError(OutriderError, ValueError):
    """An engine setting is out of range or does not fit the others."""


class InvalidRequestError(OutriderError, ValueError):
    """One request's prompt or sampling parameters are wrong; other requests are untouched."""


class ModelLoadError(OutriderError):
    """A checkpoint is missing, incomplete, or in a format Outrider does not read."""


class UnsupportedModelError(ModelLoadError):
    """The checkpoint is readable, but its architecture cannot be served exactly."""


class VocabularyMismatchError(ModelLoadError):
    """Target and draft give the same token id different meanings."""


class CapacityError(OutriderError):
    """The memory asked for is not there, or a request can never fit into it."""
