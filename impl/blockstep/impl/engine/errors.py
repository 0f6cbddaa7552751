"""Errors: input that the engine refuses. Each message names the input, the rule and the fix."""

from __future__ import annotations


class EngineError(Exception):
    """The engine cannot do what was asked. Only its subclasses are raised for bad input."""


class CheckpointError(EngineError):
    """The folder does not hold a model that can be run."""


class SettingsError(EngineError):
    """The settings contradict each other, the model or the machine."""


class RequestError(EngineError):
    """One request cannot be served; the others are not affected."""
