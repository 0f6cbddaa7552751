"""Engines that are played beside `host`, because some of its code runs only in them."""

from __future__ import annotations

import importlib
import zlib
from typing import Any

from blockstep.spec.vocabulary import Config

COLLIDING = f"{__name__}:make_colliding"
"""As `blockstep check --engine` takes it."""


def make_colliding(config: Config) -> Any:
    """The host engine with a digest of two bits, so that every hit must be verified.

    Imported here and not above: a mutant's process imports the engine again.
    """
    host = importlib.import_module("blockstep.impl.host")
    return host.HostEngine(config, host.Digest("two bits", False, _digest_in_two_bits))


def _digest_in_two_bits(message: bytes) -> bytes:
    return bytes((zlib.crc32(message) & 3,))
